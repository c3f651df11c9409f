"""The NumPy oracle in int8 mode, and where float32 rounding decides what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest

from headrace import reference
from headrace.formats.checkpoint import Checkpoint
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.reference import Reference, ReferenceSession

NEAR_TIE = 3e-5  # of an int8 step: several times what float32 rounding moves a value by


def int8_oracle(checkpoint: Checkpoint) -> Reference:
    frequencies = {INV_FREQ: inverse_frequencies(checkpoint.config)[None]}
    return Reference(build_graph(checkpoint), checkpoint, frequencies, int8=True)


@contextmanager
def experts_read_once(checkpoint: Checkpoint) -> Iterator[None]:
    """While it is open, oracles of this checkpoint keep every expert that they have read."""
    read_expert = reference.read_expert
    experts = cache(lambda layer, expert: read_expert(checkpoint, layer, expert))
    with patch.object(reference, "read_expert", lambda _, layer, expert: experts(layer, expert)):
        yield


def run_int8(
    checkpoint: Checkpoint, sequences: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch, *, scores: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token: logits [tokens, vocab_size]; or, with scores, the log-probability of every token but each
    sequence's first, [tokens - sequences]. And whether each of these is clear.

    A sequence is clear up to a value so close to the border between two int8 codes that float rounding decides
    which it gets. From such a row on, engine and oracle may differ by what one step of one code does.
    """
    nearest = [1.0]
    quantize = reference.quantize_q8

    def watch(x):
        blocks = x.astype(np.float32).reshape(-1, 32)
        scaled = blocks * (np.float32(127) / np.abs(blocks).max(axis=1, keepdims=True))
        nearest.append(np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5).min())
        return quantize(x)

    rows, clear = [], []
    with monkeypatch.context() as m, experts_read_once(checkpoint):
        m.setattr(reference, "quantize_q8", watch)
        oracle = int8_oracle(checkpoint)
        for sequence in sequences:
            session = ReferenceSession(oracle.graph, np.float32)
            nearest[:] = [1.0]
            for token, target in pairwise([*sequence] if scores else [*sequence, None]):
                rows.append(oracle.run(session, [token], [0], targets=[target] if scores else None))
                clear.append(min(nearest) > NEAR_TIE)
    out = np.concatenate(rows)
    return (out[:, 0].astype(np.float64) if scores else out), np.array(clear)

"""Recorded routing: which experts each token of a run was sent to, layer by layer.

open_trace() is the one way in; every reader streams blocks of whole tokens, so that a trace may be larger than memory.
Two formats: our own (trace_file.py, docs/traces.md) and JSONL.

JSONL, one object a line: {"layers": [[expert ids of the first MoE layer, ascending], ...]}, every line with as many
layers and ids as the first. Other keys are ignored. It has no weights: every id counts the same.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import HeadraceError
from headrace.formats.header import opened, read_at

BLOCK_TOKENS = 256  # of a JSONL file, which has no blocks of its own
# More than 65,536 ids fill, at most 256 layers deep; a line without an end is refused here.
MAX_LINE_BYTES = 4 << 20
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16  # ids are uint16


@dataclass(frozen=True)
class ModelIdentity:
    """The model that a trace was recorded from. architecture: its `model_type`."""

    name: str
    architecture: str
    fingerprint: str


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one sequence.

    ids: uint16 [tokens, layers, top_k], ascending along top_k. weights and scores (what the router's weights and logits
    were): float32 of the same shape, or None where they were not recorded or not asked for. tokens: int64 [tokens], or
    None. sequence, first: where they stand: sequences count from 0, and so do positions in each.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    tokens: np.ndarray | None = None
    sequence: int = 0
    first: int = 0


class Trace(ABC):
    """A recorded run. num_layers: MoE layers. None where the file does not say."""

    path: Path
    model: ModelIdentity | None = None
    num_layers: int
    top_k: int
    num_experts: int | None = None
    num_tokens: int | None = None

    @abstractmethod
    def blocks(self, values: bool = True) -> Iterator[Block]:
        """All tokens from the first on; every call begins anew. values: weights and scores too, if there are any.
        HeadraceError names file and place."""

    def check_shape(self, num_layers: int, num_experts: int, top_k: int, model: str) -> None:
        """Refuses a trace that was not recorded from a model of this shape, as far as its header says."""
        if (self.num_layers, self.num_experts or num_experts, self.top_k) == (num_layers, num_experts, top_k):
            return
        of = f" of {self.num_experts}" if self.num_experts else ""
        raise HeadraceError(
            f"{self.path}: a trace of {self.num_layers} layers, {self.top_k}{of} experts a token; {model} has "
            f"{num_layers} layers, {top_k} of {num_experts}; replay a trace of a model of the same shape"
        )


def open_trace(path: Path, num_experts: int | None = None, partial: bool = False) -> Trace:
    """Reads a trace's shape, whatever its format. num_experts: what ids must stay below, if the caller knows and the
    file does not. partial: an unfinished or damaged file is read up to its last whole block instead of refused."""
    from headrace.experts.trace_file import MAGIC, RecordedTrace  # it builds on this module

    with opened(path) as (fd, size):
        magic = read_at(fd, min(len(MAGIC), size), 0, path)
    if magic and MAGIC.startswith(magic):
        return RecordedTrace(path, partial)
    return JsonTrace(path, num_experts, partial)


class JsonTrace(Trace):
    def __init__(self, path: Path, num_experts: int | None, partial: bool = False):
        self.path, self._partial = path, partial
        self._max_id = MAX_EXPERTS - 1  # a trace of another shape is better refused as such
        first = next(self._rows(), None)
        if first is None:
            raise HeadraceError(f"{path}: holds no tokens; record it again")
        self.num_layers, self.top_k = len(first), len(first[0])
        self._max_id = (num_experts or MAX_EXPERTS) - 1

    def blocks(self, values: bool = True) -> Iterator[Block]:
        rows: list[list[list[int]]] = []
        first = 0
        for row in self._rows():
            rows.append(row)
            if len(rows) == BLOCK_TOKENS:
                yield Block(np.array(rows, np.uint16), first=first)
                rows, first = [], first + BLOCK_TOKENS
        if rows:
            yield Block(np.array(rows, np.uint16), first=first)

    def _rows(self) -> Iterator[list[list[int]]]:
        shape: tuple[int, int] | None = None
        with opened(self.path) as (fd, _), open(fd, "rb", closefd=False) as file:
            for number in range(1, 1 << 62):
                where = f"{self.path}: line {number}"
                try:
                    line = file.readline(MAX_LINE_BYTES + 1)
                except OSError as e:
                    raise HeadraceError(f"{where}: cannot read: {e.strerror}") from None
                if not line:
                    return
                if line.isspace():
                    continue
                try:
                    layers = _layers(line, where)
                    shape = shape or (len(layers), len(layers[0]))
                    self._check(layers, shape, where)
                except HeadraceError:
                    if self._partial:
                        return
                    raise
                yield layers

    def _check(self, layers: list[list[int]], shape: tuple[int, int], where: str) -> None:
        if len(layers) != shape[0]:
            raise HeadraceError(f"{where}: {len(layers)} layers, the first line has {shape[0]}; record it again")
        for layer, ids in enumerate(layers):
            at = f"{where}: layer {layer}"
            if len(ids) != shape[1]:
                raise HeadraceError(f"{at}: {len(ids)} experts, the first line has {shape[1]}; record it again")
            before = -1
            for i in ids:
                if i > self._max_id or i < 0:
                    raise HeadraceError(f"{at}: expert {i}, expected ids of 0 to {self._max_id}")
                if i <= before:
                    raise HeadraceError(f"{at}: expert {i} after {before}, expected ascending ids")
                before = i


def _layers(line: bytes, where: str) -> list[list[int]]:
    """The line's lists of ids: at least one layer, lists of at least one int."""
    if len(line) > MAX_LINE_BYTES:
        raise HeadraceError(f"{where}: more than {MAX_LINE_BYTES} bytes; is this a trace?")
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise HeadraceError(f'{where}: expected one JSON object, {{"layers": [[expert ids], ...]}}') from None
    layers = record.get("layers") if type(record) is dict else None
    if (
        type(layers) is not list
        or not layers
        or not all(type(ids) is list and ids and all(type(i) is int for i in ids) for ids in layers)
    ):
        raise HeadraceError(f'{where}: expected "layers", a list of lists of expert ids')
    if len(layers) > MAX_LAYERS:
        raise HeadraceError(f"{where}: {len(layers)} layers, expected at most {MAX_LAYERS}")
    return layers


class Replay:
    """The routes of a trace by position, from the start and again when it ends.

    A position has the same route however a sequence is cut into passes, and again after a rollback.
    """

    def __init__(self, name: str, ids: np.ndarray):
        """ids: uint16 [tokens, layers, top_k]."""
        self.name, self._ids = name, ids

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def rows(self, first: int, num_rows: int) -> np.ndarray:
        """int32 [layers, num_rows, top_k] of positions first, first + 1, ..."""
        at = np.arange(first, first + num_rows) % len(self._ids)
        return np.ascontiguousarray(self._ids[at].transpose(1, 0, 2), np.int32)


def load_replay(trace: Trace, max_tokens: int) -> Replay:
    """Reads the first max_tokens tokens of a trace, 2 bytes an expert, into memory."""
    parts, num_tokens = [], 0
    for block in trace.blocks(values=False):
        parts.append(block.ids[: max_tokens - num_tokens])
        num_tokens += len(parts[-1])
        if num_tokens >= max_tokens:
            break
    if not num_tokens:
        raise HeadraceError(f"{trace.path}: holds no tokens; record it again")
    return Replay(trace.path.name, np.concatenate(parts))

"""The oracle against Transformers: committed golden logits, and live where PyTorch and Transformers are installed.

Float32 weights, float32 keys and values. Tolerance: 1e-3 of the logits' standard deviation; float32 rounding in
Transformers over 3 layers gives a few 1e-6.
"""

from pathlib import Path

import numpy as np
import pytest
from golden import tiny_random

from headrace.formats import open_checkpoint
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.reference import Reference, ReferenceSession

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(tiny_random.CONFIGS)


def golden_logits(family: str) -> np.ndarray:
    return np.load(GOLDEN / f"{family}.npz")["logits"]


def assert_matches(logits: np.ndarray, golden: np.ndarray) -> None:
    assert logits.shape == golden.shape
    assert np.abs(logits - golden).max() < 1e-3 * golden.std()
    assert (logits.argmax(axis=1) == golden.argmax(axis=1)).all()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, tiny_random.write(request.param, directory)


def test_oracle_gives_the_golden_logits(family):
    name, directory = family
    checkpoint = open_checkpoint(directory)
    graph = build_graph(checkpoint)
    inv_freq = inverse_frequencies(checkpoint.config)[None]
    oracle = Reference(graph, checkpoint, {INV_FREQ: inv_freq}, int8=False)
    session = ReferenceSession(graph, np.float32)
    ids, n = tiny_random.prompt(), tiny_random.PROMPT_TOKENS
    rows = [oracle.run(session, ids[:n], list(range(n)))]
    rows += [oracle.run(session, [t], [0]) for t in ids[n:]]
    assert_matches(np.concatenate(rows), golden_logits(name))


def test_golden_logits_are_what_transformers_gives_here(family):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden import make_golden

    name, directory = family
    assert_matches(make_golden.transformers_logits(directory), golden_logits(name))


def test_replay_files_are_what_this_compiler_writes():
    """The core's replay_test.cc runs them; tests/golden/make_replay.py renews them."""
    from golden import make_replay

    checkpoint = open_checkpoint(make_replay.REPLAY / "model.gguf")
    assert (make_replay.REPLAY / "program.bin").read_bytes() == make_replay.program_bytes(checkpoint)
    index = (make_replay.REPLAY / "index.txt").read_text().splitlines()
    assert index == make_replay.index_lines(checkpoint)

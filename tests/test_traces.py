"""Recorded routing: the reader, hostile files, replay by position, and engine and oracle under forced routes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, QWEN3, random_weights, write_gguf
from test_cli import assert_one_line_error, headrace

from headrace.engine import Engine, EngineOptions, Routing
from headrace.errors import HeadraceError
from headrace.experts import traces
from headrace.experts.pipeline import Pipeline
from headrace.experts.traces import Replay, load_replay, open_trace
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import DType
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.reference import Reference, ReferenceSession


def random_ids(tokens: int, layers: int, num_experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """uint16 [tokens, layers, top_k], ascending."""
    keys = np.random.default_rng(seed).random((tokens, layers, num_experts))
    return np.sort(np.argsort(keys, axis=-1)[..., :top_k], axis=-1).astype(np.uint16)


def write_jsonl(path: Path, ids: np.ndarray) -> Path:
    lines = [json.dumps({"tok": i + 1, "layers": token}) for i, token in enumerate(ids.tolist())]
    path.write_text("\n".join(lines) + "\n")
    return path


# ---- JSONL


@pytest.mark.parametrize("tokens", [1, traces.BLOCK_TOKENS, traces.BLOCK_TOKENS + 3])
def test_jsonl_is_read_in_blocks(tmp_path, tokens):
    ids = random_ids(tokens, 3, 20, 4)
    trace = open_trace(write_jsonl(tmp_path / "t.jsonl", ids), 20)
    assert (trace.num_layers, trace.top_k, trace.num_experts) == (3, 4, None)
    for _ in range(2):  # every call begins anew
        blocks = list(trace.blocks())
        assert all(b.ids.dtype == np.uint16 and len(b.ids) <= traces.BLOCK_TOKENS for b in blocks)
        assert all(b.weights is None and b.scores is None for b in blocks)
        assert np.array_equal(np.concatenate([b.ids for b in blocks]), ids)


def test_jsonl_of_any_length_is_streamed(tmp_path):
    """Damage behind the blocks that were asked for is not seen."""
    path = tmp_path / "t.jsonl"
    line = json.dumps({"layers": [[1, 2]]}) + "\n"
    path.write_text(line * 2 * traces.BLOCK_TOKENS + "damaged")
    blocks = open_trace(path).blocks()
    assert len(next(blocks).ids) == len(next(blocks).ids) == traces.BLOCK_TOKENS
    with pytest.raises(HeadraceError, match=rf"t.jsonl: line {2 * traces.BLOCK_TOKENS + 1}"):
        next(blocks)


GOOD = '{"tok": 1, "layers": [[1, 5], [0, 7]]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no tokens"),
        ("\n \n", "holds no tokens"),
        ("{\n", "line 1: expected one JSON object"),
        (GOOD + GOOD[:20], "line 2: expected one JSON object"),
        (GOOD + "\n" + "[" * 100_000, "line 3: expected one JSON object"),
        (GOOD + '{"layers": ' + "9" * 10_000 + "}", "line 2: expected one JSON object"),
        (GOOD + '{"layers": "\udcff"}', "line 2: expected one JSON object"),
        ("[[1, 2]]", 'line 1: expected "layers"'),
        ('{"tok": 1}', 'line 1: expected "layers"'),
        ('{"layers": []}', 'line 1: expected "layers"'),
        ('{"layers": [[]]}', 'line 1: expected "layers"'),
        ('{"layers": [[1, 2.0]]}', 'line 1: expected "layers"'),
        ('{"layers": [[true]]}', 'line 1: expected "layers"'),
        ('{"layers": [7]}', 'line 1: expected "layers"'),
        ('{"layers": {"0": [1]}}', 'line 1: expected "layers"'),
        (GOOD + '{"layers": [[1, 5]]}', "line 2: 1 layers, the first line has 2"),
        (GOOD + '{"layers": [[1, 5], [0, 7], [0, 7]]}', "line 2: 3 layers, the first line has 2"),
        (GOOD + '{"layers": [[1, 5], [0, 3, 7]]}', "line 2: layer 1: 3 experts, the first line has 2"),
        (GOOD + '{"layers": [[5, 1], [0, 7]]}', "line 2: layer 0: expert 1 after 5, expected ascending"),
        (GOOD + '{"layers": [[5, 5], [0, 7]]}', "line 2: layer 0: expert 5 after 5, expected ascending"),
        (GOOD + '{"layers": [[1, 5], [-1, 7]]}', "line 2: layer 1: expert -1, expected ids of 0 to 7"),
        (GOOD + '{"layers": [[1, 5], [0, 8]]}', "line 2: layer 1: expert 8, expected ids of 0 to 7"),
        ('{"layers": [[0, 70000]]}', "line 1: layer 0: expert 70000, expected ids of 0 to 65535"),
        ("x" * (traces.MAX_LINE_BYTES + 1), "line 1: more than"),
        (json.dumps({"layers": [[0]] * 1025}), "line 1: 1025 layers, expected at most 1024"),
    ],
)
def test_hostile_jsonl_is_refused_by_file_and_line(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(HeadraceError) as error:
        list(open_trace(path, 8).blocks())
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_cut_line_ends_a_partial_reading(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD * 3 + GOOD[:20])
    blocks = list(open_trace(path, partial=True).blocks())
    assert [len(b.ids) for b in blocks] == [3]
    path.write_text(GOOD[:20])
    with pytest.raises(HeadraceError, match="holds no tokens"):
        open_trace(path, partial=True)


def test_files_that_are_no_files(tmp_path):
    for path in (tmp_path / "none", tmp_path, Path("/dev/zero")):
        with pytest.raises(HeadraceError, match=str(path)):
            open_trace(path)


# ---- replay


def test_a_position_has_one_route(tmp_path):
    ids = random_ids(5, 2, 9, 3)
    replay = load_replay(open_trace(write_jsonl(tmp_path / "t.jsonl", ids)), 100)
    assert (replay.name, replay.num_tokens) == ("t.jsonl", 5)
    rows = replay.rows(3, 9)
    assert rows.dtype == np.int32 and rows.shape == (2, 9, 3) and rows.flags.c_contiguous
    for row in range(9):
        assert np.array_equal(rows[:, row], ids[(3 + row) % 5])
        assert np.array_equal(rows[:, row], replay.rows(3 + row, 1)[:, 0])


@pytest.mark.parametrize("limit", [1, 300, 512, 513, 1000])
def test_no_more_of_a_trace_is_kept_than_asked_for(tmp_path, limit):
    ids = random_ids(600, 1, 9, 2)
    replay = load_replay(open_trace(write_jsonl(tmp_path / "t.jsonl", ids)), limit)
    assert replay.num_tokens == min(limit, 600)
    assert np.array_equal(replay.rows(0, replay.num_tokens)[0], ids[:limit, 0])


def test_a_trace_of_another_shape_is_refused(tmp_path):
    trace = open_trace(write_jsonl(tmp_path / "t.jsonl", random_ids(2, 3, 8, 4)))
    trace.check_shape(3, 8, 4, "model")
    for shape in ((2, 8, 4), (3, 8, 3)):
        with pytest.raises(HeadraceError, match=r"t.jsonl: a trace of 3 layers, 4 experts a token; model has"):
            trace.check_shape(*shape, "model")


# ---- the engine under forced routes, against the oracle

SPECS = {"olmoe": OLMOE.but(num_hidden_layers=3, vocab_size=60), "qwen3": QWEN3.but(num_hidden_layers=3, vocab_size=60)}
TOKENS = np.random.default_rng(4).integers(0, 60, 17).tolist()


@pytest.fixture(scope="module", params=SPECS)
def model(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traces") / f"{request.param}.gguf"
    return write_gguf(path, SPECS[request.param], random_weights(SPECS[request.param]), dtype="F32")


def load(path: Path, **options) -> Engine:
    return Engine(open_checkpoint(path), EngineOptions(context=64, num_threads=2, kv_dtype=DType.F32, **options))


def oracle_of(path: Path, **options):
    checkpoint = open_checkpoint(path)
    vectors = {INV_FREQ: inverse_frequencies(checkpoint.config)[None]}
    graph = build_graph(checkpoint)
    return Reference(graph, checkpoint, vectors, **options), ReferenceSession(graph, np.float32)


def replay_for(path: Path, tokens: int = 11) -> Replay:
    config = open_checkpoint(path).config
    shape = (tokens, config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    return Replay("random", random_ids(*shape, seed=1))


@pytest.mark.parametrize("record_routing", [False, True])
def test_forced_routes_give_the_oracles_logits(model, record_routing):
    """Only some rows' logits, so that the last layer must pick its routes by the original row."""
    replay = replay_for(model)
    oracle, session = oracle_of(model)
    expected = oracle.run(session, TOKENS, list(range(len(TOKENS))), replay.rows(0, len(TOKENS)))
    with load(model, max_rows=8, record_routing=record_routing) as engine:
        run = engine.session(replay=replay)
        rows = {11: run.prefill(TOKENS[:12]).copy()}  # passes of 8 and 4 rows; the trace wraps around at 11
        for i in range(12, 17):
            rows[i] = run.step(TOKENS[i]).copy()
        for i, logits in rows.items():
            np.testing.assert_allclose(logits, expected[i], rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_forced_routes_do_not_depend_on_how_the_sequence_is_cut(model):
    replay = replay_for(model)
    with load(model, max_rows=16, max_out_rows=16) as engine:
        session = engine.session(replay=replay)
        whole = session.verify(TOKENS)
        for sizes in ([1] * 17, [5, 12], [16, 1]):
            session.rollback(0)
            parts = [session.verify(TOKENS[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
            assert np.array_equal(np.concatenate(parts), whole)
        # Rejected drafts take their routes with them.
        session.rollback(9)
        session.verify([3, 4, 5])
        session.rollback(9)
        assert np.array_equal(session.verify(TOKENS[9:]), whole[9:])
        session.close()
        assert not np.array_equal(engine.session().verify(TOKENS), whole)


def test_only_routed_experts_are_read(model):
    config = open_checkpoint(model).config
    layers, k = config.num_hidden_layers, config.num_experts_per_tok
    replay = Replay("one", np.tile(np.arange(k, dtype=np.uint16), (1, layers, 1)))
    with load(model, pipeline=Pipeline(2, 2, 3, "after-routing")) as engine:
        session = engine.session(replay=replay)
        session.prefill(TOKENS)
        for token in TOKENS:
            session.step(token)
        counters = engine.counters()
        assert counters["loads"] == layers * k and counters["prefetches"] == counters["bytes_unused"] == 0


def test_routes_of_another_model_are_refused(model):
    with load(model) as engine:
        session = engine.session(replay=Replay("other", random_ids(4, 2, 8, 2)))
        with pytest.raises(HeadraceError, match=r"routes of shape \[2, 3, 2\], expected \[3, 3, "):
            session.prefill([1, 2, 3])
        assert session.length == 0


# ---- asking what routing chose


def gather(seen: list[Routing]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.concatenate([getattr(r, name) for r in seen], axis=1) for name in ("ids", "weights", "scores"))


def observed(engine: Engine, sizes: list[int]) -> tuple[list[Routing], np.ndarray]:
    """Everything that a session sees, and the last row's logits."""
    seen: list[Routing] = []

    def observe(r: Routing) -> None:
        seen.append(replace(r, ids=r.ids.copy(), weights=r.weights.copy(), scores=r.scores.copy()))

    session, at = engine.session(observe=observe), 0
    for n in sizes:
        logits = session.prefill(TOKENS[at : at + n]) if n > 1 else session.step(TOKENS[at])
        at += n
    logits = logits.copy()
    session.close()
    return seen, logits


def test_what_an_observer_sees_is_what_the_oracle_routes(model):
    chosen: list[list[np.ndarray]] = []
    logits: dict[int, np.ndarray] = {}

    def observe(node, outputs):
        logits[node.outputs[0].index] = outputs[0]
        if node.op == "route":
            chosen.append([*outputs, np.take_along_axis(logits[node.inputs[0].index], outputs[0].astype(int), 1)])

    oracle, session = oracle_of(model, observe=observe)
    oracle.run(session, TOKENS, list(range(len(TOKENS))))
    expected = [np.stack(part) for part in zip(*chosen, strict=True)]
    with load(model, max_rows=8, record_routing=True) as engine:
        seen, _ = observed(engine, [17])
        assert [r.first for r in seen] == [0, 8, 16]
        ids, weights, scores = gather(seen)
        assert np.array_equal(ids, expected[0])
        np.testing.assert_allclose(weights, expected[1], rtol=1e-3)
        np.testing.assert_allclose(scores, expected[2], rtol=1e-3, atol=1e-3)
        again = gather(observed(engine, [3, 1, 1, 12])[0])
        assert all(np.array_equal(a, b) for a, b in zip((ids, weights, scores), again, strict=True))


def test_observing_changes_no_bit_and_reads_no_more(model):
    with load(model) as plain, load(model, record_routing=True) as engine:
        session = plain.session()
        expected = session.prefill(TOKENS[:12]).copy(), session.step(TOKENS[12])
        assert np.array_equal(observed(engine, [12, 1])[1], expected[1])
        assert engine.counters()["loads"] == plain.counters()["loads"]
        assert np.array_equal(engine.session().prefill(TOKENS[:12]), expected[0])


def test_a_failing_observer_undoes_the_prompt(model):
    with load(model, max_rows=8, record_routing=True) as engine:

        def fail(routing: Routing) -> None:
            if routing.first:
                raise HeadraceError("disk full")

        session = engine.session(observe=fail)
        with pytest.raises(HeadraceError, match="disk full"):
            session.prefill(TOKENS)
        assert session.length == 0
    with load(model) as engine, pytest.raises(HeadraceError, match="record_routing"):
        engine.session(observe=fail)


# ---- bench --replay


def test_bench_replays_a_trace(model, tmp_path):
    config = open_checkpoint(model).config
    k = config.num_experts_per_tok
    one = write_jsonl(tmp_path / "one.jsonl", np.tile(np.arange(k, dtype=np.uint16), (2, 3, 1)))
    args = ["bench", model, "--prompt", 10, "--gen", 6, "--repeat", 1, "--schedule", "after-routing"]
    report = json.loads(headrace(*args, "--json", "--replay", one).stdout)
    assert report["replay"] == {"trace": "one.jsonl", "tokens": 2}
    assert report["prefill"]["expert_loads"] == 3 * k
    assert report["decode"] | {"io_wait_s": 0, "io_busy_s": 0} == {
        "expert_hits": 6 * 3 * k,
        "expert_late_hits": 0,
        "expert_loads": 0,
        "expert_prefetches": 0,
        "expert_bytes_read": 0,
        "expert_bytes_unused": 0,
        "io_wait_s": 0,
        "io_busy_s": 0,
    }
    text = headrace(*args, "--replay", one)
    assert "routes of one.jsonl" in text.stdout and text.returncode == 0
    free = json.loads(headrace(*args, "--json").stdout)
    assert free["replay"] is None and free["prefill"]["expert_loads"] > 3 * k


def test_bench_refuses_a_trace_that_does_not_fit(model, tmp_path):
    k = open_checkpoint(model).config.num_experts_per_tok
    other = write_jsonl(tmp_path / "other.jsonl", random_ids(3, 2, 8, k))
    wide = write_jsonl(tmp_path / "wide.jsonl", random_ids(30, 3, 64, k))
    args = ["bench", model, "--prompt", 10, "--gen", 6, "--replay"]
    assert_one_line_error(headrace(*args, other), "other.jsonl", "2 layers", "3 layers", model.stem)
    assert_one_line_error(headrace(*args, wide), "wide.jsonl", "line", "0 to 7")
    assert_one_line_error(headrace(*args, tmp_path / "none"), "none", "no such file")

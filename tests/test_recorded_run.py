"""`run --record T` and `simulate T --recorded`: a run replayed counts what the run counted; invariants 1, 2 and 5."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, random_weights, write_gguf
from test_cli import assert_one_line_error, headrace, start
from test_trace_file import block, block_ends

from headrace import _core
from headrace.commands.bench import future_passes
from headrace.commands.model import resolve_model
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline
from headrace.experts.recorded_run import Recorder, replay_run
from headrace.experts.trace_file import COUNTERS, RecordedTrace, identify
from headrace.experts.traces import Replay, open_trace
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store
from headrace.sizes import parse_size

POLICIES = ["lru", "lfu", "lfru", "prefill-hot", "markov"]
USES = ("hits", "late_hits", "loads")
PIPELINES = [None, Pipeline(1, 1, 3), Pipeline(3, 2, 4), Pipeline(16, 2, 2), Pipeline(4, 4, 8, "after-routing")]
PIPELINES += [Pipeline(2, 3, 3, "on-demand"), Pipeline(5, 8, 20)]
SPEC = OLMOE.but(num_hidden_layers=3, num_experts=16)
TOKENS = np.random.default_rng(5).integers(0, SPEC.vocab_size, 60).tolist()
PROMPT = "And the LORD spake unto Moses, saying, In the beginning was the word"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The same model in place, where reading an expert takes more than its record, and as a store."""
    directory = tmp_path_factory.mktemp("recorded")
    gguf, store = directory / "model.gguf", directory / "store"
    write_gguf(gguf, SPEC, random_weights(SPEC, std=0.6), dtype="Q4_0")
    pack_store(open_checkpoint(gguf), store, lambda done, total: None)
    return {"gguf": gguf, "store": store}


def load(model: Path, policy: str = "lru", **options) -> Engine:
    options = {"context": 64, "num_threads": 2, "prompt_rows": 20, "max_out_rows": 4, "policy": policy} | options
    return Engine(open_checkpoint(model), EngineOptions(**options))


def converse(session) -> list[bytes]:
    """A prompt in two passes, steps, verifications, and another prompt: every pass's logits."""
    logits = [session.prefill(TOKENS[:20]).tobytes()]
    logits += [session.step(token).tobytes() for token in TOKENS[20:32]]
    logits.append(session.verify(TOKENS[32:41]).tobytes())
    session.rollback(0)
    logits.append(session.prefill(TOKENS[40:58]).tobytes())
    logits += [session.step(token).tobytes() for token in TOKENS[:6]]
    return logits


def recorded(path: Path, engine: Engine) -> tuple[list[bytes], dict[str, int]]:
    with Recorder(path, engine, identify(engine.checkpoint)) as recorder:
        logits = converse(engine.session(observe=recorder.observe))
    counters = engine.counters()
    return logits, {name: counters[name] for name in COUNTERS}


def opened(path: Path, **options) -> RecordedTrace:
    trace = open_trace(path, **options)
    assert isinstance(trace, RecordedTrace)
    return trace


# ---- the replay is the run


@pytest.mark.parametrize("kind", ["gguf", "store"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [1, 6, 15, 48])
def test_a_replay_counts_what_the_run_counted(models, tmp_path, kind, policy, slots):
    runs = []
    for delay_us in (0, 700):
        path = tmp_path / f"{delay_us}.trace"
        _core.disturb_reads(delay_us)
        try:
            with load(models[kind], policy, max_rows=12, record_routing=True) as engine:
                engine.limit_arena(slots * engine._smallest_arena)
                runs.append(recorded(path, engine))
        finally:
            _core.disturb_reads()
        replay = replay_run(opened(path))
        assert replay.counters == runs[-1][1] and replay.settings.policy == policy
        assert (replay.num_tokens, replay.num_passes) == (41 + 24, 2 + 12 + 3 + 2 + 6)
        assert replay.arena_bytes == [slots * engine._smallest_arena]
    assert runs[0][0] == runs[1][0]  # when reads land decides what is counted, never the logits
    counters = runs[0][1]
    assert (counters["evictions"] > 0) == (slots < 48) and counters["prefetches"] > 0
    # Recording changes nothing.
    with load(models[kind], policy, max_rows=12) as engine:
        engine.limit_arena(slots * engine._smallest_arena)
        assert converse(engine.session()) == runs[0][0]
        now = engine.counters()
        assert sum(now[name] for name in USES) == sum(counters[name] for name in USES)
    if kind == "gguf":
        assert counters["bytes_read"] > counters["loads"] * replay.settings.record_bytes[0]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("slots", [2, 11, 30])
def test_streamed_prompts_replay_whatever_the_pipeline(models, tmp_path, pipeline, slots):
    """Groups, banks and schedules, and an arena that holds what an earlier prompt left."""
    path = tmp_path / "t.trace"
    _core.disturb_reads(900)
    try:
        with load(models["store"], "lru", pipeline=pipeline, record_routing=True) as engine:
            engine.limit_arena(slots * engine._smallest_arena)
            logits, counters = recorded(path, engine)
    finally:
        _core.disturb_reads()
    assert replay_run(opened(path)).counters == counters
    with load(models["store"]) as engine:
        assert converse(engine.session()) == logits


@pytest.mark.parametrize("recall", [0, 0.6, 1])
@pytest.mark.parametrize("slots", [3, 9, 20])
def test_prefetches_replay(models, tmp_path, recall, slots):
    """An oracle's guesses, reads of uncertain length, a prompt and an arena that moves between passes."""
    path = tmp_path / "t.trace"
    rng = np.random.default_rng(1)
    ids = np.sort(np.argsort(rng.random((60, 3, 16)), axis=2)[..., :3], axis=2).astype(np.uint16)
    routes = Replay("random", ids)
    _core.disturb_reads(600)
    try:
        with load(models["store"], "lfu", oracle_recall=recall, record_routing=True, max_rows=16) as engine:
            engine.limit_arena(slots * engine._smallest_arena)
            engine.foresee(future_passes(routes, 20, 40, 16), 1)
            with Recorder(path, engine, identify(engine.checkpoint)) as recorder:
                session = engine.session(replay=routes, observe=recorder.observe)
                session.prefill(TOKENS[:20])
                for i, token in enumerate([*TOKENS[20:], *TOKENS[:19]][:40]):
                    session.step(token)
                    if i == 20:
                        engine.limit_arena((slots + 2) * engine._smallest_arena)
                counters = session.decode_figures.counters
                total = recorder.counters
    finally:
        _core.disturb_reads()
    assert replay_run(opened(path)).counters == total
    assert counters["prefetches"] > 0
    if recall == 1 and slots == 20:
        assert counters["hits"] + counters["late_hits"] > 0.9 * sum(counters[name] for name in USES)


@pytest.mark.parametrize("policy", POLICIES)
def test_arenas_that_are_lowered_in_the_middle(models, tmp_path, policy):
    """As the guard of the budget lowers them, and as nothing else does: raised again."""
    path, sizes = tmp_path / "t.trace", {0: 30, 3: 20, 9: 4, 20: 11}
    _core.disturb_reads(300)
    try:
        with load(models["store"], policy, record_routing=True, max_rows=12) as engine:
            passes = 0
            with Recorder(path, engine, identify(engine.checkpoint)) as recorder:

                def guard() -> None:
                    nonlocal passes
                    if passes in sizes:
                        engine.limit_arena(sizes[passes] * engine._smallest_arena)
                    passes += 1

                engine.guard_budget = guard
                converse(engine.session(observe=recorder.observe))
            counters = engine.counters()
    finally:
        _core.disturb_reads()
    replay = replay_run(opened(path))
    assert replay.counters == {name: counters[name] for name in COUNTERS}
    assert replay.arena_bytes == [n * engine._smallest_arena for n in sizes.values()]


def recorded_on_tiny(path: Path, prompt_rows: int, share: float, converse: str) -> list[int]:
    """Records in a process of its own, with a budget that leaves room for a share of the experts, and replays.
    converse: lines that use `session`. Returns the arena's sizes."""
    script = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_recorded_run import *\n"
        "from headrace.commands.model import open_model\n"
        "from headrace import machine\n"
        "from headrace.engine import make_plan\n"
        "checkpoint = open_model('tiny')\n"
        f"options = dict(context=256, num_threads=2, prompt_rows={prompt_rows}, record_routing=True)\n"
        "plan = make_plan(checkpoint, EngineOptions(**options))\n"
        f"options['memory_bytes'] = plan.minimum_bytes + int(plan.expert_bytes * {share})\n"
        "with Engine(checkpoint, EngineOptions(**options)) as engine:\n"
        f"    with Recorder(Path({str(path)!r}), engine, identify(checkpoint)) as recorder:\n"
        "        session = engine.session(observe=recorder.observe)\n"
        f"{textwrap.indent(converse, ' ' * 8)}"
        "    counters = engine.counters()\n"
        "    print(json.dumps([counters, machine.peak_rss_bytes(), engine.plan.budget_bytes]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counters, peak, budget = json.loads(done.stdout)
    assert peak <= budget
    replay = replay_run(opened(path))
    assert replay.counters == {name: counters[name] for name in COUNTERS}
    return replay.arena_bytes


def test_the_guard_itself(tmp_path):
    """A process that grows towards its budget, as a leak would make it: engine_child.py's drift, recorded."""
    sizes = recorded_on_tiny(
        tmp_path / "t.trace",
        8,
        0.8,
        "held = []\n"
        "session.prefill(TOKENS[:8])\n"
        "for i in range(50):\n"
        "    held.append(bytes([1]) * (1 << 18))\n"
        "    session.step(i)\n",
    )
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)


def test_prompts_that_borrow_from_the_arena(tmp_path):
    sizes = recorded_on_tiny(
        tmp_path / "t.trace",
        200,
        0.5,
        "for prompt in (TOKENS * 5)[:200], TOKENS[:5], TOKENS[:30]:\n"
        "    session.prefill(prompt)\n"
        "    for i in range(20):\n"
        "        session.step(i)\n"
        "    session.rollback(0)\n",
    )
    # The prompt of five tokens needs no more than a step.
    assert len(sizes) == 4 and sizes[0] == sizes[2] < sizes[1] == sizes[3]


# ---- the command


def tiny_record_bytes() -> int:
    checkpoint = open_checkpoint(resolve_model("tiny"))
    source = _core.ExpertSource([str(f) for f in checkpoint.files], list(checkpoint.experts))
    return source.record_bytes(0)


def run_json(*args: object) -> dict:
    done = headrace("run", "tiny", "-p", PROMPT, "-n", 24, "--temp", 0.8, "--seed", 3, "--json", *args)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    assert 0 < report["peak_rss_bytes"] <= report["budget_bytes"]
    return report


@pytest.mark.parametrize("policy", POLICIES)
def test_run_records_and_simulate_replays(tmp_path, policy):
    args = ("--policy", policy, "--memory", "20MiB", "--record", tmp_path / "no.trace")
    refusal = headrace("run", "tiny", "-p", PROMPT, "-n", 24, *args)
    assert_one_line_error(refusal, "too small", "--memory")
    smallest = refusal.stderr.split("--memory ")[1].split()[0]
    plain = run_json("--policy", policy)
    total = plain["slots"] * tiny_record_bytes()
    for name, budget in {
        "smallest": smallest,
        "30 %": parse_size(smallest) + total * 3 // 10,
        "resident": None,
    }.items():
        path = tmp_path / f"{name}.trace"
        report = run_json("--policy", policy, "--record", path, *(["--memory", budget] if budget else []))
        assert report["record"] == str(path)
        assert (report["text"], report["token_ids"]) == (plain["text"], plain["token_ids"])
        done = headrace("simulate", path, "--recorded", "--json")
        assert done.returncode == 0, done.stderr
        replay = json.loads(done.stdout)
        for counter in ("hits", "late_hits", "loads", "prefetches", "bytes_read", "bytes_unused"):
            assert replay[counter] == sum(report[phase][f"expert_{counter}"] for phase in ("prefill", "decode"))
        assert replay["policy"] == policy and replay["tokens"] == report["prompt_tokens"] + 23
        assert (replay["evictions"] > 0) == (report["residency"] < 1)
        # It is a trace like any other: every layer's routes of every token.
        trace = opened(path)
        tokens = np.concatenate([b.tokens for b in trace.blocks()])
        assert tokens[report["prompt_tokens"] :].tolist() == report["token_ids"][:-1]
        assert sum(len(b.ids) for b in trace.blocks()) == trace.num_tokens == len(tokens)
    table = headrace("simulate", path, "--recorded")
    assert table.returncode == 0 and table.stdout.count("\n") == 1 and "counts what the run counted" in table.stdout
    assert not list(tmp_path.glob("*.partial"))


def test_what_cannot_be_recorded_or_replayed(tmp_path):
    taken = tmp_path / "taken.trace"
    taken.write_text("something else")
    args = ("run", "tiny", "-p", PROMPT, "-n", 2, "--record")
    assert_one_line_error(headrace(*args, taken), "taken.trace", "exists already")
    assert taken.read_text() == "something else"
    (tmp_path / "half.trace.partial").write_text("")
    assert_one_line_error(headrace(*args, tmp_path / "half.trace"), "half.trace.partial", "exists already")
    assert_one_line_error(headrace(*args, tmp_path / "no" / "t.trace"), "no such directory")
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    assert headrace("trace", "tiny", text, "-o", tmp_path / "t.trace").returncode == 0
    assert_one_line_error(headrace("simulate", tmp_path / "t.trace", "--recorded"), "holds no run", "--record")
    jsonl = tmp_path / "t.jsonl"
    jsonl.write_text('{"layers": [[1, 2]]}\n')
    assert_one_line_error(headrace("simulate", jsonl, "--recorded"), "holds no run")
    for extra in (["--recorded", "--policies", "lru"], ["--recorded", "--window", "2"], ["--partial"]):
        assert headrace("simulate", tmp_path / "t.trace", *extra).returncode == 2
    assert headrace(*args[:-1], "--record").returncode == 2


def test_an_engine_that_has_run_is_not_recorded(models, tmp_path):
    with load(models["store"], record_routing=True) as engine:
        engine.session().prefill(TOKENS[:3])
        with pytest.raises(HeadraceError, match="has run nothing"):
            Recorder(tmp_path / "t", engine, identify(engine.checkpoint))
    with load(models["store"], "belady", record_routing=True) as engine, pytest.raises(HeadraceError, match="future"):
        Recorder(tmp_path / "t", engine, identify(engine.checkpoint))
    with load(models["store"], record_routing=True) as engine:
        with pytest.raises(HeadraceError, match="position 1 follows 3"):  # noqa: SIM117
            with Recorder(tmp_path / "t", engine, identify(engine.checkpoint)) as recorder:
                session = engine.session(observe=recorder.observe)
                session.prefill(TOKENS[:3])
                session.rollback(1)
                session.step(7)
        assert list(tmp_path.iterdir()) == []


# ---- unfinished and damaged recordings


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_a_part_that_replays(tmp_path, end):
    partial = tmp_path / "t.trace.partial"
    args = ["run", "tiny", "-p", PROMPT, "-n", 5000, "--record", tmp_path / "t.trace", "-t", 1, "--temp", 0]
    with start(args) as process:
        while process.poll() is None and (not partial.exists() or partial.stat().st_size < 20_000):
            time.sleep(0.005)
        process.send_signal(end)
        error = process.communicate(timeout=30)[1].decode()
    assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 130) and "Traceback" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace.partial"]
    assert_one_line_error(headrace("simulate", partial, "--recorded"), "has no end")
    done = headrace("simulate", partial, "--recorded", "--partial", "--json")
    assert done.returncode == 0, done.stderr
    tokens = sum(len(b.ids) for b in open_trace(partial, partial=True).blocks())
    assert json.loads(done.stdout)["tokens"] == tokens > 32
    if end == signal.SIGINT:
        assert error.endswith(f"{partial}: the first {tokens} tokens\n")


def test_every_cut_replays_whole_passes_or_is_refused(models, tmp_path):
    path, cut = tmp_path / "t.trace", tmp_path / "cut.trace"
    with load(models["store"], record_routing=True, max_rows=12) as engine:
        recorded(path, engine)
    data, counts = path.read_bytes(), set()
    ends = block_ends(data)
    for nbytes in range(0, len(data), 7):
        cut.write_bytes(data[:nbytes])
        try:
            counts.add(replay_run(opened(cut, partial=True)).num_passes)
        except (HeadraceError, AssertionError):
            assert nbytes < ends[3]  # before its first block of tokens
    assert len(counts) > 2 and max(counts) == 25


def rewritten(data: bytes, kind: int, change) -> bytes:
    """The file with the payloads of one kind of block changed, checksums and all."""
    ends = block_ends(data)
    out = data[: ends[0]]
    for begin, end in pairwise(ends):
        found = struct.unpack_from("<I", data, begin + 4)[0]
        payload = data[begin + 16 : end]
        out += block(found, change(payload) if found == kind else payload)
    return out


def without(data: bytes, kind: int) -> bytes:
    ends = block_ends(data)
    parts = [data[a:b] for a, b in pairwise(ends)]
    return data[: ends[0]] + b"".join(part for part in parts if struct.unpack_from("<I", part, 4)[0] != kind)


def test_recordings_that_lie_are_refused(models, tmp_path):
    path, bad = tmp_path / "t.trace", tmp_path / "bad.trace"
    with load(models["store"], record_routing=True, max_rows=12) as engine:
        recorded(path, engine)
    data = path.read_bytes()

    def message(data: bytes) -> str:
        bad.write_bytes(data)
        with pytest.raises(HeadraceError) as error:
            replay_run(opened(bad))
        assert str(error.value).startswith(str(bad)) and "\n" not in str(error.value)
        return str(error.value)

    def passes(change) -> str:
        def repack(payload: bytes) -> bytes:
            n, out, events = struct.unpack_from("<III", payload)
            columns = bytearray(zlib.decompress(payload[12:]))
            head = change(n, out, columns) or (n, out)
            return struct.pack("<III", *head, events) + zlib.compress(bytes(columns))

        return message(rewritten(data, 4, repack))

    def put(code: str, value: int, at):
        return lambda n, out, columns: struct.pack_into(code, columns, at(n), value)

    assert "pass 0: the run had counted 7 hits" in passes(put("<Q", 7, lambda n: 8 * n))
    assert "bytes_read" in passes(put("<Q", 7, lambda n: 8 * n * 6))
    assert "arena too small" in passes(put("<Q", 7, lambda n: 0))
    assert "without rows" in passes(put("<I", 0, lambda n: 64 * n))
    assert "do not ascend" in passes(put("<I", 1 << 30, lambda n: 64 * n + 12 * n))
    assert "does not hold" in passes(lambda n, out, columns: (n, out + 1))
    assert "0 passes" in passes(lambda n, out, columns: (0, out))
    assert "passes with" in passes(lambda n, out, columns: (n, 1 << 31))
    assert "lack tokens" in passes(put("<I", 256, lambda n: 64 * n))
    assert "belongs to no pass" in message(without(data, 4))
    assert "sizes of the run" in message(without(data, 2))
    assert "sizes of experts" in message(rewritten(data, 2, lambda p: zlib.compress(bytes(8 * (3 + 48)))))
    assert "does not hold" in message(rewritten(data, 2, lambda p: zlib.compress(bytes(8))))
    assert "0 passes" in message(rewritten(data, 4, lambda p: b""))


@pytest.mark.parametrize("events", [[0 << 4 | 0], [1 << 4 | 6, 2, 1, 2, 1, 1], []])
def test_a_recorded_pass_leaves_nothing_open(events):
    """A layer that was begun, a stream that was. Nothing but its events happens in it."""
    simulator = _core.Simulator([4], [1], 4, window=2**32 - 1)
    ids = np.array([[[0, 1]]], np.int32)
    simulator.feed(ids)
    if events:
        with pytest.raises(HeadraceError, match="of a recorded pass cannot be"):
            simulator.end_pass(np.array(events, np.uint32))
    else:
        simulator.end_pass(np.array(events, np.uint32))
        assert simulator.counters()["loads"] == 0 and simulator.counters()["passes"] == 1


def test_after_a_pass_that_failed_nothing_more_is_recorded(models, tmp_path):
    """What it read and evicted is known to nobody, so what came after would not replay."""
    path = tmp_path / "t.trace"
    with load(models["gguf"], record_routing=True) as engine, Recorder(path, engine, identify(engine.checkpoint)) as r:
        session = engine.session(observe=r.observe)
        session.prefill(TOKENS[:20])
        session.step(TOKENS[20])
        engine.limit_arena(1)
        _core.disturb_reads(fail_at=3)
        try:
            with pytest.raises(HeadraceError, match="Input/output error"):
                session.step(TOKENS[21])
        finally:
            _core.disturb_reads()
        with pytest.raises(HeadraceError, match="a pass was not recorded"):
            session.step(TOKENS[21])
        assert session.length == 21
    assert replay_run(opened(path)).num_passes == 2

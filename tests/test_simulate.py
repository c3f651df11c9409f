"""The trace simulator and the policies: plain references, the engine's own counters, the command line."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, random_weights, write_gguf
from test_cli import assert_one_line_error, assert_wrong_usage, headrace, parsed
from test_traces import random_ids, write_jsonl

from headrace import _core
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError
from headrace.experts.simulate import POLICIES, Simulation, parse_policy, read_shape, simulate
from headrace.experts.trace_file import TraceWriter
from headrace.experts.traces import ModelIdentity, load_replay, open_trace
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store
from headrace.sizes import format_size

COUNTERS = ("hits", "late_hits", "loads", "prefetches", "evictions", "bytes_read", "bytes_unused")
LAYERS, EXPERTS, TOP_K = 3, 12, 3


# ---- references


class Reference:
    """One policy over a set of resident (layer, expert), by the rules of docs/policies.md, in the plainest way."""

    def __init__(self, policy: str, slots: int, hot_routes: int):
        self.policy, self.slots, self.hot_routes = policy, slots, hot_routes
        self.resident: set[tuple[int, int]] = set()
        self.clock, self.last_use = 0, {}
        self.routes: Counter[tuple[int, int]] = Counter()
        self.hot: Counter[tuple[int, int]] = Counter()
        self.hot_seen: Counter[int] = Counter()
        self.history: list[list[set[int]]] = [[] for _ in range(LAYERS)]
        self.hits = self.loads = self.evictions = 0

    def rank(self, expert: tuple[int, int]) -> tuple:
        """The least goes first."""
        recency = self.last_use.get(expert, 0)
        if self.policy == "lru":
            return (recency,)
        if self.policy == "lfu":
            return (self.routes[expert], recency)
        if self.policy == "lfru":
            return (self.routes[expert].bit_length(), recency)
        if self.policy == "prefill-hot":
            return (self.hot[expert], recency)
        return (self.chance(*expert), recency)

    def chance(self, layer: int, expert: int) -> int:
        """In units of 2^-32, rounded down as the policy does, so that ties are the same."""
        past = self.history[layer]
        if not past:
            return 0
        total = 0
        for a in past[-1]:
            after = [later for earlier, later in pairwise(past) if a in earlier]
            total += 2**32 // len(after) * sum(expert in later for later in after) if after else 0
        return total // len(past[-1])

    def run(self, layer: int, routes: list[int]) -> None:
        counts = Counter(routes)
        needed = sorted(counts)
        self.history[layer].append(set(needed))
        is_hot = self.hot_seen[layer] < self.hot_routes
        for e in needed:
            self.clock += 1
            self.last_use[layer, e] = self.clock
            self.routes[layer, e] += counts[e]
            if is_hot:
                self.hot[layer, e] += counts[e]
                self.hot_seen[layer] += counts[e]
        missing = [e for e in needed if (layer, e) not in self.resident]
        self.loads += len(missing)
        self.hits += len(needed) - len(missing)
        if len(needed) > self.slots:
            if len(needed) - len(missing) == self.slots and missing[0] == needed[0]:
                self.hits, self.loads, self.evictions = self.hits - 1, self.loads + 1, self.evictions + 1
            free = self.slots - len(self.resident)
            self.evictions += len(missing) - free
            self.resident = {(layer, e) for e in needed[-self.slots :]}
            return
        for e in missing:
            if len(self.resident) == self.slots:
                others = [x for x in self.resident if x[0] != layer or x[1] not in counts]
                self.resident.remove(min(others, key=self.rank))
                self.evictions += 1
            self.resident.add((layer, e))


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "prefill-hot", "markov"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 15, 30, 36])
def test_policies_do_what_plain_references_do(policy, window, slots):
    # Some experts are favoured, so that frequency and order mean something.
    rng = np.random.default_rng(slots)
    share = 1 / np.arange(1, EXPERTS + 1)
    ids = np.array(
        [[np.sort(rng.choice(EXPERTS, TOP_K, False, share / share.sum())) for _ in range(LAYERS)] for _ in range(90)],
        np.int32,
    )
    hot_routes = 10 * TOP_K
    reference = Reference(policy, slots, hot_routes)
    for first in range(0, len(ids), window):
        for layer in range(LAYERS):
            reference.run(layer, ids[first : first + window, layer].ravel().tolist())
    simulator = _core.Simulator([EXPERTS] * LAYERS, [1] * LAYERS, slots, policy, hot_routes=hot_routes, window=window)
    for part in np.array_split(ids, 7):  # blocks cut passes anywhere
        simulator.feed(np.ascontiguousarray(part))
    simulator.finish()
    c = simulator.counters()
    assert (c["hits"], c["loads"]) == (reference.hits, reference.loads)
    if slots >= TOP_K * window:
        assert c["evictions"] == reference.evictions
    assert c["passes"] == -(-len(ids) // window)


def test_knowing_more_of_the_future_never_loads_more():
    ids = random_ids(300, LAYERS, EXPERTS, TOP_K).astype(np.int32)

    def loads(policy: str, lookahead: int = 0) -> int:
        simulator = _core.Simulator([EXPERTS] * LAYERS, [1] * LAYERS, 14, policy, lookahead=lookahead)
        simulator.feed(ids)
        simulator.finish()
        return simulator.counters()["loads"]

    assert loads("belady", 1000) == loads("belady", 300) < loads("belady", 2) < loads("lru") == loads("belady")


def test_an_oracle_without_limits_prefetches_all_but_the_first_pass():
    ids = random_ids(50, LAYERS, EXPERTS, TOP_K).astype(np.int32)
    for policy in _core.policy_names():
        runs = []
        for recall in (1.0, 0.5, 0.0):
            simulator = _core.Simulator(
                [EXPERTS] * LAYERS, [1] * LAYERS, 18, policy, transfers_per_layer=TOP_K, recall=recall, seed=3
            )
            simulator.feed(ids)
            simulator.finish()
            runs.append(simulator.counters())
        assert runs[0]["loads"] == LAYERS * TOP_K  # no forecast comes before the first pass
        assert runs[0]["prefetches_unused"] == 0
        assert runs[0]["loads"] < runs[1]["loads"] < runs[2]["loads"]
        assert runs[2]["hits"] + runs[2]["loads"] == ids.size
        assert runs[2]["prefetches_unused"] > 0


def test_misuse_is_refused():
    def make(*args, **kwargs):
        return _core.Simulator(*args, **kwargs)

    for arguments, options, message in [
        (([4], [1, 1], 2), {}, "a record size a layer"),
        (([], [], 2), {}, "at least one layer"),
        (([4], [0], 2), {}, "without experts or bytes"),
        (([4], [9], 8), {}, "largest expert's 9 bytes, found 8"),
        (([4], [1], 2, "fifo"), {}, "expected one of lru, lfu.* found 'fifo'"),
        (([4], [1], 2), {"window": 0}, "window of at least 1"),
        (([4], [1], 2), {"recall": 1.5}, "recall"),
        (([4], [1], 2), {"transfers_per_layer": -1.0}, "transfers"),
        (([4], [1], 2), {"transfers_per_layer": float("nan")}, "transfers"),
    ]:
        with pytest.raises(HeadraceError, match=message):
            make(*arguments, **options)
    simulator = make([4, 4], [1, 1], 2)
    with pytest.raises(HeadraceError, match="token 1 layer 1: expected an expert below 4, found 4"):
        simulator.feed(np.array([[[0], [1]], [[2], [4]]], np.int32))
    with pytest.raises(HeadraceError, match="2 layers"):
        simulator.feed(np.zeros((1, 3, 1), np.int32))
    with pytest.raises(HeadraceError, match="cache policy 'belady-0'"):
        parse_policy("belady-0")


# ---- the schedule bound

HORIZON = 2


def bound(works: list[tuple[int, int]], *link: object) -> float:
    before = link[2]
    b = _core.ScheduleBound([1] * len(before), _core.Link(*link, HORIZON))
    for used, loads in works:
        b.add(used, loads)
    b.finish()
    return b.seconds


def fastest(works: list[tuple[int, int]], layers: int, before: list, after: list, triggers: list) -> int:
    """Ticks that the best of all schedules takes; in one tick the link moves one expert, of whichever load is known.

    works: (experts used, of them loaded) of each layer of each pass. A search over all states of a run: where it is,
    how far in its layer, what is left of each known load.
    """

    def told_at(place: int) -> list[int]:
        layer, found = place % layers, [place]
        if layer in triggers:
            first = max((t + 1 for t in triggers if t < layer), default=0)
            for ahead in range(1, HORIZON + 1):
                begin = (place // layers + ahead) * layers
                found += [begin + i for i in range(first, layer + 1)]
        return [p for p in found if p < len(works)]

    def settle(place: int, ticks: int, left: tuple) -> tuple:
        """Passes over moments that take no time. ticks: of the layer so far; left[p]: None while nobody knows."""
        while place < len(works):
            layer = place % layers
            if ticks == before[layer]:
                known = list(left)
                for p in told_at(place):
                    known[p] = works[p][1] if known[p] is None else known[p]
                left = tuple(known)
            share = after[layer] // works[place][0]
            if ticks < before[layer] + after[layer] or left[place] is None or left[place] > -share:
                break
            place, ticks = place + 1, 0
        return place, ticks, left

    # left[p] <= 0 counts on down after the last expert came: its own share of computing. Nothing was loaded: long ago.
    works = [(used, loads if loads else -1000) for used, loads in works]
    states, clock = {settle(0, 0, (None,) * len(works))}, 0
    while not any(place == len(works) for place, _, _ in states):
        clock += 1
        following = set()
        for place, ticks, left in states:
            aged = [n - 1 if n is not None and n <= 0 else n for n in left]
            movable = [p for p, n in enumerate(left) if n is not None and n > 0]
            for p in movable or [None]:
                after_move = list(aged)
                if p is not None:
                    after_move[p] = left[p] - 1
                following.add(settle(place, ticks + 1, tuple(n if n is None else max(n, -20) for n in after_move)))
        states = following
    return clock


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_is_faster_than_the_bound(seed):
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 4))
    works = [(2, int(rng.integers(0, 3))) for _ in range(layers * (4 if layers < 3 else 3))]
    before = rng.integers(0, 3, layers).tolist()
    after = (2 * rng.integers(0, 3, layers)).tolist()
    triggers = sorted(rng.choice(layers, int(rng.integers(0, layers + 1)), False).tolist())
    assert bound(works, 1, 0, before, after, triggers) == fastest(works, layers, before, after, triggers)


def test_the_bound_in_cases_that_can_be_worked_out():
    works = [(8, 4), (8, 0), (8, 2), (8, 8)]  # two passes of two layers
    times = [1.0, 2.0], [4.0, 8.0]
    # Nothing is known ahead: the last expert's eighth of computing follows the last load.
    demand = 1 + max(4, 40 + 0.5) + 2 + 8 + 1 + max(4, 20 + 0.5) + 2 + max(8, 80 + 1)
    assert bound(works, 0.1, 0, *times, []) == pytest.approx(demand)
    assert bound(works, 0.1, 3, *times, []) == pytest.approx(demand + 9)  # three layers wait for a first transfer
    # A link without limits: computing alone.
    assert bound(works, 1e12, 0, *times, []) == pytest.approx(2 * 15)
    # A trigger at layer 1: both layers of the second pass, 20 and 80 s of loads, are known from its routes on.
    routed = 1 + max(4, 40.5) + 2
    third = max(routed + 8 + 1 + 4, routed + 20 + 0.5)
    assert bound(works, 0.1, 0, *times, [1]) == pytest.approx(max(third + 2 + 8, routed + 100 + 1))
    empty = _core.ScheduleBound([1], _core.Link(1, 0, [1], [1], []))
    empty.finish()
    assert empty.seconds == 0


def test_knowing_earlier_never_slows_the_bound():
    rng = np.random.default_rng(1)
    works = [(8, int(rng.integers(0, 5))) for _ in range(40 * 6)]
    settings = ([0.2] * 6, [0.5] * 6)
    runs = [bound(works, 2, 0.1, *settings, t) for t in ([], [2], [2, 5], [1, 3, 5], [0, 1, 2, 3, 4, 5])]
    assert runs == sorted(runs, reverse=True) and runs[0] > runs[-1]
    assert runs[-1] >= max(40 * 6 * 0.7, sum(loads for _, loads in works) / 2)
    for link, message in [
        ((0, 0, [1], [1], []), "more than 0 bytes"),
        ((1, -1, [1], [1], []), "latency"),
        ((1, 0, [1], [1, 1], []), "two times"),
        ((1, 0, [-1], [1], []), "two times"),
        ((1, 0, [1], [1], [1]), "trigger layers below 1"),
        ((1, 0, [1], [1], [0, 0]), "ascending trigger"),
        ((1, 0, [1], [1], [], 0), "horizon"),
    ]:
        with pytest.raises(HeadraceError, match=message):
            _core.ScheduleBound([1], _core.Link(*link))


# ---- the engine


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("simulate")
    spec = OLMOE.but(num_hidden_layers=3, num_experts=16)
    write_gguf(directory / "model.gguf", spec, random_weights(spec, std=0.6), dtype="Q4_0")
    pack_store(open_checkpoint(directory / "model.gguf"), directory / "store", lambda done, total: None)
    return directory / "store"


def load(store: Path, policy: str, **options) -> Engine:
    return Engine(
        open_checkpoint(store),
        EngineOptions(context=64, num_threads=2, prompt_rows=12, policy=policy, **options),
    )


def replayed(engine: Engine, slots: int, policy: str, passes: list[np.ndarray], lookahead: int = 0) -> dict[str, int]:
    """The simulator's counters for passes of ids [layers, rows, top_k] under the engine's shape."""
    shape = [engine.config.num_experts] * len(engine.checkpoint.experts)
    record = engine._smallest_arena
    hot_routes = engine.options.prompt_rows * engine.config.num_experts_per_tok
    simulator = _core.Simulator(
        shape, [record] * len(shape), slots * record, policy, hot_routes=hot_routes, window=1 << 20, lookahead=lookahead
    )
    for ids in passes:
        simulator.feed(np.ascontiguousarray(ids.transpose(1, 0, 2), np.int32))
        simulator.end_pass()
    simulator.finish()
    return simulator.counters()


TOKENS = np.random.default_rng(5).integers(0, OLMOE.vocab_size, 40).tolist()


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "prefill-hot", "markov"])
@pytest.mark.parametrize("slots", [1, 5, 17, 40, 48])
def test_the_simulator_counts_what_the_engine_did(store, policy, slots):
    """Steps and verifications with the routes that the model chose, and reads of uncertain length."""
    counts = []
    for delay_us in (0, 800):
        seen: list[np.ndarray] = []
        _core.disturb_reads(delay_us)
        try:
            with load(store, policy, record_routing=True, max_out_rows=4) as engine:
                engine.limit_arena(slots * engine._smallest_arena)
                session = engine.session(observe=lambda routing, seen=seen: seen.append(routing.ids.copy()))
                session.verify(TOKENS[:12])  # streamed passes depend on when reads land: test_recorded_run.py
                for token in TOKENS[12:30]:
                    session.step(token)
                session.verify(TOKENS[30:40])
                counts.append(engine.counters())
                simulated = replayed(engine, slots, policy, seen)
        finally:
            _core.disturb_reads()
        assert len(seen) == 3 + 18 + 3
        assert {k: counts[-1][k] for k in COUNTERS} == {k: simulated[k] for k in COUNTERS}
    assert counts[0]["evictions"] > 0 or slots == 48
    assert counts[0]["hits"] > 0 or slots < 17


@pytest.mark.parametrize("policy", ["belady", "belady-2"])
@pytest.mark.parametrize("slots", [1, 5, 17, 48])
def test_the_oracle_in_the_engine_is_that_of_the_simulator(store, tmp_path, policy, slots):
    config = open_checkpoint(store).config
    ids = random_ids(30, 3, config.num_experts, config.num_experts_per_tok)
    replay = load_replay(open_trace(write_jsonl(tmp_path / "t.jsonl", ids)), 30)
    choice = parse_policy(policy)
    _core.disturb_reads(500)
    try:
        with load(store, choice.native, max_out_rows=8) as engine:
            engine.limit_arena(slots * engine._smallest_arena)
            ends = [(0, 8), (8, 16), (16, 20), *((i, i + 1) for i in range(20, 30))]
            passes = [replay.rows(first, end - first) for first, end in ends]
            engine.foresee(([np.unique(layer) for layer in routes] for routes in passes), choice.lookahead)
            session = engine.session(replay=replay)
            session.verify(TOKENS[:20])
            for token in TOKENS[20:30]:
                session.step(token)
            counters = engine.counters()
            simulated = replayed(engine, slots, "belady", passes, choice.lookahead)
            lru = replayed(engine, slots, "lru", passes)
    finally:
        _core.disturb_reads()
    assert {k: counters[k] for k in COUNTERS} == {k: simulated[k] for k in COUNTERS}
    assert simulated["loads"] <= lru["loads"]


# ---- the command


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("trace") / "t.jsonl", random_ids(80, LAYERS, EXPERTS, TOP_K))


def test_simulate_reports_rows(trace):
    done = headrace("simulate", trace, "--residency", ".1,.5,1", "--json", "--experts", 14)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tokens"], report["layers"], report["experts"], report["top_k"]) == (80, LAYERS, 14, TOP_K)
    assert report["prompt_tokens"] == 8
    rows = {(r["policy"], r["residency"]): r for r in report["rows"]}
    assert set(rows) == {(p, r) for p in POLICIES for r in (0.1, 0.5, 1.0)}
    for (_, residency), row in rows.items():
        assert row["slots"] == {0.1: 4, 0.5: 21, 1.0: 42}[residency]
        assert row["hits"] + row["loads"] == 80 * LAYERS * TOP_K
        assert row["hit_rate"] == row["hits"] / (80 * LAYERS * TOP_K)
        assert row["late_hits"] == row["prefetches"] == row["prefetches_unused"] == 0
        assert row["hits"] <= rows["belady", residency]["hits"]
        assert row["passes"] == 80 and row["loads_per_pass"] == row["loads"] / 80
        if residency == 1:
            assert row["evictions"] == 0 and row["loads"] == rows["lru", 1.0]["loads"]
        assert "bytes_read" not in row
    single = headrace(
        "simulate", trace, "--residency", ".5", "--json", "--experts", 14, "--policies", "markov", "-t", 1
    )
    assert json.loads(single.stdout)["rows"] == [rows["markov", 0.5]]


def test_simulate_windows_pins_prefetch_and_bytes(trace, store, tmp_path):
    def rows(*args: object, path: Path = trace) -> list[dict]:
        done = headrace("simulate", path, "--policies", "lru", "--residency", ".5", "--json", *args)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rows"]

    plain, window = rows()[0], rows("--window", 7)[0]
    assert window["passes"] == 12 and window["hits"] + window["loads"] < plain["hits"] + plain["loads"]
    assert rows("--no-pins")[0]["loads"] != plain["loads"]
    ahead = rows("--prefetch", 2, "--recall", 0.5)[0]
    assert ahead["prefetches"] > 0 and ahead["loads"] < plain["loads"]
    assert rows("--prefetch", 0.3)[0]["late_hits"] > 0
    config = open_checkpoint(store).config
    ids = random_ids(20, 3, config.num_experts, config.num_experts_per_tok)
    sized = rows("--model", store, path=write_jsonl(tmp_path / "t.jsonl", ids))[0]
    record = sized["bytes_read"] // sized["loads"]
    assert record >= 4096 and sized["bytes_read"] == record * sized["loads"] and sized["bytes_unused"] == 0
    table = headrace("simulate", tmp_path / "t.jsonl", "--model", store, "--policies", "lru", "--residency", ".5")
    head, row = (line.split() for line in table.stdout.splitlines()[1:])
    assert dict(zip(head, row, strict=True)) == {
        "policy": "lru",
        "resident": "50%",
        "hits": f"{sized['hit_rate']:.1%}",
        "read/token": format_size(sized["bytes_read"] // 20),
    }

    table = headrace("simulate", trace).stdout.splitlines()
    assert [line.split()[0] for line in table[2:]] == list(POLICIES)
    table = headrace("simulate", trace, "--prefetch", 1).stdout.splitlines()
    assert len(table) == 2 + 4 * len(POLICIES)


def test_simulate_bounds_what_a_link_allows(trace):
    common = ("--policies", "lru,belady", "--residency", ".3,1", "--record", "1MB", "--json", "--bound")
    slow, fast = (
        json.loads(headrace("simulate", trace, *common, "--link", rate, "--layer-s", "1e-3,2e-3").stdout)["rows"]
        for rate in ("1GB", "1000GB")
    )
    for row, quick in zip(slow, fast, strict=True):
        assert 0 < row["demand_tps"] <= row["bound_tps"] <= row["loose_tps"]
        assert row["bytes_read"] == row["loads"] * 10**6
        assert row["loose_tps"] == pytest.approx(80 / max(80 * LAYERS * 3e-3, row["bytes_read"] / 1e9))
        assert row["bound_tps"] < quick["bound_tps"] <= 1 / (LAYERS * 3e-3) + 1e-9
    late = headrace("simulate", trace, *common, "--link", "1GB", "--layer-s", "1e-3,2e-3", "--triggers", "0")
    late_rows = json.loads(late.stdout)["rows"]
    assert all(a["bound_tps"] <= b["bound_tps"] for a, b in zip(late_rows, slow, strict=True))
    assert late_rows[0]["bound_tps"] < slow[0]["bound_tps"]
    table = headrace("simulate", trace, *[c for c in common if c != "--json"]).stdout.splitlines()
    assert len(table) == 3 + 4
    for assumed in ("link of 2 GB/s and 0.0001 s a transfer", "experts of 976.56KiB", "layers of 0.0005 s before"):
        assert assumed in table[1]
    assert table[1].endswith("forecasts at all layers, of 1 pass ahead")
    crawl = ["--link", "1KB", "--triggers", "0,2", "--horizon", 3, "--layer-s", "1,2.5"]
    table = headrace("simulate", trace, *[c for c in common if c != "--json"], *crawl).stdout.splitlines()
    assert "layers of 1 s before the router and 2.5 s after it; forecasts at layers 0, 2, of 3 passes" in table[1]
    for line in table[3:]:  # however small, a speed has digits
        assert all(0 < float(speed) < 0.005 for speed in line.split()[-3:])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--bound"], "--record SIZE"),
        (["--bound", "--record", "1M", "--prefetch", 1], "no --prefetch"),
        (["--bound", "--record", "1M", "--triggers", "2,1"], "expected ascending layers, found 2,1"),
        (["--bound", "--record", "1M", "--triggers", "1,1"], "expected each once, found 1 again"),
        (["--bound", "--record", "1M", "--triggers", "1,x"], "found 'x'"),
        (["--bound", "--record", "1M", "--triggers=-1"], "found '-1'"),
        (["--bound", "--record", "1M", "--link", "fast"], "expected a number and a unit"),
        (["--bound", "--record", "1M", "--link", "0"], "found 0"),
        (["--bound", "--record", "0"], "expected 1 byte to 64GiB, found 0"),
        (["--bound", "--record", "65GiB"], "expected 1 byte to 64GiB"),
        (["--bound", "--record", "1M", "--layer-s", "1"], "expected two times"),
        (["--bound", "--record", "1M", "--layer-s", "1,x"], "found 'x'"),
        (["--bound", "--record", "1M", "--layer-s=-1,0"], "found '-1'"),
        (["--bound", "--record", "1M", "--layer-s", "nan,0"], "found 'nan'"),
        (["--bound", "--record", "1M", "--latency", "inf"], "--latency"),
        (["--link", "2GB"], "goes with --bound"),
        (["--latency", "1"], "goes with --bound"),
        (["--layer-s", "1,1"], "goes with --bound"),
        (["--triggers", "0"], "goes with --bound"),
        (["--horizon", "2"], "goes with --bound"),
        (["--recall", "0.5"], "goes with --prefetch"),
        (["--prefetch", "0", "--recall", "0.5"], "goes with --prefetch"),
        (["--prefetch", "1", "--seed", "0"], "goes with --recall"),
        (["--prefetch", "1", "--recall", "0.5", "--seed", 2**64], "--seed"),
        (["--policies", "lru", "--prompt", "3"], "goes with prefill-hot"),
        (["--model", "tiny", "--record", "1M"], "goes not with --model"),
        (["--model", "tiny", "--experts", "32"], "goes not with --model"),
        (["--policies", "lru,fifo"], "'fifo'"),
        (["--policies", ""], "''"),
        (["--policies", "lru,lfu,lru"], "expected each once, found lru again"),
        (["--policies", "belady-0"], "1 to 999999"),
        (["--residency", ".5,0"], "found '0'"),
        (["--residency", ".5,1/2"], "found 1/2 again"),
        (["--residency", "1.1"], "found '1.1'"),
        (["--residency", "x"], "expected shares above 0 and at most 1"),
        (["--residency", "25%"], "found '25%'"),
        (["--residency", "1/0"], "found '1/0'"),
        (["--residency", "1e-999999999"], "expected shares"),
        (["--residency", "nan"], "expected shares"),
        (["--window", "0"], "--window"),
        (["--window", 2**40], "--window"),
        (["--recall", "2"], "--recall"),
        (["--partial"], "goes with --recorded"),
    ],
)
def test_wrong_usage_of_simulate(trace, args, words):
    done = parsed("simulate", trace, *args)
    assert_wrong_usage(done, words)
    for python in ("Invalid literal", "could not convert", "invalid literal", "Error:"):
        assert python not in done.stderr


def test_wrong_usage_that_only_the_trace_shows(trace):
    outside = headrace("simulate", trace, "--bound", "--record", "1M", "--triggers", "0,3")
    assert_wrong_usage(outside, "expected layers of 0 to 2", "found 3")
    assert_wrong_usage(headrace("simulate", trace, "--prompt", "81"), "expected at most the 80 tokens")
    assert_wrong_usage(headrace("simulate", trace, "--experts", "5"), "expected at least 12")


def test_simulate_reads_shares_of_every_kind(trace):
    done = headrace("simulate", trace, "--policies", "lru", "--residency", "1, 0.5,.25,1/3,0.05/2", "--json")
    assert [r["residency"] for r in json.loads(done.stdout)["rows"]] == pytest.approx([1, 0.5, 0.25, 1 / 3, 0.025])


def test_the_experts_that_a_recorded_trace_names_are_not_overridden(tmp_path):
    recorded, values = tmp_path / "t.trace", np.zeros((LAYERS, 10, TOP_K), np.float32)
    with TraceWriter(recorded, ModelIdentity("model", "olmoe", "0"), LAYERS, EXPERTS, TOP_K) as writer:
        writer.add([0] * 10, random_ids(10, LAYERS, EXPERTS, TOP_K).transpose(1, 0, 2), values, values)
    for wrong in (EXPERTS - 1, EXPERTS + 1):
        assert_wrong_usage(headrace("simulate", recorded, "--experts", wrong), "expected 12", f"found {wrong}")
    assert headrace("simulate", recorded, "--experts", EXPERTS, "--policies", "lru").returncode == 0


def test_a_trace_without_tokens_is_not_simulated(tmp_path):
    with TraceWriter(tmp_path / "t.trace", ModelIdentity("model", "olmoe", "0"), LAYERS, EXPERTS, TOP_K):
        pass
    assert_one_line_error(headrace("simulate", tmp_path / "t.trace"), "t.trace", "holds no tokens")


def test_simulate_says_what_it_found_in_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_one_line_error(headrace("simulate", tmp_path), "found a directory; give a file")
    assert_one_line_error(headrace("simulate", tmp_path / "pipe"), "found a pipe; write what comes out of it to a file")
    assert_one_line_error(headrace("simulate", "/dev/null"), "found a device; give a file")


def test_simulate_and_policies_refuse_in_one_line(trace, tmp_path, store):
    assert_one_line_error(headrace("simulate", tmp_path / "none"), "none")
    other = write_jsonl(tmp_path / "other.jsonl", random_ids(9, LAYERS + 1, EXPERTS, TOP_K))
    assert_one_line_error(headrace("simulate", other, "--model", store), "replay a trace of a model of the same shape")
    config = open_checkpoint(store).config
    beyond = random_ids(9, 3, config.num_experts + 1, config.num_experts_per_tok)
    beyond[4, 0, -1] = config.num_experts
    path = write_jsonl(tmp_path / "beyond.jsonl", beyond)
    assert_one_line_error(headrace("simulate", path, "--model", store), "expected fewer than 16 experts")


def test_bench_and_run_take_a_policy(store, tmp_path):
    config = open_checkpoint(store).config
    path = write_jsonl(tmp_path / "t.jsonl", random_ids(20, 3, config.num_experts, config.num_experts_per_tok))
    common = ("--prompt", 12, "--gen", 8, "--repeat", 2, "--json", "--replay", path)
    for policy in ("lfru", "belady", "belady-3"):
        done = headrace("bench", store, *common, "--policy", policy)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["policy"] == policy
    done = headrace("run", "tiny", "-p", "And", "-n", 4, "--policy", "markov", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["policy"] == "markov", done.stderr


def test_a_recorded_trace_knows_its_shape_and_its_sequences(tmp_path):
    ids = random_ids(19, LAYERS, EXPERTS, TOP_K)
    recorded, values = tmp_path / "t.trace", np.zeros((LAYERS, 10, TOP_K), np.float32)
    with TraceWriter(recorded, ModelIdentity("model", "olmoe", "0"), LAYERS, EXPERTS, TOP_K) as writer:
        for part in (ids[:10], ids[10:]):
            n = len(part)
            writer.add([0] * n, part.transpose(1, 0, 2), values[:, :n], values[:, :n])
            writer.end_sequence()
    opened = open_trace(recorded)
    opened.blocks = None  # its header says all there is to know
    shape = read_shape(opened)
    assert (shape.num_experts, shape.num_tokens, shape.top_k) == ((EXPERTS,) * LAYERS, 19, TOP_K)
    rows = {}
    for path in (recorded, write_jsonl(tmp_path / "t.jsonl", ids)):
        for window in (1, 4):
            settings = Simulation(prompt_tokens=2, window=window)
            (rows[path, window],) = simulate(open_trace(path), shape, [parse_policy("lru")], [0.5], settings)
    jsonl = tmp_path / "t.jsonl"
    assert rows[recorded, 1] == rows[jsonl, 1]
    assert (rows[recorded, 4]["passes"], rows[jsonl, 4]["passes"]) == (3 + 3, 5)


def test_read_shape_and_simulate_as_a_library(trace):
    opened = open_trace(trace)
    shape = read_shape(opened)
    assert (shape.num_experts, shape.num_tokens) == ((EXPERTS,) * LAYERS, 80)
    settings = Simulation(prompt_tokens=8)
    one, two = (simulate(opened, shape, [parse_policy("lfu")], [0.3], settings, threads) for threads in (1, 2))
    assert one == two and one[0]["slots"] == 10

"""Measures what a profile holds: read bandwidths, then one request for each group size (docs/prefill.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.engine import Engine, EngineOptions, Session, make_plan
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline
from headrace.formats.checkpoint import Checkpoint
from headrace.tune.configure import choose_queue_depth
from headrace.tune.profile import Bandwidth, Device, Profile, fingerprint_of, shape_of
from headrace.tune.request import ModelShape
from headrace.tune.service_times import (
    ComputeSamples,
    ServiceTimes,
    fit_compute,
    fit_non_expert,
    fit_read,
)

CALIBRATION_TOKENS = 1024
SHORT_TOKENS = 128  # of the requests that tell fixed times from those that grow with rows
QUEUE_DEPTHS = (1, 2, 3, 4, 6, 8)
PREFERRED_GROUP_BYTES = 12 << 20  # the order of candidates, where time does not allow all
TIME_LIMIT_S = 50.0
READ_SECONDS = 0.1  # of reading, to measure a bandwidth once
READ_ROUNDS = 3  # one after the other over all cells, since disks of shared machines drift
SEED = 0

Progress = Callable[[float, str], None]  # share done, what is being done


@dataclass(frozen=True)
class Pass:
    """What one streamed pass took. Arrays are ExpertMemory.take_timeline()'s."""

    group_size: int
    queue_depth: int
    rows: int
    first: int
    seconds: float
    reads: dict[str, np.ndarray]
    computes: dict[str, np.ndarray]
    routed_s: np.ndarray  # [layers]
    read_bytes: np.ndarray  # [layers]: of an expert, what loading it reads

    @property
    def non_expert_s(self) -> np.ndarray:
        """[layers]: from the end of the layer before."""
        ended = np.zeros(len(self.routed_s))
        np.maximum.at(ended, self.computes["layer"], self.computes["end_s"])
        return self.routed_s - np.concatenate([[0], np.maximum.accumulate(ended)[:-1]])

    @property
    def idle_s(self) -> np.ndarray:
        """Of each computation: how long nothing was computed though its reads, its layer's routes and the computation
        before were over."""
        groups: dict[tuple[int, int], float] = {}
        for layer, first, end in zip(
            *(self.reads[name].tolist() for name in ("layer", "first_expert", "end_s")), strict=True
        ):
            key = layer, first // self.group_size
            groups[key] = max(groups.get(key, 0.0), end)
        layer, first = self.computes["layer"], self.computes["first_expert"] // self.group_size
        read = np.array([groups.get(key, 0.0) for key in zip(layer.tolist(), first.tolist(), strict=True)])
        before = np.concatenate([[0], self.computes["end_s"][:-1]])
        could = np.maximum(np.maximum(read, self.routed_s[layer]), before)
        return np.maximum(0, self.computes["start_s"] - could)

    @property
    def after_s(self) -> float:
        return max(0.0, self.seconds - max(self.computes["end_s"].max(initial=0), self.routed_s[-1]))

    @property
    def busy_s(self) -> float:
        """Without waiting for reads."""
        computed = self.computes["end_s"] - self.computes["start_s"]
        return float(self.non_expert_s.sum() + computed.sum()) + self.after_s


@dataclass(frozen=True)
class Calibration:
    profile: Profile
    passes: list[Pass]


def engine_options(checkpoint: Checkpoint, memory_bytes: int | None, num_threads: int | None) -> EngineOptions:
    """For an engine that calibrate() is given: fewer tokens where the budget is too small for CALIBRATION_TOKENS."""
    limit = checkpoint.config.max_position_embeddings
    tokens = max(1, min(CALIBRATION_TOKENS, limit - SHORT_TOKENS if limit > 2 * SHORT_TOKENS else limit))
    while True:
        options = EngineOptions(
            context=min(tokens + SHORT_TOKENS, limit),
            memory_bytes=memory_bytes,
            num_threads=num_threads,
            prompt_rows=tokens,
            pipeline=Pipeline(1, max(QUEUE_DEPTHS), max(QUEUE_DEPTHS)),  # a thread for each read
        )
        try:
            make_plan(checkpoint, options)
            return options
        except HeadraceError:
            if tokens <= SHORT_TOKENS:
                raise
        tokens //= 2


class _Calibrator:
    def __init__(self, engine: Engine, progress: Progress, time_limit_s: float):
        self.engine, self.progress = engine, progress
        self.shape = shape_of(engine.checkpoint)
        self.record_bytes = self.shape.largest_record_bytes
        # More than that would keep what was read before, which is not to be measured.
        arena_bytes = engine.prompt_arena_bytes(engine.max_rows)
        self.arena_bytes = max(self.record_bytes, min(arena_bytes, self.shape.expert_bytes // 2))
        self.time_limit_s, self.end = time_limit_s, time.perf_counter() + time_limit_s
        self.read_seconds = READ_SECONDS
        self.rng = np.random.default_rng(SEED)

    # ---- reading

    def banks_that_fit(self, group_size: int) -> int:
        return self.arena_bytes // (group_size * self.record_bytes)

    def bandwidths(self, sizes: Sequence[int]) -> list[Bandwidth]:
        self.engine.limit_arena(self.record_bytes)
        self.engine.limit_arena(self.arena_bytes)
        cells = [(g, q) for g in sizes for q in QUEUE_DEPTHS if self.banks_that_fit(g) >= q]
        self.read_seconds = min(READ_SECONDS, self.time_limit_s / 4 / READ_ROUNDS / len(cells))
        speeds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
        for i in range(READ_ROUNDS):
            for k, cell in enumerate(cells):
                self.progress(0.25 * (i + k / len(cells)) / READ_ROUNDS, f"reading, G {cell[0]}, Q {cell[1]}")
                speeds[cell].append(self.read_speed(*cell))
        return [Bandwidth(g, q, float(np.median(each))) for (g, q), each in speeds.items()]

    def read_speed(self, group_size: int, queue_depth: int) -> float:
        """Bytes a second of groups that nobody computes. What earlier reads left in the arena is passed over."""
        memory, layers = self.engine.experts, len(self.shape.num_experts)
        banks = min(2 * queue_depth, self.banks_that_fit(group_size))
        enough = 2 * queue_depth * group_size * self.record_bytes
        before, start = self.engine.counters()["bytes_read"], time.perf_counter()

        def read() -> tuple[int, float]:
            return self.engine.counters()["bytes_read"] - before, time.perf_counter() - start

        def is_enough() -> bool:
            nbytes, seconds = read()
            return nbytes >= enough and (seconds >= self.read_seconds or nbytes >= self.shape.expert_bytes)

        while not is_enough():
            memory.begin_stream(group_size, queue_depth, banks, True, [True] * layers, True)
            try:
                for layer in range(layers):
                    self.read_layer(layer)
                    if is_enough():
                        break
            finally:
                memory.end_stream()
        nbytes, seconds = read()
        return nbytes / seconds

    def read_layer(self, layer: int) -> None:
        memory = self.engine.experts
        memory.begin(layer, list(range(self.shape.num_experts[layer])))
        try:
            while taken := memory.take(True):
                for index in taken:
                    memory.release(index)
        finally:
            memory.end()

    # ---- whole passes

    def open_session(self, pipeline: Pipeline) -> Session:
        """With an empty arena that holds the banks and no more."""
        self.engine.options = replace(self.engine.options, pipeline=pipeline)
        self.engine.limit_arena(self.record_bytes)
        self.engine.limit_arena(pipeline.bank_experts * self.record_bytes)
        return self.engine.session()

    def run_pass(self, session: Session, rows: int) -> Pass:
        tokens = self.rng.integers(0, self.engine.config.vocab_size, rows).tolist()
        first, memory = session.length, self.engine.experts
        memory.record_timeline(True)
        start = time.perf_counter()
        session.prefill(tokens)
        seconds = time.perf_counter() - start
        timeline: dict[str, Any] = memory.take_timeline()
        memory.record_timeline(False)
        pipeline = self.engine.pipeline(rows)
        return Pass(
            pipeline.group_size,
            pipeline.queue_depth,
            rows,
            first,
            seconds,
            timeline["reads"],
            timeline["computes"],
            timeline["layers"]["routed_s"],
            np.array([min(memory.read_bytes(layer)) for layer in range(len(self.shape.num_experts))]),
        )

    def run(self) -> Calibration:
        sizes = [g for g in self.shape.group_sizes() if self.banks_that_fit(g) >= 1]
        bandwidths = self.bandwidths(sizes)
        depth = choose_queue_depth(bandwidths)
        sizes = [g for g in sizes if self.banks_that_fit(g) > depth] or [1]
        preferred = sorted(sizes, key=lambda g: abs(np.log2(g * self.record_bytes / PREFERRED_GROUP_BYTES)))

        def pipeline(group_size: int) -> Pipeline:
            banks = max(1, min(2 * depth, self.banks_that_fit(group_size)))
            return Pipeline(group_size, min(depth, banks), banks)

        rows = min(self.engine.max_rows, self.engine.options.prompt_rows)
        short = max(1, min(SHORT_TOKENS, rows // 4))
        passes: list[Pass] = []
        longest = 0.0
        for i, group_size in enumerate(preferred):
            start = time.perf_counter()
            if i > 0 and start + longest > self.end:
                break
            # The same tokens for all group sizes, so the same routes.
            self.rng = np.random.default_rng(SEED)
            for is_short in (True, False):
                num_rows = short if is_short else rows  # which the short one may have lowered
                self.progress(0.25 + 0.75 * i / len(preferred), f"a prompt of {num_rows} tokens, G {group_size}")
                session = self.open_session(pipeline(group_size))
                passes.append(self.run_pass(session, num_rows))
                if i == 0 and is_short:
                    rows = self.affordable_rows(passes[0], rows, len(preferred))
                elif i == 0 and short <= self.engine.options.context - rows:
                    # Short, and far from the first position: what attention adds.
                    passes.append(self.run_pass(session, short))
                session.close()
            longest = max(longest, time.perf_counter() - start)
        self.progress(1.0, "")
        return Calibration(self.profile(depth, bandwidths, passes, rows), passes)

    def affordable_rows(self, measured: Pass, rows: int, num_requests: int) -> int:
        """Half as many, until all requests are expected to end in time."""

        def seconds(n: int) -> float:
            return max(measured.seconds, measured.busy_s * n / measured.rows)

        left = self.end - time.perf_counter() - num_requests * measured.seconds
        while rows > 2 * measured.rows and num_requests * seconds(rows) > left:
            rows //= 2
        return rows

    def profile(self, depth: int, bandwidths: list[Bandwidth], passes: list[Pass], tokens: int) -> Profile:
        engine = self.engine
        return Profile(
            model=engine.checkpoint.name,
            fingerprint=fingerprint_of(engine.checkpoint),
            device=Device.of(engine.checkpoint, engine.num_threads),
            queue_depth=depth,
            bandwidths=tuple(bandwidths),
            times=fit_passes(passes, self.shape, engine.config.num_experts_per_tok),
            group_sizes=tuple(sorted({p.group_size for p in passes})),
            calibration_tokens=tokens,
        )


def calibrate(engine: Engine, progress: Progress, time_limit_s: float = TIME_LIMIT_S) -> Calibration:
    """engine: loaded with engine_options(), used for nothing else before or after. Its arena is left small.

    time_limit_s: fewer tokens, then fewer group sizes are measured, so as to keep it; one of each in any case.
    HeadraceError for a model whose experts the smallest arena keeps, so that nothing would be read.
    """
    if sum(shape_of(engine.checkpoint).num_experts) < 2:
        raise HeadraceError("tune: expected at least two experts to read, found one; this model cannot be tuned")
    return _Calibrator(engine, progress, time_limit_s).run()


def fit_passes(passes: Sequence[Pass], shape: ModelShape, top_k: int) -> ServiceTimes:
    def column(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(p.computes[name], float) for p in passes])

    samples = ComputeSamples(
        column("layer"),
        column("num_experts"),
        column("num_routes"),
        column("end_s") - column("start_s"),
        np.concatenate([p.idle_s for p in passes]),
    )
    if not len(samples.seconds):
        raise HeadraceError("tune: the calibration computed no experts; this model cannot be tuned")
    compute, factors = fit_compute(samples, shape.record_bytes)
    # Short prompts are bound by reading, so their reads tell what the device gives.
    least = min(p.rows for p in passes)
    reads = [_read_samples(p, shape) for p in passes if p.rows == least and p.first == 0 and len(p.reads["layer"])]
    if not any(len(nbytes) for nbytes, _ in reads):
        raise HeadraceError("tune: the calibration read no experts, they were resident; this model cannot be tuned")
    return ServiceTimes(
        fit_read(np.concatenate([nbytes for nbytes, _ in reads]), np.concatenate([seconds for _, seconds in reads])),
        compute,
        fit_non_expert(
            np.array([p.rows for p in passes]),
            np.array([p.first for p in passes]),
            np.stack([p.non_expert_s for p in passes]),
            np.array([p.after_s for p in passes]),
        ),
        factors,
        _shares(min(passes, key=lambda p: (p.group_size, -p.rows)), shape, top_k),
    )


def _read_samples(p: Pass, shape: ModelShape) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of slots, and seconds, of the reads that were not broken off.

    Reads share the device: one that had fewer than Q - 1 beside it counts as if it had taken as much longer.
    """
    begin, end, layer = p.reads["start_s"], p.reads["end_s"], p.reads["layer"]
    times = np.sort(np.concatenate([begin, end]))
    begun, ended = (np.searchsorted(np.sort(x), times, side="right") for x in (begin, end))
    area = np.concatenate([[0], np.cumsum((begun - ended)[:-1] * np.diff(times))])
    seconds = np.maximum(end - begin, 1e-9)
    in_flight = (np.interp(end, times, area) - np.interp(begin, times, area)) / seconds
    whole = p.reads["bytes"] >= p.reads["num_experts"] * p.read_bytes[layer]
    nbytes = p.reads["num_experts"] * np.array(shape.record_bytes, float)[layer]
    return nbytes[whole], (seconds * p.queue_depth / np.maximum(in_flight, 1))[whole]


def _shares(p: Pass, shape: ModelShape, top_k: int) -> np.ndarray:
    """How often each expert was used by a token, [layers, experts]; within a group evenly. The last layer saw few rows:
    all its experts alike."""
    shares = np.zeros((len(shape.num_experts), max(shape.num_experts)))
    for layer, first, routes in zip(
        p.computes["layer"], p.computes["first_expert"], p.computes["num_routes"], strict=True
    ):
        begin = int(first) // p.group_size * p.group_size
        end = min(begin + p.group_size, shape.num_experts[layer])
        shares[layer, begin:end] = routes / p.rows / (end - begin)
    shares[-1] = top_k / shape.num_experts[-1]
    return np.minimum(1, shares)

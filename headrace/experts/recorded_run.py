"""A live run, recorded with all that decided what it loaded and evicted, and replayed (DESIGN.md, invariant 5).

What is recorded is the run itself: routing is only watched. Everything that the engine's Residency was told goes into
the trace beside the routes: the policy, the experts' sizes, the passes and the arena before each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from headrace import _core
from headrace.engine import Engine, Routing
from headrace.errors import HeadraceError
from headrace.experts.trace_file import COUNTERS, MAX_BLOCK_PASSES, Pass, RecordedTrace, RunSettings, TraceWriter
from headrace.experts.traces import Block, ModelIdentity, Trace

# Of any number of rows, each ended by end_pass().
_ANY_WINDOW = 2**32 - 1


class Recorder:
    """Records the passes of one session, from the engine's first. A context manager, as TraceWriter is."""

    def __init__(self, path: Path, engine: Engine, model: ModelIdentity):
        """The engine was loaded with EngineOptions.record_routing and has run nothing yet."""
        if any(engine.counters()[name] for name in COUNTERS):
            raise HeadraceError("a recording begins with an engine that has run nothing; load the model again")
        policy = engine.options.policy
        if policy not in replayable_policies():
            raise HeadraceError(f"cache policy {policy!r}: a run that is told the future cannot be recorded")
        self._engine, self._length, self._num_passes = engine, 0, engine.num_passes
        self.counters = dict.fromkeys(COUNTERS, 0)  # at the end of the last pass
        config, layers = engine.config, range(len(engine.checkpoint.experts))
        settings = RunSettings(
            policy,
            engine.hot_routes,
            tuple(engine.record_bytes(layer) for layer in layers),
            np.array([engine.experts.read_bytes(layer) for layer in layers], np.uint64),
        )
        self.writer = TraceWriter(path, model, len(layers), config.num_experts, config.num_experts_per_tok, settings)
        engine.experts.record_events()

    def observe(self, routing: Routing) -> None:
        """For Engine.session(observe=...). A rollback to the beginning starts another sequence."""
        self._num_passes += 1
        if self._engine.num_passes != self._num_passes:
            raise HeadraceError(
                "recording: a pass was not recorded, since it failed or was another session's, but it changed what is "
                "in memory; load the model again and record anew"
            )
        if routing.first == 0:
            self.writer.end_sequence()
        elif routing.first != self._length:
            raise HeadraceError(f"recording: position {routing.first} follows {self._length}; record one session")
        self._length = routing.first + len(routing.tokens)
        events, counters = self._engine.experts.take_events()
        self.counters = {name: counters[name] for name in COUNTERS}
        self.writer.add(
            routing.tokens,
            routing.ids,
            routing.weights,
            routing.scores,
            Pass(
                len(routing.tokens),
                np.array(routing.out_rows, np.int64),
                self._engine.experts.arena_bytes,
                self.counters,
                events,
            ),
        )

    def __enter__(self) -> Recorder:
        self.writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.writer.__exit__(kind, error, tb)


@dataclass(frozen=True)
class ReplayedRun:
    """counters: the run's, which its replay has too. arena_bytes: of each pass that differs from the one before."""

    settings: RunSettings
    num_tokens: int
    num_passes: int
    arena_bytes: list[int]
    counters: dict[str, int]


def replayable_policies() -> list[str]:
    return [name for name in _core.policy_names() if name != "belady"]


def replay_run(trace: Trace) -> ReplayedRun:
    """Does again, with the engine's own residency and policy and no loads, what the run did. HeadraceError if its
    counters differ from the run's after any pass, or if the trace holds no run."""
    if not isinstance(trace, RecordedTrace) or trace.run is None:
        raise HeadraceError(f"{trace.path}: holds no run, only routes; record one with `headrace run MODEL --record T`")
    run = trace.run
    if run.policy not in replayable_policies():
        raise HeadraceError(
            f"{trace.path}: header: a run with cache policy {run.policy!r}, expected one of "
            f"{', '.join(replayable_policies())}; replay it with the headrace that recorded it"
        )
    replay = _Replay(trace, run)
    for item in trace.items(values=False):
        if isinstance(item, Pass):
            replay.expect(item)
        else:
            replay.feed(item)
    return replay.result()


class _Replay:
    def __init__(self, trace: RecordedTrace, run: RunSettings):
        self._trace, self._run = trace, run
        self._waiting: deque[Pass] = deque()  # passes with tokens to come
        self._done_rows = 0  # of the first of them
        self._simulator = _core.Simulator(
            [trace.num_experts] * trace.num_layers,
            list(run.record_bytes),
            max(run.record_bytes),  # until the first pass says
            run.policy,
            hot_routes=run.hot_routes,
            window=_ANY_WINDOW,
            read_bytes=run.read_bytes.ravel().tolist(),
        )
        self._num_tokens = self._num_passes = 0
        self._arena_bytes: list[int] = []
        self._last: Pass | None = None

    def expect(self, following: Pass) -> None:
        if len(self._waiting) >= MAX_BLOCK_PASSES:
            raise self._wrong("passes whose tokens do not come")
        self._waiting.append(following)

    def feed(self, block: Block) -> None:
        at = 0
        while at < len(block.ids):
            if not self._waiting:
                raise self._wrong(f"position {block.first + at} of sequence {block.sequence} belongs to no pass")
            this = self._waiting[0]
            if self._done_rows == 0:
                self._note_arena(this)
            n = min(len(block.ids) - at, this.num_rows - self._done_rows)
            ids = np.ascontiguousarray(block.ids[at : at + n], np.int32)
            rows = np.arange(self._done_rows, self._done_rows + n)
            ids[~np.isin(rows, this.out_rows), -1] = -1
            self._simulator.feed(ids)
            at += n
            self._done_rows += n
            if self._done_rows == this.num_rows:
                self._end(self._waiting.popleft())

    def _note_arena(self, this: Pass) -> None:
        if self._arena_bytes[-1:] != [this.arena_bytes]:
            self._arena_bytes.append(this.arena_bytes)

    def _end(self, this: Pass) -> None:
        try:
            self._simulator.end_pass(this.events)
        except HeadraceError as e:
            raise self._wrong(str(e)) from None
        counters = self._simulator.counters()
        for name in COUNTERS:
            if counters[name] != this.counters[name]:
                counted, found = this.counters[name], counters[name]
                raise self._wrong(f"the run had counted {counted} {name} by its end, its replay counts {found}")
        self._num_passes += 1
        self._num_tokens += this.num_rows
        self._done_rows = 0
        self._last = this

    def result(self) -> ReplayedRun:
        if self._waiting and self._trace.num_tokens is not None:
            raise self._wrong("its last passes lack tokens")
        if self._last is None:
            raise self._wrong("holds no whole pass")
        return ReplayedRun(self._run, self._num_tokens, self._num_passes, self._arena_bytes, self._last.counters)

    def _wrong(self, what: str) -> HeadraceError:
        return HeadraceError(f"{self._trace.path}: pass {self._num_passes}: {what}; record it again")

"""Engine and Session: load -> prefill -> decode. Read this file first.

An Engine holds what conversations share: weights, the expert arena, the executor. A Session holds what one
conversation owns: keys and values, and its figures. docs/architecture.md follows one request through the files.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from headrace import _core, machine
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline, default_pipeline, fit_pipeline
from headrace.experts.plan import (
    EFFICIENT_ROWS,
    FEWEST_ROWS,
    MIB,
    PAGE,
    MemoryPlan,
    Needs,
    Readings,
    page_table_bytes,
    plan_memory,
)
from headrace.experts.source import expert_source
from headrace.experts.traces import Replay
from headrace.formats.checkpoint import Checkpoint, DType
from headrace.graph import Graph
from headrace.models.blocks import INV_FREQ, ROUTE_CAPACITY, inverse_frequencies
from headrace.models.families import build_graph
from headrace.program import Program, compile_graph, plan_buffers
from headrace.tune.configure import configured
from headrace.tune.profile import Profile, find_profile, shape_of

LOADER_THREADS = 4  # fewer leave the disk idle while one of them computes a checksum
# The arena is lowered when less than this is left under the budget.
DRIFT_MARGIN_BYTES = 2 * MIB
# A pass's row: its token in a list, its token and sequence in arrays.
TOKEN_BYTES = 16
# Sampling works on float64 copies of the logits and on index arrays: at most this many bytes a vocabulary entry.
LOGITS_BYTES_PER_ENTRY = 4 + 28


@dataclass
class Figures:
    """What one phase (prefill or decode) did. Expert counters as in DESIGN.md, "Words"."""

    tokens: int = 0
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: int, seconds: float, before: dict[str, int], after: dict[str, int]):
        self.tokens += tokens
        self.seconds += seconds
        for key, value in after.items():
            self.counters[key] = self.counters.get(key, 0) + value - before[key]

    @property
    def tps(self) -> float | None:
        """None if nothing ran."""
        return self.tokens / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, float]:
        c = self.counters
        return {
            "expert_hits": c.get("hits", 0),
            "expert_late_hits": c.get("late_hits", 0),
            "expert_loads": c.get("loads", 0),
            "expert_prefetches": c.get("prefetches", 0),
            "expert_bytes_read": c.get("bytes_read", 0),
            "expert_bytes_unused": c.get("bytes_unused", 0),
            "io_wait_s": c.get("io_wait_ns", 0) / 1e9,
            "io_busy_s": c.get("io_busy_ns", 0) / 1e9,
        }

    @property
    def bubble_rate(self) -> float:
        """Share of the time in which neither reading nor computing, whichever took longer, went on: 1 - max(T_io,
        T_exec) / T_total (EStream, Figure 6)."""
        io_wait_s, io_busy_s = self.counters.get("io_wait_ns", 0) / 1e9, self.counters.get("io_busy_ns", 0) / 1e9
        return 1 - max(io_busy_s, self.seconds - io_wait_s) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class EngineOptions:
    """memory_bytes: the budget of the whole process (None: DESIGN.md's default). context: positions a session
    can hold. prompt_rows: the longest prompt expected. sessions: how many will be open at a time.
    scoring_positions: keys and values of texts that a Scorer (score.py) runs, of all at a time."""

    context: int
    memory_bytes: int | None = None
    num_threads: int | None = None
    prompt_rows: int = 512
    sessions: int = 1
    scoring_positions: int = 0
    kv_dtype: DType = DType.F16
    max_out_rows: int = 1
    max_rows: int | None = None  # overrides the plan's choice; for comparisons
    loader_threads: int = LOADER_THREADS
    direct_io: bool = True
    record_routing: bool = False  # so that sessions may have an observer
    policy: str = "lru"  # which experts make room: one of _core.policy_names(), docs/policies.md
    pipeline: Pipeline | None = None  # how prompts read experts (None: as tuned, or a default), as far as there is room
    schedule: str = "early"  # of prompts' reads, one of SCHEDULES, where no pipeline is given
    oracle_recall: float | None = None  # prefetch what foresee() told, naming this share of what is absent
    oracle_seed: int = 0
    warn: Callable[[str], None] = lambda text: None  # told of a profile that cannot be used


@dataclass(frozen=True)
class Routing:
    """What one pass's routers chose, every row in every layer that routes. Valid until the next pass.

    tokens: the rows' ids; first: the position of row 0. out_rows: those whose logits were wanted, which alone went
    through the last layer's experts. ids: int32 [layers, rows, top_k], ascending. weights: float32 of the same shape,
    what each expert counted. scores: float32, the router's logits of these experts.
    """

    tokens: list[int]
    first: int
    out_rows: list[int]
    ids: np.ndarray
    weights: np.ndarray
    scores: np.ndarray


def _graph_for(checkpoint: Checkpoint, rows: int, options: EngineOptions) -> Graph:
    routes = max(1, rows) * checkpoint.config.num_experts_per_tok
    return build_graph(checkpoint, route_capacity=min(ROUTE_CAPACITY, routes), route_all_rows=options.record_routing)


def _profile(checkpoint: Checkpoint, options: EngineOptions) -> Profile | None:
    """What `headrace tune` measured for this model here, where nothing else was asked for."""
    return find_profile(checkpoint, options.num_threads, options.warn) if options.pipeline is None else None


def _loader_threads(options: EngineOptions, profile: Profile | None) -> int:
    """A group is read by one thread."""
    asked = options.pipeline or profile
    return max(options.loader_threads, asked.queue_depth if asked else 0)


def _routing_shape(checkpoint: Checkpoint, rows: int) -> tuple[int, int, int]:
    return len(checkpoint.experts), rows, checkpoint.config.num_experts_per_tok


def _step_rows(options: EngineOptions) -> int:
    """Rows of the largest pass that is no prompt's."""
    return max(FEWEST_ROWS, options.max_out_rows)


def make_plan(checkpoint: Checkpoint, options: EngineOptions) -> MemoryPlan:
    """Reads the machine and plans; loads nothing. Raises HeadraceError if it cannot work."""
    return _plan(checkpoint, options, expert_source(checkpoint), _profile(checkpoint, options))


def _plan(
    checkpoint: Checkpoint, options: EngineOptions, source: _core.ExpertSource, profile: Profile | None
) -> MemoryPlan:
    config = checkpoint.config
    if not 1 <= options.context <= config.max_position_embeddings:
        raise HeadraceError(
            f"context {options.context} does not fit {checkpoint.name}: it was made for "
            f"1 to {config.max_position_embeddings} positions; give a smaller context or a shorter prompt"
        )
    graph = _graph_for(checkpoint, 1, options)
    program = _core.Program(compile_graph(graph, 1).data)
    num_threads = options.num_threads or machine.num_cpus()
    positions = options.scoring_positions
    record_bytes = _largest_record_bytes(checkpoint, source)
    pipeline = options.pipeline or default_pipeline(record_bytes)

    def scratch_bytes(rows: int) -> int:
        out_rows = min(rows, options.max_out_rows)
        nbytes = plan_buffers(_graph_for(checkpoint, rows, options), rows, out_rows)[1]
        return -(-nbytes // PAGE) * PAGE

    def buffer_bytes(rows: int) -> int:
        # A pass's replayed ids; ids, weights and scores, and as much again for what an observer makes of them.
        arrays = 1 + (2 * 3 if options.record_routing else 0)
        return (
            _core.Executor.buffer_bytes(program, rows)
            + 4 * arrays * math.prod(_routing_shape(checkpoint, rows))
            + TOKEN_BYTES * rows
        )

    needs = Needs(
        trunk_bytes=_core.Weights.resident_bytes(program),
        state_bytes=options.sessions * _core.SessionState.bytes(program, options.context, int(options.kv_dtype))
        + (_core.SessionState.bytes(program, positions, int(options.kv_dtype)) if positions else 0),
        overhead_bytes=_core.ExpertMemory.overhead_bytes(source, _loader_threads(options, profile), options.policy)
        + _core.Executor.overhead_bytes(program, num_threads),
        logits_bytes=(4 * options.max_out_rows * options.sessions + LOGITS_BYTES_PER_ENTRY) * config.vocab_size,
        num_threads=num_threads + _loader_threads(options, profile),
        largest_record_bytes=record_bytes,
        expert_bytes=source.total_bytes(),
        scratch_bytes=scratch_bytes,
        buffer_bytes=buffer_bytes,
        stream_bytes=pipeline.stream_experts * record_bytes,
        step_rows=_step_rows(options),
    )
    _release_free_memory()
    readings = Readings(
        rss_bytes=machine.rss_bytes(),
        peak_rss_bytes=machine.peak_rss_bytes(),
        available_bytes=machine.available_memory_bytes(),
        total_bytes=machine.total_memory_bytes(),
        cgroup_headroom_bytes=machine.cgroup_headroom_bytes(),
        cgroup_limit_bytes=machine.cgroup_limit_bytes(),
    )
    return plan_memory(
        needs,
        readings,
        budget_bytes=options.memory_bytes,
        context=options.context,
        prompt_rows=options.max_rows
        or (options.prompt_rows if positions else min(options.prompt_rows, options.context)),
    )


def _release_free_memory() -> None:
    """So that what was needed for a moment (parsing a vocabulary) does not count as held."""
    gc.collect()
    _core.release_free_memory()


def _largest_record_bytes(checkpoint: Checkpoint, source: _core.ExpertSource) -> int:
    return max(source.record_bytes(i) for i in range(len(checkpoint.experts)))


class Engine:
    """A loaded model. Use as a context manager, or close(). Sessions may run in threads of their own: one pass
    runs at a time, the others wait."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions):
        self.checkpoint, self.options = checkpoint, options
        self._lock = threading.Lock()  # held by a pass, and by whatever must not happen during one
        self._pid: int | None = os.getpid()  # None: closed
        self.config = checkpoint.config
        self._source = source = expert_source(checkpoint)
        self._profile = profile = _profile(checkpoint, options)
        self._pipelines: dict[tuple[int, int], Pipeline | None] = {}  # by rows and arena, as the profile says
        self.plan = _plan(checkpoint, options, source, profile)
        self.num_threads = options.num_threads or machine.num_cpus()
        self.max_rows = self.plan.max_rows

        # Programs for steps, for short prompts, for the largest pass: each with its own scratch.
        self._rows = sorted({min(r, self.max_rows) for r in (_step_rows(options), EFFICIENT_ROWS, self.max_rows)})
        graphs = [_graph_for(checkpoint, rows, options) for rows in self._rows]
        programs = [
            compile_graph(graph, rows, min(rows, options.max_out_rows))
            for graph, rows in zip(graphs, self._rows, strict=True)
        ]
        self.program: Program = programs[-1]
        self._scratch_bytes = [-(-program.scratch_bytes // PAGE) * PAGE for program in programs]
        self._program = _core.Program(self.program.data)
        self._weights = load_weights(checkpoint, graphs[-1], self._program)
        self._free_states = [
            _core.SessionState(self._program, options.context, int(options.kv_dtype)) for _ in range(options.sessions)
        ]
        self._room: _core.SessionState | None = None  # of a Scorer
        if options.scoring_positions:
            self._room = _core.SessionState(self._program, options.scoring_positions, int(options.kv_dtype))
        self.hot_routes = options.prompt_rows * self.config.num_experts_per_tok  # what prefill-hot counts of a layer
        self._smallest_arena = _largest_record_bytes(checkpoint, source)
        self.experts = _core.ExpertMemory(
            source,
            self._smallest_arena,
            _loader_threads(options, profile),
            options.direct_io,
            options.policy,
            hot_routes=self.hot_routes,
            oracle_recall=options.oracle_recall,
            oracle_seed=options.oracle_seed,
        )
        self._future: Iterator[list[np.ndarray]] = iter(())
        self._executor = _core.Executor(
            self._program,
            self._weights,
            self.experts,
            self.num_threads,
            [_core.Program(program.data) for program in programs[:-1]],
        )
        self.num_passes = 0  # that were begun, by whatever session
        self._open_prompts: list[int] = []  # rows of their passes
        self._most_arena_bytes = source.total_bytes()
        self._routing_buffers: list[np.ndarray] = []  # of ids, weights, scores, each flat, for the largest pass
        if options.record_routing:
            size = math.prod(_routing_shape(checkpoint, self.max_rows))
            self._routing_buffers = [np.full(size, 0, dtype) for dtype in (np.int32, np.float32, np.float32)]
        self._take_arena()

    def _take_arena(self) -> None:
        """Everything else is in memory now: what is left of the budget, less the reserve, is for scratch and arena."""
        p = self.plan
        _release_free_memory()
        held = machine.rss_bytes() - self.experts.committed_bytes
        # What the plan foresaw has been taken by now, or (stacks, logits) still may be.
        rest = p.budget_bytes - max(
            p.other_bytes, held + p.logits_bytes + p.reserve_bytes + page_table_bytes(p.budget_bytes)
        )
        self._shared_bytes = rest + self._executor.scratch_bytes
        self._resize_arena(self._executor.scratch_bytes)

    def _resize_arena(self, scratch_bytes: int) -> None:
        rest = min(self._shared_bytes - scratch_bytes, self._most_arena_bytes)
        self.experts.resize(max(self._smallest_arena, rest))

    def prompt_arena_bytes(self, rows: int) -> int:
        """What the arena has while a prompt's passes of up to so many rows run."""
        scratch_bytes = self._scratch_bytes[bisect_left(self._rows, rows)]
        return max(self._smallest_arena, min(self._shared_bytes - scratch_bytes, self._most_arena_bytes))

    def limit_arena(self, most_bytes: int) -> None:
        """From now on the arena has no more than so many bytes, whatever the budget allows. For comparisons; between
        passes."""
        self._most_arena_bytes = min(most_bytes, self._source.total_bytes())
        self._resize_arena(self._executor.scratch_bytes)

    @contextmanager
    def prompt(self, rows: int) -> Iterator[None]:
        """While it is open, scratch for passes of up to so many rows is kept once it is there, also by other sessions'
        steps. Afterwards the next step gives it to the arena."""
        self._open_prompts.append(rows)
        try:
            yield
        finally:
            self._open_prompts.remove(rows)

    def _fit_scratch(self, rows: int, is_step: bool) -> None:
        """Scratch for a pass of so many rows. What a step does not need of it is the arena's; but a prompt that needs
        less than the one before it moves nothing."""
        is_step = is_step and not self._open_prompts
        rows = max([rows, *self._open_prompts])
        need = self._scratch_bytes[bisect_left(self._rows, rows)]
        have = self._executor.scratch_bytes
        if need > have or (is_step and need < have):
            if need > have:
                self._resize_arena(need)  # gives back first what scratch will take
            self._executor.resize_scratch(rows)
            self._resize_arena(need)

    @property
    def pipeline_source(self) -> str:
        """Where pipeline() has it from."""
        asked = self.options.pipeline is not None
        return "as asked for" if asked else "by the profile" if self._profile is not None else "the default"

    def pipeline(self, num_rows: int) -> Pipeline:
        """How a prompt's pass of so many rows is read: as was asked for, else as the profile of this device says, else
        a default; as far as the arena has room for it."""
        wanted = self.options.pipeline
        if wanted is None:
            tuned_or_default = self._tuned(num_rows) or default_pipeline(self._smallest_arena)
            wanted = replace(tuned_or_default, schedule=self.options.schedule)
        return fit_pipeline(wanted, self.experts.arena_bytes, self._smallest_arena)

    def _tuned(self, num_rows: int) -> Pipeline | None:
        """As the profile says; None without one that makes sense."""
        arena_bytes = self.experts.arena_bytes
        key = num_rows, arena_bytes
        if self._profile is not None and key not in self._pipelines:
            shape = shape_of(self.checkpoint)
            try:
                self._pipelines[key] = configured(self._profile, shape, num_rows, self.max_rows, arena_bytes)
            except HeadraceError as error:  # times that nothing was ever measured to take
                self.options.warn(f"the profile makes no sense: {error}; running without it; run `headrace tune` again")
                self._profile = None
        return self._pipelines.get(key)

    # ---- what a pass costs

    def counters(self) -> dict[str, int]:
        return self.experts.counters()

    def record_bytes(self, layer: int) -> int:
        """Bytes of a slot that holds an expert of this layer."""
        return self._source.record_bytes(layer)

    def foresee(self, passes: Iterator[list[np.ndarray]], lookahead: int) -> None:
        """Tells a policy with an oracle what every pass from now on will route to, `lookahead` passes ahead of each.

        passes: of each, of each layer, the distinct experts, ascending; empty where the pass skips the layer. Other
        routes are refused, so a pass that fails leaves the oracle behind. What it keeps comes out of the arena.
        """
        with self._lock:
            self.check_open()
            self._future = passes
            for _ in range(lookahead):
                if not self._expect_pass():
                    break

    def _expect_pass(self) -> bool:
        """Tells the policy of one more pass, if one was foreseen, and gives slots back if the process has grown."""
        ids_of_layers = next(self._future, None)
        for layer, ids in enumerate(ids_of_layers or ()):
            self.experts.expect(layer, ids.tolist())
        self.guard_budget()
        return ids_of_layers is not None

    def _before_pass(self, rows: int, is_step: bool) -> None:
        self._fit_scratch(rows, is_step)
        self._expect_pass()

    def guard_budget(self) -> None:
        """Gives slots back if the process has grown towards the budget since the arena was sized."""
        over = machine.rss_bytes() + DRIFT_MARGIN_BYTES - self.plan.budget_bytes
        if over > 0:
            lower = max(self._smallest_arena, self.experts.arena_bytes - over - DRIFT_MARGIN_BYTES)
            self._shared_bytes = lower + self._executor.scratch_bytes
            self.experts.resize(lower)

    def run_pass(
        self,
        tokens: np.ndarray,
        sequences: np.ndarray,
        states: list[_core.SessionState],
        out_rows: np.ndarray,
        figures: Figures,
        *,
        logits: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        log_probs: np.ndarray | None = None,
        routes: np.ndarray | None = None,
        routing: tuple[np.ndarray, ...] | None = None,
        per_slot: bool = False,
        stream: bool | None = None,
    ) -> None:
        """One pass, counted in `figures`; the caller holds the lock, having checked that the engine is open. Arrays as
        _core.Executor.run takes them.

        Fills logits [len(out_rows), vocab_size], or log_probs [len(out_rows)] with those of targets, and `routing`
        (ids, weights, scores), if given. stream: the pass is a prompt's, and whether its first; None: it is none."""
        self.num_passes += 1
        self._before_pass(len(tokens), stream is None)
        ids, weights, scores = routing or (None, None, None)
        before, start = self.counters(), time.perf_counter()
        self._executor.run(
            tokens,
            sequences,
            states,
            out_rows,
            logits,
            routes=routes,
            ids=ids,
            weights=weights,
            scores=scores,
            per_slot=per_slot,
            stream=None if stream is None else self.pipeline(len(tokens)).settings(stream),
            targets=targets,
            log_probs=log_probs,
        )
        figures.add(len(tokens), time.perf_counter() - start, before, self.counters())
        if log_probs is not None and not np.isfinite(log_probs).all():
            raise HeadraceError(
                f"{self.checkpoint.path}: a logit is NaN or infinite, so a token has no probability; "
                "the weights may be damaged, or too large for float16 keys and values"
            )

    # ---- sessions

    def session(self, *, replay: Replay | None = None, observe: Callable[[Routing], None] | None = None) -> Session:
        """A new conversation. replay: routes that replace what the routers choose, by position. observe: called
        after each pass, within it: what it raises undoes the pass; EngineOptions.record_routing must be set."""
        if observe is not None and not self.options.record_routing:
            raise HeadraceError("an observer of routing: load the engine with EngineOptions.record_routing")
        with self._lock:
            self.check_open()
            if not self._free_states:
                raise HeadraceError(
                    f"all {self.options.sessions} sessions of this engine are open; "
                    "close one, or load the engine with more sessions"
                )
            state = self._free_states.pop()
        state.rollback(0)
        return Session(self, state, replay, observe)

    def check_open(self) -> None:
        """Raises HeadraceError for an engine that was closed, or whose threads stayed in the parent process."""
        if self._pid is None:
            raise HeadraceError("this engine is closed; load the model again")
        if self._pid != os.getpid():
            raise HeadraceError("this engine was loaded before the process forked; load the model in the child")

    def close(self) -> None:
        """Waits for a running pass, stops the threads and frees the memory. Sessions end with it."""
        with self._lock:
            self._pid = None
            # In this order: the executor uses the rest.
            for name in ("_executor", "experts", "_weights", "_routing_buffers"):
                self.__dict__.pop(name, None)
            self._free_states = []
            self._room = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- figures

    def report(self) -> dict[str, Any]:
        """What `run` and `bench` report about the engine."""
        return {
            "model": self.checkpoint.name,
            "budget_bytes": self.plan.budget_bytes,
            "peak_rss_bytes": machine.peak_rss_bytes(),
            "policy": self.options.policy,
            "pipeline": asdict(self.pipeline(min(self.max_rows, self.options.prompt_rows))),
            "slots": self.experts.num_slots,
            "residency": min(1.0, self.experts.arena_bytes / self._source.total_bytes()),
            "isa": _core.isa(),
            "num_threads": self.num_threads,
            "max_rows": self.max_rows,
            "context": self.options.context,
        }


class Session:
    """One conversation: its keys and values. Passes append to it; rollback() shortens it.

    For one thread at a time; different sessions of an engine may be used by different threads.
    """

    def __init__(
        self,
        engine: Engine,
        state: _core.SessionState,
        replay: Replay | None,
        observe: Callable[[Routing], None] | None,
    ):
        self.engine, self._state, self._closed = engine, state, False
        self._replay, self._observe = replay, observe
        self.per_slot = False  # of the passes to come: a weight read per route, instead of one per distinct expert
        self._logits = np.empty((1, engine.config.vocab_size), np.float32)
        self.prefill_figures, self.decode_figures = Figures(), Figures()

    @property
    def length(self) -> int:
        """Positions that hold a token."""
        self._check_open()
        return self._state.length

    def rollback(self, length: int) -> None:
        self._check_open()
        with self.engine._lock:
            self._state.rollback(length)

    def prefill(self, tokens: list[int], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Runs a prompt in passes of at most max_rows rows, all of them or, on an exception, none. Returns the
        last token's logits [vocab_size], valid until the session's next pass.

        progress: called with (tokens done, tokens in all) before each pass and at the end."""
        progress = progress or (lambda done, total: None)
        self._check(tokens)
        rows = self.engine.max_rows
        chunks = [tokens[i : i + rows] for i in range(0, len(tokens), rows)]
        with self._all_or_nothing(), self.engine.prompt(len(chunks[0])):
            for i, chunk in enumerate(chunks[:-1]):
                progress(i * rows, len(tokens))
                self._pass(chunk, [], self._logits[:0], self.prefill_figures, stream=(i == 0))
            progress((len(chunks) - 1) * rows, len(tokens))
            last = [len(chunks[-1]) - 1]
            self._pass(chunks[-1], last, self._logits[:1], self.prefill_figures, stream=(len(chunks) == 1))
            progress(len(tokens), len(tokens))
            return self._logits[0]

    def step(self, token: int) -> np.ndarray:
        """One decode step. Returns logits [vocab_size], valid until the session's next pass."""
        self._check([token])
        with self._all_or_nothing():
            self._pass([token], [0], self._logits[:1], self.decode_figures)
            return self._logits[0]

    def verify(self, tokens: list[int]) -> np.ndarray:
        """Logits of every row, [len(tokens), vocab_size]: one pass for each max_out_rows tokens, all or none."""
        self._check(tokens)
        rows = self.engine.program.max_out_rows
        logits = np.empty((len(tokens), self.engine.config.vocab_size), np.float32)
        with self._all_or_nothing():
            for i in range(0, len(tokens), rows):
                chunk = tokens[i : i + rows]
                self._pass(chunk, list(range(len(chunk))), logits[i : i + rows], self.decode_figures)
        return logits

    def score(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities of tokens[1:], each after all before it: float32 [len(tokens) - 1], in passes of at most
        max_rows rows, all or none. The session grows by all but the last token, with which another call goes on.
        For many texts, or texts with choices: score.py."""
        if len(tokens) < 2:
            raise HeadraceError(f"a text of {len(tokens)} tokens: give at least two, the first has no probability")
        self._check(tokens[:-1])
        log_probs = np.empty(len(tokens) - 1, np.float32)
        rows = min(self.engine.max_rows, len(log_probs))
        with self._all_or_nothing(), self.engine.prompt(rows):
            for i in range(0, len(log_probs), rows):
                part = log_probs[i : i + rows]
                self._pass(
                    tokens[i : i + len(part)],
                    list(range(len(part))),
                    None,
                    self.prefill_figures,
                    np.array(tokens[i + 1 : i + 1 + len(part)], np.int32),
                    part,
                    stream=(i == 0),
                )
        return log_probs

    def close(self) -> None:
        with self.engine._lock:
            if not self._closed:
                self._closed = True
                if self.engine._pid is not None:
                    self.engine._free_states.append(self._state)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        length = self._state.length
        try:
            yield
        except BaseException:
            self._state.rollback(length)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise HeadraceError("this session is closed; open another with Engine.session()")

    def _check(self, tokens: list[int]) -> None:
        self._check_open()
        vocab, room = self.engine.config.vocab_size, self._state.capacity - self._state.length
        if not tokens:
            raise HeadraceError("an empty prompt: give at least one token")
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise HeadraceError(f"token id {bad} is outside the vocabulary of {vocab}")
        if len(tokens) > room:
            raise HeadraceError(
                f"{len(tokens)} tokens do not fit the context: {self._state.length} of "
                f"{self._state.capacity} positions are taken; give a larger -c"
            )

    def _pass(
        self,
        tokens: list[int],
        out_rows: list[int],
        logits: np.ndarray | None,
        figures: Figures,
        targets: np.ndarray | None = None,
        log_probs: np.ndarray | None = None,
        stream: bool | None = None,
    ) -> None:
        """One pass; fills logits [len(out_rows), vocab_size], or log_probs [len(out_rows)] with those of targets.
        stream: it is a prompt's, and whether its first."""
        engine = self.engine
        first = self._state.length
        routes = self._replay.rows(first, len(tokens)) if self._replay is not None else None
        with engine._lock:
            engine.check_open()
            shape = _routing_shape(engine.checkpoint, len(tokens))
            kept = [b[: math.prod(shape)].reshape(shape) for b in engine._routing_buffers if self._observe]
            engine.run_pass(
                np.asarray(tokens, np.int32),
                np.zeros(len(tokens), np.uint32),
                [self._state],
                np.asarray(out_rows, np.uint32),
                figures,
                logits=logits,
                targets=targets,
                log_probs=log_probs,
                routes=routes,
                routing=tuple(kept) or None,
                per_slot=self.per_slot,
                stream=stream,
            )
            if self._observe is not None:
                self._observe(Routing(tokens, first, out_rows, *kept))


def load_weights(checkpoint: Checkpoint, graph: Graph, program: _core.Program) -> _core.Weights:
    """Loads the trunk: every weight that the graph names."""
    weights = _core.Weights(program)
    files = [str(f) for f in checkpoint.files]
    for w in graph.weights:
        if w.role == "table":
            e = checkpoint.embedding
            weights.set_table(w.index, files[e.file], e.offset, e.stride_bytes, e.has_crc)
        elif w.name == INV_FREQ:
            weights.set_vector(w.index, inverse_frequencies(checkpoint.config))
        else:
            t = checkpoint.tensors[w.name]
            weights.load(
                w.index,
                w.name,
                files[t.file],
                t.offset,
                t.nbytes,
                int(t.dtype),
                packed=t.layout == "tile16",
                crc=t.crc32c,
            )
    weights.check_complete()
    return weights

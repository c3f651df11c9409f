"""The trace simulator: what an engine with these slots and this policy would hit, load and evict (docs/policies.md).

The decisions are the engine's own native code (csrc/experts/residency.h); here are only the choice of runs and the
feeding of the trace, block by block, to all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from headrace import _core
from headrace.errors import HeadraceError
from headrace.experts.traces import Trace

POLICIES = ("lru", "lfu", "lfru", "prefill-hot", "markov", "belady-8", "belady")
# Passes that `belady` knows of: all of them in most traces, and some 40 MB a run at 16 layers of 8 experts a token.
BELADY_LOOKAHEAD = 16384
_BELADY = re.compile(r"belady(?:-([1-9][0-9]{0,5}))?")


@dataclass(frozen=True)
class Policy:
    """name: as the user gave it. native: the core's name for it. lookahead: passes beyond the present that it knows."""

    name: str
    native: str
    lookahead: int = 0


def parse_policy(name: str, oracles: bool = True) -> Policy:
    """One of POLICIES, or belady-c for another c. oracles: whether the future can be known. HeadraceError for anything
    else."""
    match = _BELADY.fullmatch(name)
    if match and oracles:
        return Policy(name, "belady", int(match[1]) if match[1] else BELADY_LOOKAHEAD)
    if name in _core.policy_names() and not match:
        return Policy(name, name)
    names = [known for known in POLICIES if oracles or not _BELADY.fullmatch(known)]
    hint = ", or belady-c for c of 1 to 999999 passes" if oracles else ""
    if match:
        hint = "; an oracle needs a recorded future: `headrace bench MODEL --replay TRACE --policy belady`"
    raise HeadraceError(f"cache policy {name!r}: expected one of {', '.join(names)}{hint}")


@dataclass(frozen=True)
class Shape:
    """The MoE layers of the model that a trace came from. record_bytes of an expert; None: not known, one size."""

    num_experts: tuple[int, ...]
    record_bytes: tuple[int, ...] | None
    top_k: int
    num_tokens: int

    @property
    def total_experts(self) -> int:
        return sum(self.num_experts)


@dataclass(frozen=True)
class Link:
    """What the schedule bound assumes. before_s, after_s: of a layer, up to where its routes are known, and from there
    on. triggers: layers at which forecasts are made (None: all); horizon: later passes that each tells of."""

    bytes_per_s: float
    latency_s: float
    before_s: float
    after_s: float
    triggers: tuple[int, ...] | None = None
    horizon: int = 1


@dataclass(frozen=True)
class Simulation:
    """Settings that all rows of a simulation share.

    window: tokens a pass. pins: False lets a layer's own experts be evicted for each other. prompt_tokens: what
    prefill-hot takes for the prompt. transfers_per_layer: experts that the link moves ahead while a layer runs (0: no
    prefetch), of which a forecast of this recall knows.
    """

    window: int = 1
    pins: bool = True
    prompt_tokens: int = 0
    transfers_per_layer: float = 0.0
    recall: float = 1.0
    seed: int = 0
    link: Link | None = None


def read_shape(trace: Trace, num_experts: int | None = None) -> Shape:
    """From the trace's header, or where that does not say (JSONL), from reading it once: then the highest id is the
    last expert's, unless the caller knows their number. HeadraceError for a trace without tokens."""
    experts, num_tokens = num_experts or trace.num_experts, trace.num_tokens
    if experts is None or num_tokens is None:
        largest, num_tokens = -1, 0
        for block in trace.blocks(values=False):
            num_tokens += len(block.ids)
            largest = max(largest, int(block.ids.max()))
        experts = experts or largest + 1
        if largest >= experts:
            raise HeadraceError(f"{trace.path}: has a route to expert {largest}, expected fewer than {experts} experts")
    if not num_tokens:
        raise HeadraceError(f"{trace.path}: holds no tokens; record it again")
    return Shape((experts,) * trace.num_layers, None, trace.top_k, num_tokens)


def slots_for(residency: float | Fraction, shape: Shape) -> int:
    """Whole experts in that share of all, at least one."""
    share = Fraction(str(residency)) if isinstance(residency, float) else residency
    return max(1, math.floor(share * shape.total_experts))


def make_simulator(policy: Policy, slots: int, shape: Shape, settings: Simulation) -> _core.Simulator:
    """slots: experts of mean size. With a link, its bounds are those of the triggers and of none at all."""
    n, link = len(shape.num_experts), settings.link
    links = []
    if link is not None:
        times = link.bytes_per_s, link.latency_s, [link.before_s] * n, [link.after_s] * n
        triggers = list(range(n) if link.triggers is None else link.triggers)
        links = [_core.Link(*times, triggers, link.horizon), _core.Link(*times, [])]
    record = list(shape.record_bytes or (1,) * len(shape.num_experts))
    total_bytes = sum(n * r for n, r in zip(shape.num_experts, record, strict=True))
    return _core.Simulator(
        list(shape.num_experts),
        record,
        max(max(record), total_bytes * slots // shape.total_experts),
        policy.native,
        hot_routes=settings.prompt_tokens * shape.top_k,
        pins=settings.pins,
        window=settings.window,
        lookahead=policy.lookahead,
        transfers_per_layer=settings.transfers_per_layer,
        recall=settings.recall,
        seed=settings.seed,
        links=links,
    )


def simulate(
    trace: Trace,
    shape: Shape,
    policies: Sequence[Policy],
    residencies: Sequence[float | Fraction],
    settings: Simulation,
    num_threads: int = 1,
) -> list[dict[str, Any]]:
    """One row for each policy and residency, all in one reading of the trace. docs/policies.md says what they hold."""
    runs = [(p, r, slots_for(r, shape)) for p in policies for r in residencies]
    simulators = [make_simulator(policy, slots, shape, settings) for policy, _, slots in runs]

    def feed(simulator: _core.Simulator, ids: np.ndarray, begins_sequence: bool) -> None:
        if begins_sequence:  # a pass holds tokens of one sequence
            simulator.end_pass()
        simulator.feed(ids)

    fed: list[Future[None]] = []
    sequence = 0
    with ThreadPoolExecutor(num_threads) as pool:
        for block in trace.blocks(values=False):  # is read while the one before is simulated
            ids = np.ascontiguousarray(block.ids, np.int32)
            for future in fed:
                future.result()
            fed = [pool.submit(feed, simulator, ids, block.sequence != sequence) for simulator in simulators]
            sequence = block.sequence
        for future in fed:
            future.result()
        for future in [pool.submit(simulator.finish) for simulator in simulators]:
            future.result()
    return [
        _row(policy, residency, slots, simulator.counters(), shape) | _bound(simulator, shape)
        for (policy, residency, slots), simulator in zip(runs, simulators, strict=True)
    ]


def _bound(simulator: _core.Simulator, shape: Shape) -> dict[str, float]:
    """Tokens a second at best (docs/policies.md, "The schedule bound"); nothing without a link."""
    if not simulator.bounds:
        return {}
    best, demand = simulator.bounds

    def tps(seconds: float) -> float:
        return shape.num_tokens / seconds  # loading the first pass takes some

    loose_s = max(best.compute_seconds, best.link_seconds)
    return {"bound_tps": tps(best.seconds), "demand_tps": tps(demand.seconds), "loose_tps": tps(loose_s)}


def _row(
    policy: Policy, residency: float | Fraction, slots: int, counters: dict[str, int], shape: Shape
) -> dict[str, Any]:
    passes = counters["passes"]
    mean = counters["loads"] / passes if passes else 0.0
    variance = counters.pop("loads_squared") / passes - mean * mean if passes else 0.0
    uses = counters["hits"] + counters["late_hits"] + counters["loads"]
    if shape.record_bytes is None:
        del counters["bytes_read"], counters["bytes_unused"]
    return {
        "policy": policy.name,
        "residency": float(residency),
        "slots": slots,
        "hit_rate": counters["hits"] / uses if uses else 0.0,
        **counters,
        "loads_per_pass": mean,
        "loads_per_pass_sd": math.sqrt(max(0.0, variance)),
    }

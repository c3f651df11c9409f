"""How a prompt's pass reads its experts: group size, queue depth, banks, and when reads may start (docs/prefill.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.errors import HeadraceError

SCHEDULES = ("early", "after-routing", "on-demand")
ABLATIONS = ("naive", "whole-layers")
MAX_QUEUE_DEPTH = 64  # loader threads
MAX_EXPERTS = (1 << 20) - 1
# Without a profile of the device: reads of some 12 MiB, three at a time, and banks for twice as many.
DEFAULT_GROUP_BYTES = 12 << 20
DEFAULT_QUEUE_DEPTH = 3
DEFAULT_BANKS = 6


@dataclass(frozen=True)
class Pipeline:
    """G, Q and B of EStream, and its schedule.

    group_size: experts of a layer, in storage order, that are one read and fill one bank. queue_depth: such reads in
    flight. banks: groups that may be in memory, from the start of a read to the last use of what it brought.
    schedule: "early" reads ahead across layers, before routes are known; "after-routing" reads ahead of computing
    within a layer; "on-demand" reads a group when it is the next to be computed.
    """

    group_size: int
    queue_depth: int
    banks: int
    schedule: str = "early"

    def __post_init__(self) -> None:
        for name, most in (("group_size", MAX_EXPERTS), ("queue_depth", MAX_QUEUE_DEPTH), ("banks", MAX_EXPERTS)):
            if not 1 <= getattr(self, name) <= most:
                raise HeadraceError(f"pipeline: {name}: expected 1 to {most}, found {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise HeadraceError(f"pipeline: schedule: expected one of {', '.join(SCHEDULES)}, found {self.schedule!r}")

    @property
    def bank_experts(self) -> int:
        return self.banks * self.group_size

    @property
    def stream_experts(self) -> int:
        """What the arena must hold so that reads stay ahead of computing: Q + 1 banks."""
        return min(self.queue_depth + 1, self.banks) * self.group_size

    def settings(self, is_first: bool) -> tuple[int, int, int, bool, bool]:
        """For Executor.run: on demand is a single bank that is filled when it is free."""
        queue_depth, banks = (1, 1) if self.schedule == "on-demand" else (self.queue_depth, self.banks)
        return self.group_size, queue_depth, banks, self.schedule == "early", is_first


def ablation(name: str, num_experts: int, default: Pipeline) -> Pipeline:
    """What EStream compares with: "naive" (Q = 1, G = 1, B = 3), "whole-layers" (two banks of a layer each)."""
    if name == "naive":
        return Pipeline(1, 1, 3)
    if name == "whole-layers":
        return Pipeline(num_experts, min(2, default.queue_depth), 2)
    raise HeadraceError(f"pipeline: expected one of {', '.join(ABLATIONS)}, found {name!r}")


def default_pipeline(record_bytes: int) -> Pipeline:
    """Where nothing was measured. record_bytes: of the largest expert."""
    return Pipeline(max(1, min(16, DEFAULT_GROUP_BYTES // record_bytes)), DEFAULT_QUEUE_DEPTH, DEFAULT_BANKS)


def fit_pipeline(pipeline: Pipeline, arena_bytes: int, record_bytes: int) -> Pipeline:
    """The same with as many banks, then as large groups, as the arena holds."""
    slots = max(1, arena_bytes // record_bytes)
    group_size = min(pipeline.group_size, max(1, slots // min(pipeline.banks, pipeline.queue_depth + 1)))
    return replace(pipeline, group_size=group_size, banks=max(1, min(pipeline.banks, slots // group_size)))

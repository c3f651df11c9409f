"""The memory plan: what of the budget each part gets (invariant 1). Pure arithmetic; readings are passed in.

The plan is made before trunk or arena are loaded, so that a budget that cannot work is refused at once. The
arena's final size is set later, from what the process then holds (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from headrace.errors import HeadraceError
from headrace.sizes import format_size

MIB = 1 << 20
PAGE = 4096

# Kept free under the budget for what nothing else counts: code pages not yet touched, the allocator's slack,
# Python objects of a long run. Page tables are counted apart (8 bytes a page, so 1/512 of all memory).
RESERVE_BYTES = 8 * MIB
# Two runs of the same command differ in what the interpreter holds; the smallest budget is named with this much
# room, so that naming it again works.
NAMED_SLACK_BYTES = 2 * MIB
THREAD_BYTES = 256 << 10  # stack and allocator arena that a thread really touches
ROWS_PER_PASS = (512, 256, 128, 64, 32, 16, 8)
# Larger passes cost slots: scratch takes at most this share of what is left for it and the arena.
MAX_SCRATCH_SHARE = 1 / 8


@dataclass(frozen=True)
class Readings:
    """The machine and the process at the time of planning. None: no such limit."""

    rss_bytes: int
    peak_rss_bytes: int
    available_bytes: int
    total_bytes: int
    cgroup_headroom_bytes: int | None = None
    cgroup_limit_bytes: int | None = None


@dataclass(frozen=True)
class Needs:
    """What the model and the request need, from shapes alone. scratch_bytes: of max_rows."""

    trunk_bytes: int
    state_bytes: int  # of all sessions
    overhead_bytes: int  # loader buffers and tables, attention's buffers
    logits_bytes: int  # logits and what sampling allocates
    num_threads: int  # executor and loader
    largest_record_bytes: int
    expert_bytes: int  # of all experts, records padded
    scratch_bytes: Callable[[int], int]


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes. arena_bytes is an estimate until the process has been measured."""

    budget_bytes: int
    process_bytes: int
    trunk_bytes: int
    state_bytes: int
    scratch_bytes: int
    overhead_bytes: int
    logits_bytes: int
    threads_bytes: int
    page_table_bytes: int
    reserve_bytes: int
    arena_bytes: int
    expert_bytes: int
    minimum_bytes: int
    resident_bytes: int
    max_rows: int
    context: int

    @property
    def other_bytes(self) -> int:
        """All but the arena."""
        return (
            self.process_bytes
            + self.trunk_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.overhead_bytes
            + self.logits_bytes
            + self.threads_bytes
            + self.page_table_bytes
            + self.reserve_bytes
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def page_table_bytes(nbytes: int) -> int:
    return -(-nbytes // 512 // PAGE) * PAGE + 16 * PAGE


def plan_memory(
    needs: Needs,
    readings: Readings,
    *,
    budget_bytes: int | None,
    context: int,
    prompt_rows: int,
) -> MemoryPlan:
    """Divides the budget. None: the default of DESIGN.md, invariant 1.

    prompt_rows: the longest prompt that is expected; a pass never has more rows.
    Raises HeadraceError naming the smallest budget that works.
    """
    rows = sorted({min(r, max(1, prompt_rows)) for r in ROWS_PER_PASS}, reverse=True)
    threads_bytes = needs.num_threads * THREAD_BYTES
    fixed = (
        readings.rss_bytes
        + needs.trunk_bytes
        + needs.state_bytes
        + needs.overhead_bytes
        + needs.logits_bytes
        + threads_bytes
        + RESERVE_BYTES
    )

    def total(scratch_bytes: int, arena_bytes: int) -> int:
        n = fixed + scratch_bytes + arena_bytes
        return n + page_table_bytes(n)

    # The smallest: the shortest passes, and an arena that holds one expert.
    smallest = max(total(needs.scratch_bytes(rows[-1]), needs.largest_record_bytes), readings.peak_rss_bytes)
    minimum_bytes = -(-(smallest + NAMED_SLACK_BYTES) // MIB) * MIB
    # The arena is sized by what the process holds later, which is a little more than now.
    resident = total(needs.scratch_bytes(rows[0]), needs.expert_bytes) + 2 * NAMED_SLACK_BYTES
    resident_bytes = max(-(-resident // MIB) * MIB, minimum_bytes)

    hard_limit = min(readings.total_bytes, readings.cgroup_limit_bytes or readings.total_bytes)
    limits = {"85 % of available memory": readings.available_bytes * 85 // 100}
    if readings.cgroup_headroom_bytes is not None:
        limits["the memory cgroup's headroom"] = readings.cgroup_headroom_bytes
    if budget_bytes is None:
        # Available memory is what is left beside this process; the budget counts this process too.
        # More than a limit is never taken: what of it was charged elsewhere (libraries) may come back.
        limit = min(readings.rss_bytes + min(limits.values()), hard_limit)
        budget_bytes = min(resident_bytes, limit)
        source = f" (from {min(limits, key=lambda k: limits[k])})"
    else:
        source = ""
    if budget_bytes < smallest:
        raise HeadraceError(
            f"memory budget {format_size(budget_bytes)}{source} is too small for this model with a context of "
            f"{context}: the smallest that works is {minimum_bytes // MIB}MiB; "
            f"give --memory {minimum_bytes // MIB}MiB or more, or a smaller context"
        )
    # The kernel keeps a limit in whole pages: a budget equal to it may be a part of a page larger.
    if min(budget_bytes, resident_bytes) // PAGE * PAGE > hard_limit:
        whose = "the machine has" if hard_limit == readings.total_bytes else "the memory cgroup allows"
        raise HeadraceError(
            f"memory budget {format_size(budget_bytes)}: {whose} {format_size(hard_limit)} in all; "
            f"give --memory {format_size(hard_limit * 85 // 100)} or less"
        )

    def arena_for(scratch_bytes: int) -> int:
        rest = budget_bytes - total(scratch_bytes, 0)
        rest -= rest // 512 + PAGE  # its page tables
        return max(needs.largest_record_bytes, min(rest, needs.expert_bytes))

    def fits(scratch_bytes: int) -> bool:
        arena_bytes = arena_for(scratch_bytes)
        if total(scratch_bytes, arena_bytes) > budget_bytes:
            return False
        share = MAX_SCRATCH_SHARE * (scratch_bytes + arena_bytes)
        return arena_bytes == needs.expert_bytes or scratch_bytes <= share

    max_rows = next((r for r in rows if fits(needs.scratch_bytes(r))), rows[-1])
    scratch_bytes = needs.scratch_bytes(max_rows)
    arena_bytes = arena_for(scratch_bytes)
    return MemoryPlan(
        budget_bytes=budget_bytes,
        process_bytes=readings.rss_bytes,
        trunk_bytes=needs.trunk_bytes,
        state_bytes=needs.state_bytes,
        scratch_bytes=scratch_bytes,
        overhead_bytes=needs.overhead_bytes,
        logits_bytes=needs.logits_bytes,
        threads_bytes=threads_bytes,
        page_table_bytes=page_table_bytes(fixed + scratch_bytes + arena_bytes),
        reserve_bytes=RESERVE_BYTES,
        arena_bytes=arena_bytes,
        expert_bytes=needs.expert_bytes,
        minimum_bytes=minimum_bytes,
        resident_bytes=resident_bytes,
        max_rows=max_rows,
        context=context,
    )

"""The memory plan: what of the budget each part gets (invariant 1). Pure arithmetic; readings are passed in.

The plan is made before trunk or arena are loaded, so that a budget that cannot work is refused at once. The
arena's final size is set later, from what the process then holds (engine.py).
"""

from __future__ import annotations

from bisect import bisect_left
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
MOST_ROWS, FEWEST_ROWS = 8192, 8  # of a prompt's pass, where the prompt has as many
# From so many rows on a pass is bound by products: more passes cost nothing but what they read.
EFFICIENT_ROWS = 512


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
    """What the model and the request need, from shapes alone.

    scratch_bytes: of passes of so many rows, what is given back when they have run. buffer_bytes: what else grows with
    the rows of the largest pass, and stays. stream_bytes: what prefill wants of the arena to read ahead while it
    computes, Q + 1 banks of G experts. step_rows: rows of the largest pass that is no prompt's.
    """

    trunk_bytes: int
    state_bytes: int  # of all sessions
    overhead_bytes: int  # loader buffers and tables, attention's buffers
    logits_bytes: int  # logits and what sampling allocates
    num_threads: int  # executor and loader
    largest_record_bytes: int
    expert_bytes: int  # of all experts, records padded
    scratch_bytes: Callable[[int], int]
    buffer_bytes: Callable[[int], int]
    stream_bytes: int
    step_rows: int


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes; scratch and arena while a prompt runs, and in the steps after it. The arena's are estimates
    until the process has been measured."""

    budget_bytes: int
    process_bytes: int
    trunk_bytes: int
    state_bytes: int
    scratch_bytes: int
    buffer_bytes: int
    overhead_bytes: int
    logits_bytes: int
    threads_bytes: int
    page_table_bytes: int
    reserve_bytes: int
    arena_bytes: int
    step_scratch_bytes: int
    step_arena_bytes: int
    expert_bytes: int
    minimum_bytes: int
    resident_bytes: int
    max_rows: int
    context: int

    @property
    def other_bytes(self) -> int:
        """All but the arena, while a prompt runs."""
        return (
            self.process_bytes
            + self.trunk_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.buffer_bytes
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
    prompt_rows = max(1, prompt_rows)
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

    def rows_of(num_passes: int) -> int:
        return -(-prompt_rows // num_passes)

    def passes_of(rows: int) -> int:
        return -(-prompt_rows // rows)

    def pass_bytes(rows: int) -> int:
        return needs.scratch_bytes(rows) + needs.buffer_bytes(rows)

    def total(pass_bytes: int, arena_bytes: int) -> int:
        n = fixed + pass_bytes + arena_bytes
        return n + page_table_bytes(n)

    fewest_passes, most_passes = passes_of(MOST_ROWS), passes_of(FEWEST_ROWS)
    # The smallest: the shortest passes, and an arena that holds one expert.
    smallest = max(total(pass_bytes(rows_of(most_passes)), needs.largest_record_bytes), readings.peak_rss_bytes)
    minimum_bytes = -(-(smallest + NAMED_SLACK_BYTES) // MIB) * MIB
    # The arena is sized by what the process holds later, which is a little more than now.
    resident = total(pass_bytes(rows_of(fewest_passes)), needs.expert_bytes) + 2 * NAMED_SLACK_BYTES
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

    def shared(pass_bytes: int) -> int:
        """What is left for the arena beside passes of so many bytes, and for its page tables."""
        rest = budget_bytes - total(pass_bytes, 0)
        return rest - (rest // 512 + PAGE)

    def arena_for(pass_bytes: int) -> int:
        return max(needs.largest_record_bytes, min(shared(pass_bytes), needs.expert_bytes))

    # Fewer passes read less, as long as reads stay ahead of computing. Where that is out of reach, half of what passes
    # and arena share is the arena's.
    least_arena_bytes = max(needs.largest_record_bytes, min(needs.stream_bytes, needs.expert_bytes, shared(0) // 2))

    def leaves(num_passes: int, arena_bytes: int) -> bool:
        rows_bytes = pass_bytes(rows_of(num_passes))
        return total(rows_bytes, 0) <= budget_bytes and shared(rows_bytes) >= arena_bytes

    def fewest(most: int, arena_bytes: int) -> int | None:
        """Passes, at most so many, that leave so much. More passes never leave less."""
        tried = range(fewest_passes, most + 1)
        at = bisect_left(tried, True, key=lambda n: leaves(n, arena_bytes))
        return tried[at] if at < len(tried) else None

    # With every expert in memory nothing is read twice, however many passes there are.
    num_passes = fewest(max(fewest_passes, passes_of(EFFICIENT_ROWS)), needs.expert_bytes)
    num_passes = num_passes or fewest(most_passes, least_arena_bytes) or most_passes
    max_rows = rows_of(num_passes)
    step_rows = min(max_rows, needs.step_rows)
    scratch_bytes, buffer_bytes = needs.scratch_bytes(max_rows), needs.buffer_bytes(max_rows)
    step_scratch_bytes = needs.scratch_bytes(step_rows)
    arena_bytes = arena_for(scratch_bytes + buffer_bytes)
    return MemoryPlan(
        budget_bytes=budget_bytes,
        process_bytes=readings.rss_bytes,
        trunk_bytes=needs.trunk_bytes,
        state_bytes=needs.state_bytes,
        scratch_bytes=scratch_bytes,
        buffer_bytes=buffer_bytes,
        overhead_bytes=needs.overhead_bytes,
        logits_bytes=needs.logits_bytes,
        threads_bytes=threads_bytes,
        page_table_bytes=page_table_bytes(fixed + scratch_bytes + buffer_bytes + arena_bytes),
        reserve_bytes=RESERVE_BYTES,
        arena_bytes=arena_bytes,
        step_scratch_bytes=step_scratch_bytes,
        step_arena_bytes=arena_for(step_scratch_bytes + buffer_bytes),
        expert_bytes=needs.expert_bytes,
        minimum_bytes=minimum_bytes,
        resident_bytes=resident_bytes,
        max_rows=max_rows,
        context=context,
    )

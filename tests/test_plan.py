"""The memory plan as arithmetic: nothing over the budget, the named smallest works, larger is never worse."""

from itertools import pairwise

import pytest

from headrace.errors import HeadraceError
from headrace.experts.plan import MIB, NAMED_SLACK_BYTES, Needs, Readings, plan_memory

GIB = 1 << 30
NEEDS = Needs(
    trunk_bytes=300 * MIB,
    state_bytes=64 * MIB,
    overhead_bytes=3 * MIB,
    logits_bytes=2 * MIB,
    num_threads=4,
    largest_record_bytes=3 * MIB + 4096,
    expert_bytes=1024 * (3 * MIB + 4096),
    scratch_bytes=lambda rows: rows * 60_000 + 10_000,
    buffer_bytes=lambda rows: rows * 200,
    stream_bytes=20 * (3 * MIB + 4096),
    step_rows=8,
)
READINGS = Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB)


def plan(budget_bytes, readings=READINGS, needs=NEEDS, prompt_rows=512):
    return plan_memory(needs, readings, budget_bytes=budget_bytes, context=512, prompt_rows=prompt_rows)


def parts(p):
    return p.other_bytes + p.arena_bytes


@pytest.mark.parametrize("budget", [512 * MIB, 600 * MIB + 1, GIB, 2 * GIB, 3 * GIB, 4 * GIB])
def test_parts_stay_within_the_budget(budget):
    p = plan(budget)
    assert parts(p) <= budget
    assert p.arena_bytes >= NEEDS.largest_record_bytes


def test_parts_fill_the_budget_until_everything_is_resident():
    p = plan(2 * GIB)
    assert parts(p) > 2 * GIB - MIB
    assert plan(8 * GIB).arena_bytes == NEEDS.expert_bytes


def test_named_smallest_works_even_if_the_process_has_grown_a_little():
    with pytest.raises(HeadraceError) as error:
        plan(100 * MIB)
    named = int(str(error.value).split("--memory ")[1].split("MiB")[0]) * MIB
    grown = Readings(READINGS.rss_bytes + NAMED_SLACK_BYTES - MIB // 4, 70 * MIB, 16 * GIB, 16 * GIB)
    for readings in (READINGS, grown):
        p = plan(named, readings)
        assert parts(p) <= named and p.minimum_bytes >= named
    with pytest.raises(HeadraceError, match="too small"):
        plan(named - NAMED_SLACK_BYTES - MIB)


def test_a_peak_that_already_happened_counts():
    with pytest.raises(HeadraceError, match="too small"):
        plan(600 * MIB, Readings(60 * MIB, 601 * MIB, 16 * GIB, 16 * GIB))


def passes(p, prompt_rows):
    return -(-prompt_rows // p.max_rows)


@pytest.mark.parametrize("prompt_rows", [1, 40, 512, 4096, 4097, 20_000])
def test_larger_budgets_never_give_more_passes_or_less_to_decoding(prompt_rows):
    plans = [plan(b * MIB, prompt_rows=prompt_rows) for b in range(480, 5000, 37)]
    for a, b in pairwise(plans):
        assert b.step_arena_bytes >= a.step_arena_bytes - MIB
        # More passes only where all experts fit beside them; then nothing is read twice.
        assert passes(b, prompt_rows) <= passes(a, prompt_rows) or b.arena_bytes == b.expert_bytes > a.arena_bytes
    assert plans[-1].arena_bytes == NEEDS.expert_bytes
    assert plans[-1].max_rows == -(-prompt_rows // -(-prompt_rows // 8192))


def left_for_both(p):
    """What passes and arena share."""
    return p.budget_bytes - p.other_bytes + p.scratch_bytes + p.buffer_bytes


@pytest.mark.parametrize("prompt_rows", [100, 4096, 9000])
@pytest.mark.parametrize("budget", range(480, 4400, 230))
def test_prompts_take_the_fewest_passes_that_leave_enough_to_read_ahead(budget, prompt_rows):
    p = plan(budget * MIB, prompt_rows=prompt_rows)
    assert parts(p) <= p.budget_bytes
    least = min(NEEDS.stream_bytes, left_for_both(p) // 2)
    assert p.max_rows <= 8 or p.arena_bytes >= min(least, NEEDS.expert_bytes) * 0.99
    fewer = passes(p, prompt_rows) - 1
    if fewer < -(-prompt_rows // 8192):
        return
    rows = -(-prompt_rows // fewer)
    rest = left_for_both(p) - NEEDS.scratch_bytes(rows) - NEEDS.buffer_bytes(rows)
    if p.arena_bytes == NEEDS.expert_bytes:
        assert rest < NEEDS.expert_bytes * 1.01 and p.max_rows >= min(256, prompt_rows)
    else:
        assert rest < least * 1.01


def test_smallest_budget_has_the_shortest_passes_and_one_expert():
    for prompt_rows in (8, 512, 8192):
        with pytest.raises(HeadraceError) as error:
            plan(100 * MIB, prompt_rows=prompt_rows)
        p = plan(int(str(error.value).split("--memory ")[1].split("MiB")[0]) * MIB, prompt_rows=prompt_rows)
        # The named budget is rounded up, and allows for a process that has grown.
        assert p.max_rows <= 8 + 2 * 3 * MIB // 60_000 and p.arena_bytes < 3 * NEEDS.largest_record_bytes


def test_steps_have_what_only_prompts_need():
    p = plan(GIB, prompt_rows=4096)
    assert p.max_rows == 4096 and p.step_scratch_bytes == NEEDS.scratch_bytes(8)
    gained = p.step_arena_bytes - p.arena_bytes
    assert 0 <= p.scratch_bytes - p.step_scratch_bytes - gained < MIB
    short = plan(GIB, prompt_rows=5)
    assert (short.step_scratch_bytes, short.step_arena_bytes) == (short.scratch_bytes, short.arena_bytes)


def test_default_budget_is_the_least_of_need_memory_and_cgroup():
    assert plan(None).budget_bytes == plan(None).resident_bytes
    tight = Readings(60 * MIB, 70 * MIB, GIB, 16 * GIB)
    assert plan(None, tight).budget_bytes == 60 * MIB + GIB * 85 // 100
    caged = Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB, 700 * MIB)
    assert plan(None, caged).budget_bytes == 760 * MIB
    with pytest.raises(HeadraceError, match="memory cgroup"):
        plan(None, Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB, 100 * MIB))


def test_passes_are_no_longer_than_the_prompt():
    assert plan(4 * GIB, prompt_rows=40).max_rows == 40
    assert plan(4 * GIB, prompt_rows=1).max_rows == 1
    assert plan(4 * GIB, prompt_rows=8192).max_rows == 8192
    assert plan(4 * GIB, prompt_rows=8193).max_rows == 4097
    assert plan(4 * GIB, prompt_rows=100_000).max_rows == 7693


def test_more_than_the_machine_has_is_refused():
    small = Readings(60 * MIB, 70 * MIB, 3 * GIB, 3 * GIB)
    with pytest.raises(HeadraceError, match="the machine has 3GiB"):
        plan(100 * GIB, small)
    caged = Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB, GIB, GIB)
    with pytest.raises(HeadraceError, match="the memory cgroup allows 1GiB"):
        plan(2 * GIB, caged)
    # A limit of the same number of bytes, of which the kernel keeps whole pages.
    limit = 700_000_000 // 4096 * 4096
    assert plan(700_000_000, Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB, limit, limit)).arena_bytes > 0
    # The default stays under the limit, though part of what the process holds is charged elsewhere.
    default = plan(None, Readings(60 * MIB, 70 * MIB, 16 * GIB, 16 * GIB, 690 * MIB, 700 * MIB))
    assert default.budget_bytes == 700 * MIB
    # A generous budget is no problem where everything resident needs less.
    assert plan(100 * GIB).arena_bytes == NEEDS.expert_bytes

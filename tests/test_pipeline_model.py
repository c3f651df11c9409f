"""The pipeline model (docs/prefill.md): the recurrence against an event-by-event simulation of the same rule, exactly,
and against the engine's rule."""

import math
from itertools import pairwise

import numpy as np
import pytest
from pipeline_twins import FreePool, Group, Layer, Ordered, Request, model_times, recurrence

from headrace import _core
from headrace.errors import HeadraceError

SCHEDULES = ("early", "after-routing", "on-demand")


def random_request(rng, *, read_times=(1, 20), routed=0.8, resident=0.1, passes=True, lazy=0.1):
    layers = []
    for i in range(rng.integers(1, 6)):
        groups = []
        for _ in range(rng.integers(1, 12)):
            read = int(rng.integers(*read_times, endpoint=True)) if rng.random() >= resident else 0
            has_routes = rng.random() < routed
            compute = int(rng.integers(1, 20)) if has_routes else 0
            part = int(rng.integers(0, read, endpoint=True)) if routed < 1 else read
            groups.append(Group(read, part if has_routes else 0, compute))
        begins_pass = passes and i > 0 and rng.random() < 0.3
        layers.append(Layer(int(rng.integers(0, 30)), groups, begins_pass, rng.random() >= lazy))
    return Request(layers, int(rng.integers(0, 9)))


def plain_request(rng, read_times=(1, 20)):
    """Every group has routes and nothing is resident, as in the paper."""
    return random_request(rng, read_times=read_times, routed=1, resident=0, passes=False, lazy=0)


def random_setting(rng):
    depth = int(rng.integers(1, 5))
    return depth, int(rng.integers(depth, depth + 6)), SCHEDULES[rng.integers(0, 3)]


@pytest.mark.parametrize("seed", range(8))
def test_recurrence_is_the_ordered_rule_event_by_event(seed):
    rng = np.random.default_rng(seed)
    for _ in range(150):
        request, setting = random_request(rng), random_setting(rng)
        events = Ordered(request, *setting).run()
        assert recurrence(request, *setting) == events, setting
        assert model_times(request, *setting) == events, setting


def test_equation_5_literally():
    """One layer, every group with routes: the paper's recurrence and nothing else."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, q, b = (int(x) for x in rng.integers((1, 1, 1), (30, 6, 9)))
        reads, computes = rng.integers(1, 20, (2, n))
        routed = int(rng.integers(0, 40))
        a, d, s, f = np.zeros((4, n + 1), int)
        at = lambda times, k: times[k] if k > 0 else 0  # noqa: E731
        for k in range(1, n + 1):
            a[k] = max(at(d, k - q), at(f, k - b))
            d[k] = a[k] + reads[k - 1]
            s[k] = max(d[k], routed, f[k - 1])
            f[k] = s[k] + computes[k - 1]
        groups = [Group(int(read), int(read), int(x)) for read, x in zip(reads, computes, strict=True)]
        t = model_times(Request([Layer(routed, groups)]), q, b, "early")
        assert (t.read_begin, t.read_end) == (a[1:].tolist(), d[1:].tolist())
        assert (t.compute_begin, t.compute_end, t.total) == (s[1:].tolist(), f[1:].tolist(), f[n])


def test_free_pool_is_the_ordered_rule_when_reads_take_the_same_time():
    rng = np.random.default_rng(2)
    for _ in range(300):
        request, setting = plain_request(rng, (7, 7)), random_setting(rng)
        assert FreePool(request, *setting).run() == model_times(request, *setting), setting


@pytest.mark.parametrize(
    ("longest_compute", "differ", "slower"),
    [(20, (0.005, 0.06), (1.0, 1.002)), (10, (0.15, 0.3), (1.002, 1.01)), (5, (0.4, 0.6), (1.01, 1.05))],
)
def test_free_pool_differs_when_reads_take_different_times(longest_compute, differ, slower):
    """How often, and what waiting for one read in particular costs on average, where computing or reading takes longer
    or both take about as long: docs/prefill.md has these figures. Reads are early and of 10 to 20, Q is 1 to 4."""
    rng, ratios = np.random.default_rng(3), []
    for _ in range(600):
        depth = int(rng.integers(1, 5))
        banks = int(rng.integers(depth, depth + 6))
        n = rng.integers(4, 40)
        times = zip(rng.integers(10, 21, n).tolist(), rng.integers(1, longest_compute + 1, n).tolist(), strict=True)
        request = Request([Layer(int(rng.integers(0, 41)), [Group(read, read, compute) for read, compute in times])])
        pool = FreePool(request, depth, banks, "early").run().total
        ratios.append(model_times(request, depth, banks, "early").total / pool)
    ratios = np.array(ratios)
    print(f"differ {np.mean(ratios != 1):.3f}, slower {ratios.mean():.4f}, at most {ratios.max():.3f}")
    assert differ[0] < np.mean(ratios != 1) < differ[1]
    assert slower[0] < ratios.mean() < slower[1]
    assert np.mean(ratios > 1) > 5 * np.mean(ratios < 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sweep_of_banks_is_each_number_of_banks(schedule):
    rng = np.random.default_rng(4)
    for _ in range(100):
        model = rng.choice([random_request, plain_request])(rng).model()
        depth = int(rng.integers(1, 5))
        sweep = model.sweep_banks(depth, 1, model.num_groups + 2, schedule)
        assert sweep.tolist() == [
            model.times(depth, banks, schedule)["total_s"] for banks in range(1, model.num_groups + 3)
        ]


def test_more_banks_and_earlier_reads_never_cost_time_when_every_group_has_routes():
    rng = np.random.default_rng(5)
    for _ in range(100):
        model = plain_request(rng).model()
        sweeps = [model.sweep_banks(3, 3, model.num_groups + 3, schedule) for schedule in SCHEDULES]
        for early, late in pairwise(sweeps):
            assert (early <= late).all()
        assert all((np.diff(sweep) <= 0).all() for sweep in sweeps)


def test_bounds_hold_and_sums_are_right():
    rng = np.random.default_rng(6)
    for _ in range(200):
        request, setting = random_request(rng), random_setting(rng)
        t = request.model().times(*setting)
        busy = sum(layer.non_expert for layer in request.layers) + sum(g.compute for _, g in request.groups)
        assert t["compute_s"] == busy + request.after
        assert t["total_s"] >= max(t["compute_s"], t["read_s"] / setting[0])
        begun = ~np.isnan(t["read_begin_s"])
        assert t["read_s"] == (t["read_end_s"] - t["read_begin_s"])[begun].sum()
        unrouted = np.array([g.compute == 0 for _, g in request.groups])
        assert t["unused_s"] == (t["read_end_s"] - t["read_begin_s"])[begun & unrouted].sum()
        routed_s = np.repeat(t["routed_s"], [len(layer.groups) for layer in request.layers])
        # Invariant 3: once routes are known, no read starts for a group that has none.
        assert not (begun & unrouted & (t["read_begin_s"] >= routed_s)).any()


def test_a_resident_layer_takes_its_compute_alone():
    layers = [Layer(5, [Group(0, 0, 3), Group(0, 0, 4)]), Layer(6, [Group(0, 0, 2)])]
    t = Request(layers, after=1).model().times(1, 1, "early")
    assert t["total_s"] == t["compute_s"] == 5 + 3 + 4 + 6 + 2 + 1
    assert t["read_s"] == 0 and np.isnan(t["read_begin_s"]).all()


def test_whole_layers_and_single_lanes():
    """EStream's ablations on two equal layers, by hand."""
    layers = [Layer(10, [Group(4, 4, 6)] * 2)] * 2
    assert model_times(Request(layers), 1, 3, "early").total == 10 + 12 + 10 + 12
    assert model_times(Request(layers), 1, 3, "after-routing").total == 2 * (10 + 4 + 12)
    assert model_times(Request(layers), 1, 3, "on-demand").total == 2 * (10 + 2 * 10)
    whole = [Layer(10, [Group(8, 8, 12)])] * 2
    assert model_times(Request(whole), 1, 2, "early").total == 10 + 12 + 10 + 12
    assert model_times(Request(whole), 1, 1, "early").total == 10 + 12 + 10 + 12
    assert model_times(Request([Layer(1, [Group(8, 8, 12)])] * 2), 1, 1, "early").total == 8 + 12 + 8 + 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": [2]}, "expected 2 groups, as the layers say, found 1"),
        ({"num_groups": [1, 0]}, "four lists of 1 layers, found 1, 1 and 2"),
        ({"non_expert_s": [math.nan]}, "times of at least 0 s"),
        ({"non_expert_s": [-1.0]}, "times of at least 0 s"),
        ({"after_s": math.inf}, "times of at least 0 s"),
        ({"groups": np.array([[1.0, 1.0, -1.0]])}, "times of at least 0 s"),
        ({"groups": np.array([[1.0, 1.0, 0.0]])}, "nothing to be read for a group without routes"),
        ({"groups": np.array([[1.0, 2.0, 1.0]])}, "no more to be read with routes"),
    ],
)
def test_impossible_requests_are_refused(change, message):
    good = {
        "non_expert_s": [1.0],
        "begins_pass": [False],
        "reads_early": [True],
        "num_groups": [1],
        "groups": np.ones((1, 3)),
        "after_s": 0.0,
    }
    assert _core.PipelineModel(**good).times(1, 1)["total_s"] == 2
    with pytest.raises(HeadraceError, match=message):
        _core.PipelineModel(**{**good, **change})


def test_impossible_settings_are_refused():
    model = Request([Layer(1, [Group(1, 1, 1)])]).model()
    with pytest.raises(HeadraceError, match="schedule 'late': expected early, after-routing or on-demand"):
        model.times(1, 1, "late")
    for setting in ((0, 1), (1, 0)):
        with pytest.raises(HeadraceError, match="at least 1 read and 1 bank"):
            model.times(*setting)
    with pytest.raises(HeadraceError, match="no fewer banks at most than at least"):
        model.sweep_banks(1, 2, 1)

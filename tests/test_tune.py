"""Tuning (docs/prefill.md): fits, the choice of G, Q and B, and the profile that is kept."""

import json
import os
import time
from dataclasses import replace
from itertools import pairwise

import checkpoints
import numpy as np
import pytest
from test_cli import headrace

from headrace import _core, machine
from headrace.commands import tune as commands_tune
from headrace.commands.model import open_model
from headrace.commands.tune_plot import TunePlot, plot_tune, predicted_layers
from headrace.engine import Engine, EngineOptions, make_plan
from headrace.errors import HeadraceError
from headrace.formats.pack import pack_store
from headrace.formats.store import read_store
from headrace.tune import calibrate as calibrate_module
from headrace.tune import configure, service_times
from headrace.tune import profile as profile_module
from headrace.tune.calibrate import Pass, calibrate, engine_options
from headrace.tune.profile import (
    Bandwidth,
    Device,
    Profile,
    find_profile,
    fingerprint_of,
    load_profile,
    profile_paths,
    save_profile,
    shape_of,
)
from headrace.tune.request import ModelShape, PromptPass, Request, prompt_passes
from headrace.tune.service_times import ComputeTimes, NonExpertTimes, ReadTimes, ServiceTimes

MIB = 1 << 20
OLMOE = ModelShape((64,) * 16, (3_600_384,) * 16)
# A disk of 2 GB/s, and kernels that take 6 us a route.
TIMES = ServiceTimes(
    ReadTimes(2e-4, 2 / 2e9),
    ComputeTimes(2e-4, 3e-4, 6e-6),
    NonExpertTimes(2e-4, 2e-5, 1e-9, 1e-4, 1e-6, 1e-3),
    (1.0,) * 16,
    np.full((16, 64), 8 / 64),
)


def make_profile(checkpoint=None, times=TIMES):
    speeds = [(g, q, min(q, 2.5) * 1e9) for g in (1, 2, 4) for q in (1, 2, 3, 4)]
    bandwidths = [Bandwidth(g, q, speed) for g, q, speed in speeds]
    fingerprint = fingerprint_of(checkpoint) if checkpoint else "0" * 16
    device = Device.of(checkpoint, None) if checkpoint else Device("cpu", 2, "ext4 /dev/sda")
    return Profile("olmoe", fingerprint, device, 2, tuple(bandwidths), times, (1, 2, 4, 8, 16), 1024)


# ---- fits


def test_fit_finds_what_computing_was_made_of():
    rng = np.random.default_rng(0)
    experts = rng.integers(1, np.repeat([1, 2, 4, 8], 200), endpoint=True).astype(float)
    routes = experts * rng.integers(1, 200, len(experts))
    layer = rng.integers(0, 4, len(experts))
    seconds = (3e-4 * experts + 5e-6 * routes) * np.where(layer == 3, 1.5, 1.0)
    idle = np.full(len(experts), 2e-5)
    idle[::100] = 1.0  # the machine did something else
    samples = service_times.ComputeSamples(layer, experts, routes, seconds, idle)
    fitted, factors = service_times.fit_compute(samples, [100, 100, 100, 180])
    assert fitted.group_s == pytest.approx(2e-5)
    assert factors[0] == factors[1] == factors[2] and factors[3] / factors[0] == pytest.approx(1.5, rel=1e-3)
    predicted = (fitted.expert_s * experts + fitted.route_s * routes) * np.array(factors)[layer]
    assert predicted == pytest.approx(seconds, rel=0.02)


def test_fit_of_non_expert_times():
    truth = NonExpertTimes(2e-4, 2e-5, 1e-9, 1e-4, 1e-6, 1e-3)
    rows, first = np.array([64, 512, 512, 1024]), np.array([0, 0, 512, 0])
    seconds = np.array([[truth.of_layer(r, f)] * 5 for r, f in zip(rows, first, strict=True)])
    seconds[:, 0] += [truth.of_pass(r) for r in rows]
    fitted = service_times.fit_non_expert(rows, first, seconds, np.full(4, 1e-3))
    for rows, first in ((8, 0), (300, 200), (4096, 0)):
        assert fitted.of_layer(rows, first) == pytest.approx(truth.of_layer(rows, first), rel=1e-6)
        assert fitted.of_pass(rows) == pytest.approx(truth.of_pass(rows), rel=1e-6)
    assert fitted.after_s == 1e-3


def test_fits_are_never_negative_and_ignore_far_outliers():
    falling = service_times.fit_read(np.arange(1.0, 51), 100 - np.arange(50.0))
    assert falling.byte_s == 0 and falling.read_s > 0
    nbytes, seconds = np.arange(1.0, 51), 1 + 2 * np.arange(1.0, 51)
    seconds[[3, 30]] *= 100
    fitted = service_times.fit_read(nbytes, seconds)
    assert (fitted.read_s, fitted.byte_s) == pytest.approx((1, 2))
    same_size = service_times.fit_read(np.full(9, 4096.0), np.full(9, 1e-3))
    assert same_size.read_s + 4096 * same_size.byte_s == pytest.approx(1e-3)


# ---- the request


def test_a_prompt_is_cut_as_the_engine_cuts_it():
    assert prompt_passes(700, 512) == [PromptPass(512, 0, 0), PromptPass(188, 512, 1)]
    assert prompt_passes(512, 512) == [PromptPass(512, 0, 1)]


@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
def test_a_request_has_the_groups_of_all_layers_and_reads_only_what_has_routes_once_they_are_known(group_size):
    request = Request(OLMOE, TIMES, prompt_passes(8, 512))
    model = request.model(group_size)
    assert model.num_groups == 16 * 64 // group_size
    t = model.times(2, 4, "after-routing")
    used = sum(np.count_nonzero(layer) for layer in request.routes[0])
    reads = np.count_nonzero(~np.isnan(t["read_begin_s"]))
    assert t["read_s"] == pytest.approx(2e-4 * reads + 1e-9 * used * OLMOE.largest_record_bytes)
    assert 0.5 < used / (15 * 64) < 0.75  # 64 % at 8 tokens of 8 in 64; the last layer sees one row
    assert t["unused_s"] == 0


def test_a_shorter_last_group_takes_less():
    shape = ModelShape((10, 10), (4096, 8192))
    times = replace(TIMES, shares=np.ones((2, 10)), layer_factors=(1.0, 1.0))
    t = Request(shape, times, [PromptPass(4, 0, 4)]).model(4).times(1, 6)
    took = (t["read_end_s"] - t["read_begin_s"] - 2e-4) / 1e-9
    assert took == pytest.approx([4 * 4096, 4 * 4096, 2 * 4096, 4 * 8192, 4 * 8192, 2 * 8192])


# ---- the choice


def test_queue_depth_by_equation_7():
    def chosen(table):
        return configure.choose_queue_depth([Bandwidth(g, q, bw) for (g, q), bw in table.items()])

    assert chosen({(1, 1): 90, (1, 2): 100, (1, 4): 101}) == 2
    assert chosen({(1, 1): 96, (1, 2): 100, (1, 4): 101}) == 1  # a near-tie goes to the smaller
    assert chosen({(1, 1): 50, (1, 2): 80, (1, 4): 100, (8, 1): 99, (8, 2): 100, (8, 4): 100}) == 4
    assert chosen({(1, 1): 50, (1, 2): 94, (1, 4): 100, (8, 1): 99, (8, 2): 100, (8, 4): 100}) == 2
    assert chosen({(1, 1): 100, (1, 4): 60, (8, 1): 80, (8, 4): 100}) == 1  # the best there is for both
    assert chosen({(1, 1): 10, (1, 4): 20, (8, 1): 100}) == 4  # where as many of a size did not fit


@pytest.mark.parametrize("residency", [0.125, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("tokens", [8, 128, 1024])
def test_the_choice_is_the_smallest_within_a_percent_of_every_feasible_point(residency, tokens):
    profile, arena_bytes = make_profile(), int(OLMOE.expert_bytes * residency)
    curves = configure.predict(profile, OLMOE, prompt_passes(tokens, 1024), arena_bytes)
    chosen = configure.choose(curves)
    request = Request(OLMOE, TIMES, prompt_passes(tokens, 1024))
    everything = []
    for g in (1, 2, 4, 8, 16):
        model = request.model(g)
        for banks in range(2, min(1024 // g, arena_bytes // (g * OLMOE.largest_record_bytes)) + 1):
            seconds = model.sweep_banks(2, banks, banks)[0]
            everything.append((banks * g * OLMOE.largest_record_bytes, seconds, g, banks))
    best = min(seconds for _, seconds, _, _ in everything)
    expected = min(e for e in everything if e[1] <= 1.01 * best)
    assert (chosen.bank_bytes, chosen.seconds, chosen.group_size, chosen.banks) == expected
    assert chosen.bank_bytes <= arena_bytes and chosen.banks >= chosen.queue_depth == 2
    front = configure.pareto_front(curves)
    assert min(p.seconds for p in front) == best
    assert all(a.bank_bytes < b.bank_bytes and a.seconds > b.seconds for a, b in pairwise(front))


def test_a_small_arena_lowers_the_queue_depth():
    for slots in (1, 2, 3):
        curves = configure.predict(
            make_profile(), OLMOE, prompt_passes(64, 64), slots * OLMOE.largest_record_bytes + 4096
        )
        chosen = configure.choose(curves)
        assert chosen.queue_depth == min(2, slots) and chosen.banks <= slots
        assert [c.group_size for c in curves] == [1]


def test_another_queue_depth_is_predicted_from_the_bandwidths():
    profile = make_profile()
    assert profile.depth_factor(4, 2) == 1
    assert profile.depth_factor(4, 1) == pytest.approx(1)  # one read has half the bandwidth that two share
    assert profile.depth_factor(4, 4) == pytest.approx(4 / 2.5)
    assert profile.depth_factor(4, 7) == 1  # was not measured


def test_another_budget_and_length_take_milliseconds():
    profile = make_profile()
    start = time.process_time()
    for tokens in (8, 4096):
        configure.choose(configure.predict(profile, OLMOE, prompt_passes(tokens, 4096), OLMOE.expert_bytes // 4))
    assert time.process_time() - start < 1  # some 20 ms; a bound that a loaded machine keeps


# ---- the profile


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "profiles"


def tiny_profile(checkpoint):
    c = checkpoint.config
    n = len(checkpoint.experts)
    times = replace(
        TIMES,
        layer_factors=(1.0,) * n,
        shares=np.full((n, c.num_experts), c.num_experts_per_tok / c.num_experts),
    )
    return make_profile(checkpoint, times)


def same(a, b):
    return np.array_equal(a.times.shares, b.times.shares) and replace(
        a, times=replace(a.times, shares=None)
    ) == replace(b, times=replace(b.times, shares=None))


def test_a_profile_is_kept_and_found_again(cache):
    checkpoint = open_model("tiny")
    assert find_profile(checkpoint, None) is None
    profile = tiny_profile(checkpoint)
    path = save_profile(profile, checkpoint)
    assert path.parent == cache and [f.name for f in cache.iterdir()] == [path.name]
    assert same(find_profile(checkpoint, None), profile)
    assert find_profile(checkpoint, machine.num_cpus() + 1) is None  # other threads have other times
    again = replace(profile, queue_depth=3)
    assert save_profile(again, checkpoint) == path and same(find_profile(checkpoint, None), again)
    assert [f.name for f in cache.iterdir()] == [path.name]


def test_a_store_keeps_its_profile_and_one_that_cannot_be_written_to_does_not(cache, tmp_path, monkeypatch):
    tiny = open_model("tiny")
    pack_store(tiny, tmp_path / "store", lambda done, total: None)
    store = read_store(tmp_path / "store")
    assert fingerprint_of(store) != fingerprint_of(tiny)  # the experts of one are packed
    profile = tiny_profile(store)
    path = save_profile(profile, store)
    assert path.parent == tmp_path / "store" and same(find_profile(store, None), profile)
    made_as_usual = tmp_path / "file"
    made_as_usual.touch()
    assert path.stat().st_mode == made_as_usual.stat().st_mode  # others who may read the store may read it too
    assert fingerprint_of(read_store(tmp_path / "store")) == profile.fingerprint
    path.unlink()

    def refuse(path, data):
        if path.parent == tmp_path / "store":
            raise PermissionError(13, "Permission denied", str(path))
        return write(path, data)

    write = profile_module._write
    monkeypatch.setattr(profile_module, "_write", refuse)
    path = save_profile(profile, store)
    assert path.parent == cache and same(find_profile(store, None), profile)


def written(profile, checkpoint):
    path = save_profile(profile, checkpoint)
    data = path.read_bytes()
    return path, json.loads(data)["profile"]


def rewrite(path, body):
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32c": "%08x", "profile": %s}\n' % (_core.crc32c(text, 0), text))


def test_damaged_profiles_are_refused_by_name_and_passed_over(cache):
    checkpoint = open_model("tiny")
    device = Device.of(checkpoint, None)
    path, _ = written(tiny_profile(checkpoint), checkpoint)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data), 60).tolist():
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(HeadraceError, match=f"{path}: .*(damaged|not a profile)"):
                load_profile(path, checkpoint, device)
    warnings = []
    assert find_profile(checkpoint, None, warnings.append) is None
    assert len(warnings) == 1 and str(path) in warnings[0] and "\n" not in warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "format: expected 'headrace-profile', found 'something'"),
        ({"format_version": 1}, "format_version: expected 2; run `headrace tune` again, found 1"),
        ({"fingerprint": "0123"}, "fingerprint: expected this model's"),
        ({"device": {"cpu": "abacus", "num_threads": 1, "filesystem": "nfs"}}, "device: expected this one"),
        ({"queue_depth": 1000}, "queue_depth: expected an integer from 1 to 64"),
        ({"read": []}, "read: expected an object"),
        ({"compute": {"group_s": 1, "expert_s": -1, "route_s": 1}}, "expert_s: expected a time from 0 to 1e6 s"),
        ({"bandwidths": [[]]}, "bandwidths: expected a list of at most 256 objects"),
        ({"bandwidths": [{"group_size": 10**9}]}, "group_size: expected an integer from 1 to"),
        ({"layer_factors": [1.0]}, "layer_factors: expected .* numbers from 0 to"),
        ({"layer_factors": ["x"] * 4}, "layer_factors: expected"),
        ({"layer_factors": [0] * 8}, "layer_factors: expected numbers above 0"),
        ({"shares": [[0.5]]}, "shares: expected a list for each of"),
        ({"shares": [{}, {}, {}, {}]}, "shares: expected"),
        ({"non_expert": {}}, "layer_s is missing"),
        ({"non_expert": {"layer_s": 1e9}}, "layer_s: expected a time from 0 to 1e6 s"),
        ({"bandwidths": [{"group_size": 1, "queue_depth": 1, "bytes_per_s": -1}]}, "bytes_per_s: expected a positive"),
        ({"calibration_tokens": None}, "calibration_tokens is missing"),
        ({"group_sizes": []}, "group_sizes: expected numbers from 1 to 32, ascending"),
        ({"group_sizes": [1, 33]}, "group_sizes: expected numbers from 1 to 32"),
        ({"group_sizes": [2, 1]}, "group_sizes: expected numbers"),
        ({"group_sizes": [True]}, "group_sizes: expected numbers"),
        ({"model": 7}, "model: expected a string, found 7"),
    ],
)
def test_foreign_profiles_are_refused_by_name(cache, change, message):
    checkpoint = open_model("tiny")
    path, body = written(tiny_profile(checkpoint), checkpoint)
    rewrite(path, {**body, **change})
    with pytest.raises(HeadraceError, match=f"{path}.*{message}"):
        load_profile(path, checkpoint, Device.of(checkpoint, None))
    assert find_profile(checkpoint, None) is None


def test_a_profile_that_predicts_nonsense_is_passed_over(cache):
    checkpoint = open_model("tiny")
    for change in (
        {"read": {"read_s": 0, "byte_s": 999999.0}},
        {"compute": {"group_s": 0, "expert_s": 0, "route_s": 0}},
        {"bandwidths": [{"group_size": 1, "queue_depth": q, "bytes_per_s": b} for q, b in ((1, 1e-300), (2, 1e9))]},
    ):
        path, body = written(tiny_profile(checkpoint), checkpoint)
        rewrite(path, {**body, **change})
        told = []
        options = EngineOptions(context=40, prompt_rows=40)
        least = make_plan(checkpoint, options).minimum_bytes
        with Engine(checkpoint, replace(options, memory_bytes=least, warn=told.append)) as engine:
            engine.limit_arena(1)  # room for one read, where the profile has two
            for _ in range(2):
                session = engine.session()
                session.prefill(list(range(40)))
                session.close()
        assert len(told) == 1 and "run `headrace tune` again" in told[0], change


def test_not_a_number_is_no_time(cache):
    checkpoint = open_model("tiny")
    path, body = written(tiny_profile(checkpoint), checkpoint)
    for key in ("shares", "layer_factors"):
        for value in (float("nan"), float("inf"), -1.0, True):
            damaged = json.loads(json.dumps(body))
            (damaged[key][0] if key == "shares" else damaged[key])[0] = value
            rewrite(path, damaged)
            with pytest.raises(HeadraceError, match=str(path)):
                load_profile(path, checkpoint, Device.of(checkpoint, None))


def test_a_profile_that_is_no_file_or_too_large_is_refused(cache):
    checkpoint = open_model("tiny")
    device = Device.of(checkpoint, None)
    (path,) = profile_paths(checkpoint, device)
    path.mkdir(parents=True)
    with pytest.raises(HeadraceError, match="expected a regular file"):
        load_profile(path, checkpoint, device)
    path.rmdir()
    path.touch()
    os.truncate(path, 1 << 30)
    with pytest.raises(HeadraceError, match="expected at most 1048576 bytes"):
        load_profile(path, checkpoint, device)


def test_the_shape_is_the_source_s():
    checkpoint = open_model("tiny")
    shape = shape_of(checkpoint)
    assert shape.num_experts == tuple(e.num_experts for e in checkpoint.experts)
    assert all(size % 4096 == 0 for size in shape.record_bytes)
    assert shape.num_groups(5) == sum(-(-n // 5) for n in shape.num_experts)


# ---- the machine


def test_what_the_machine_says_of_processor_and_file_system(tmp_path):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: An Abacus @ 1 Hz\n\nmodel name\t: Another\n")
    assert machine.cpu_name(tmp_path) == "An Abacus @ 1 Hz"
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (proc / "self/mountinfo").write_text(
        f"22 1 0:99 / /a rw - tmpfs tmpfs rw\n23 1 {number} / /b rw shared:1 - ext4 /dev/my\\040disk rw\n"
    )
    assert machine.filesystem_of(tmp_path, tmp_path) == "ext4 /dev/my disk"
    (proc / "self/mountinfo").write_text("")
    assert machine.filesystem_of(tmp_path, tmp_path) == f"device {number}"
    assert machine.cpu_name() and machine.filesystem_of(tmp_path)


# ---- calibration


def arrays(rows, *names):
    columns = zip(*rows, strict=True) if rows else [[]] * len(names)
    return {
        name: np.array(column, float if name.endswith("_s") else int)
        for name, column in zip(names, columns, strict=True)
    }


def a_pass(reads, computes, routed_s, seconds=20.0):
    return Pass(
        2,
        2,
        10,
        0,
        seconds,
        arrays(reads, "layer", "first_expert", "num_experts", "bytes", "start_s", "end_s"),
        arrays(computes, "layer", "first_expert", "num_experts", "num_routes", "start_s", "end_s"),
        np.array(routed_s, float),
        np.array([100, 100]),
    )


def test_what_a_timeline_says():
    p = a_pass(
        reads=[
            (0, 0, 2, 200, 0, 4),
            (0, 2, 2, 200, 0, 8),
            (0, 4, 1, 100, 4, 9),
            (1, 0, 2, 150, 9, 10),
            (1, 2, 1, 100, 10, 12),
        ],
        computes=[(0, 0, 2, 12, 5, 7), (0, 2, 2, 5, 8, 9), (0, 4, 1, 3, 11, 12), (1, 3, 1, 8, 16, 18)],
        routed_s=[3, 15],
    )
    assert p.non_expert_s.tolist() == [3, 3]
    assert p.after_s == 2
    assert p.busy_s == 6 + 6 + 2
    # After the read of the first, the read of the second, the end of the second, and the routes of the layer.
    assert p.idle_s.tolist() == [1, 0, 2, 1]
    nbytes, seconds = calibrate_module._read_samples(p, ModelShape((5, 4), (128, 256)))
    assert nbytes.tolist() == [256, 256, 128, 256]  # one was broken off
    # With Q = 2: two at a time until 8, one from then on.
    assert seconds.tolist() == pytest.approx([4, 8, 5 * 2 / (9 / 5), 4])
    shares = calibrate_module._shares(p, ModelShape((5, 4), (128, 256)), top_k=2)
    assert shares[0].tolist() == [0.6, 0.6, 0.25, 0.25, 0.3]
    assert shares[1].tolist() == [0.5] * 4 + [0.5]


@pytest.fixture(scope="module")
def tiny_calibration():
    checkpoint = open_model("tiny")
    told = []
    with Engine(checkpoint, engine_options(checkpoint, None, None)) as engine:
        calibration = calibrate(engine, lambda done, what: told.append((done, what)), time_limit_s=2.0)
    return checkpoint, calibration, told


def test_calibration_measures_every_group_size_within_the_time(tiny_calibration):
    checkpoint, calibration, told = tiny_calibration
    profile, shape = calibration.profile, shape_of(checkpoint)
    sizes = {p.group_size for p in calibration.passes}
    assert sizes and sizes <= set(shape.group_sizes())
    assert {b.group_size for b in profile.bandwidths} == set(shape.group_sizes())
    assert profile.queue_depth in {b.queue_depth for b in profile.bandwidths}
    assert all(b.bytes_per_s > 0 for b in profile.bandwidths)
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1][0] == 1
    config = checkpoint.config
    assert profile.times.shares.shape == (config.num_hidden_layers, config.num_experts)
    assert profile.times.shares.sum(axis=1) == pytest.approx(config.num_experts_per_tok, rel=1e-6)
    assert profile.times.read.read_s + profile.times.read.byte_s > 0
    assert profile.times.compute.expert_s + profile.times.compute.route_s > 0


def test_passes_are_timed_without_gaps(tiny_calibration):
    _, calibration, _ = tiny_calibration
    for p in calibration.passes:
        assert (p.non_expert_s >= 0).all() and (p.idle_s >= 0).all()
        assert (p.computes["end_s"] >= p.computes["start_s"]).all()
        assert p.busy_s + p.idle_s.sum() <= p.seconds * 1.001
        routes = np.bincount(p.computes["layer"], p.computes["num_routes"])
        top_k = calibration.profile.times.shares[0].sum()
        assert routes[:-1] == pytest.approx(p.rows * top_k) and routes[-1] == pytest.approx(top_k)


def test_without_time_one_group_size_and_few_tokens_are_measured(tmp_path):
    checkpoint = open_model("tiny")
    with Engine(checkpoint, engine_options(checkpoint, None, None)) as engine:
        calibration = calibrate(engine, lambda done, what: None, time_limit_s=0.0)
    assert len({p.group_size for p in calibration.passes}) == 1
    assert calibration.profile.calibration_tokens < engine.max_rows
    profile, shape = calibration.profile, shape_of(checkpoint)

    def sizes(arena_bytes):
        return {c.group_size for c in configure.predict(profile, shape, prompt_passes(64, 64), arena_bytes)}

    (measured,) = profile.group_sizes
    assert sizes(shape.expert_bytes) == {measured}
    too_small = measured * profile.queue_depth * shape.largest_record_bytes - 1
    assert max(sizes(too_small)) < measured  # rather than nothing
    for arena in (1, 3, 100):  # whatever is chosen, what was measured is shown beside it
        nbytes = arena * shape_of(checkpoint).largest_record_bytes
        commands_tune._plot(tmp_path / f"{arena}.png", "tiny", calibration, shape_of(checkpoint), nbytes, 0)
        assert (tmp_path / f"{arena}.png").exists()


def test_tune_keeps_a_profile_that_runs_use_within_the_budget(cache, tmp_path):
    checkpoint = open_model("tiny")
    budget = json.loads(headrace("inspect", "tiny", "-c", 256, "--json").stdout)["plan"]["minimum_bytes"] + 8 * MIB
    done = headrace("tune", "tiny", "--memory", budget + 64 * MIB, "--plot", tmp_path / "plot.png", "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    path = cache / report["profile"].rsplit("/", 1)[1]
    assert str(path) == report["profile"] and path.is_file()
    assert report["peak_rss_bytes"] <= report["budget_bytes"] == budget + 64 * MIB
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    profile = find_profile(checkpoint, None)
    assert profile.queue_depth == report["queue_depth"]
    # Another budget and prompt are configured from it, by whoever loads the model.
    options = EngineOptions(context=64, prompt_rows=48)
    least = make_plan(checkpoint, options).minimum_bytes
    for memory in (least, least + 4 * MIB):
        with Engine(checkpoint, replace(options, memory_bytes=memory)) as engine:
            arena_bytes = engine.prompt_arena_bytes(48)
            session = engine.session()
            session.prefill(list(range(48)))
            assert engine.pipeline(48) == configure.configured(
                profile, shape_of(checkpoint), 48, engine.max_rows, arena_bytes
            )
            assert engine.pipeline(48).bank_experts * shape_of(checkpoint).largest_record_bytes <= arena_bytes
    again = json.loads(headrace("tune", "tiny", "--memory", budget, "--json").stdout)
    assert again["profile"] == report["profile"] and again["peak_rss_bytes"] <= budget
    shown = headrace("tune", "tiny", "--memory", budget)
    assert shown.returncode == 0 and f"profile: {path}" in shown.stdout and "chosen: Q " in shown.stdout


def test_a_small_budget_leaves_a_better_profile_and_predicts_only_what_fits(cache):
    checkpoint = open_model("tiny")
    good = replace(tiny_profile(checkpoint), calibration_tokens=100_000)
    data = save_profile(good, checkpoint).read_bytes()
    report = json.loads(headrace("inspect", "tiny", "-c", 1024, "--json").stdout)
    least = report["plan"]["minimum_bytes"]
    done = headrace("tune", "tiny", "--memory", least, "--json")
    assert done.returncode == 0 and "stays, being calibrated with 100000 tokens" in done.stderr
    (path,) = cache.iterdir()
    assert path.read_bytes() == data
    tuned = json.loads(done.stdout)
    assert tuned["queue_depth"] == good.queue_depth  # what runs will use is what is shown
    assert {p["tokens"] for p in tuned["prompts"]} >= {8, 128} and max(p["tokens"] for p in tuned["prompts"]) < 4096
    assert headrace("bench", "tiny", "--prompt", 4096, "--gen", 0, "--memory", least).returncode == 1


def test_a_small_budget_is_tuned_with_fewer_tokens(monkeypatch):
    # As in a process of its own, whatever the tests before this one held.
    monkeypatch.setattr(machine, "rss_bytes", lambda: 60 * MIB)
    monkeypatch.setattr(machine, "peak_rss_bytes", lambda: 60 * MIB)
    checkpoint = open_model("tiny")
    options = engine_options(checkpoint, None, None)
    assert options.prompt_rows == min(1024, checkpoint.config.max_position_embeddings - 128)
    named = make_plan(checkpoint, replace(options, context=256, prompt_rows=128)).minimum_bytes
    small = engine_options(checkpoint, named, None)
    assert small.prompt_rows < options.prompt_rows and small.context == small.prompt_rows + 128
    with pytest.raises(HeadraceError, match="too small"):
        engine_options(checkpoint, named // 2, None)


def test_a_run_tells_of_a_damaged_profile_and_goes_on(cache):
    checkpoint = open_model("tiny")
    path = save_profile(tiny_profile(checkpoint), checkpoint)
    path.write_bytes(path.read_bytes()[:-9])
    done = headrace("bench", "tiny", "--prompt", 8, "--gen", 1, "--repeat", 1, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["generated_tokens"] == 1
    assert done.stderr == f"headrace: {path}: not a profile, or damaged; remove it, or run `headrace tune` again; " + (
        "running without it\n"
    )


def test_tune_refuses_what_cannot_work(tmp_path):
    done = headrace("tune", "tiny", "--memory", "10MiB")
    assert done.returncode == 1 and "too small" in done.stderr and done.stderr.count("\n") == 1
    done = headrace("tune", "tiny", "--plot", tmp_path / "plot.nothing")
    assert done.returncode == 2 and done.stdout == ""
    file = tmp_path / "file"
    file.write_bytes(b"")
    done = headrace("tune", "tiny", env={**os.environ, "XDG_CACHE_HOME": str(file / "below")})
    assert done.returncode == 1 and "XDG_CACHE_HOME" in done.stderr and done.stderr.count("\n") == 1
    done = headrace("tune", tmp_path / "no.gguf")
    assert done.returncode == 1 and "no such file" in done.stderr


def test_fewer_tokens_for_want_of_time_are_fewer_from_the_first_request_on(tmp_path):
    """And what follows it in its session fits a context that has no more room than the longest one needs."""
    spec = checkpoints.OLMOE.but(vocab_size=50, max_position_embeddings=130)
    path = checkpoints.write_gguf(tmp_path / "model.gguf", spec, checkpoints.random_weights(spec))
    checkpoint = open_model(str(path))
    with Engine(checkpoint, engine_options(checkpoint, None, 2)) as engine:
        calibration = calibrate(engine, lambda done, what: None, time_limit_s=0.0)
    assert max(p.rows for p in calibration.passes) == calibration.profile.calibration_tokens < 130


@pytest.mark.parametrize("num_experts, message", [(1, "found one"), (2, "read no experts")])
def test_a_model_whose_experts_stay_is_refused(tmp_path, num_experts, message):
    """One expert is never read again; of two, the arena keeps the one that a single layer's prompt ends with."""
    spec = checkpoints.OLMOE.but(num_hidden_layers=1, num_experts=num_experts, num_experts_per_tok=1, vocab_size=50)
    path = checkpoints.write_gguf(tmp_path / "model.gguf", spec, checkpoints.random_weights(spec))
    done = headrace("tune", path, "--threads", 2)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


# ---- the plot


def test_plot_shows_the_front_and_two_layers(tmp_path):
    profile, passes = make_profile(), prompt_passes(300, 512)
    curves = configure.predict(profile, OLMOE, passes, OLMOE.expert_bytes)
    chosen = {
        f"{share:.1%} of experts": configure.choose(
            configure.predict(profile, OLMOE, passes, int(OLMOE.expert_bytes * share))
        )
        for share in (0.125, 0.25, 0.5)
    }
    model = Request(OLMOE, TIMES, passes).model(4)
    times = model.times(2, 6)
    layers = predicted_layers(times, [16] * 16, (3, 4), "predicted")
    assert len(layers.computes) <= len(layers.reads) == 32
    assert sum(not span.is_used for span in layers.reads) == 32 - len(layers.computes)
    plot_tune(TunePlot("olmoe", 500 * MIB, curves, chosen, times["compute_s"], [layers]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [f.name for f in tmp_path.iterdir()] == ["plot.png"]

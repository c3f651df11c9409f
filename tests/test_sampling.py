"""Sampling against a straightforward NumPy implementation: full sort, np.exp, running sums."""

import tracemalloc

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.text.sampling import Sampler, _exp_in_place, largest, sampler_from_defaults


def reference_distribution(logits, temperature, top_p, top_k):
    """{id: probability} of what may be drawn."""
    order = np.lexsort((np.arange(logits.size), -logits))
    if top_k:
        order = order[:top_k]
    x = logits[order].astype(np.float64)
    weights = np.exp((x - x[0]) / temperature)
    if top_p < 1:
        running = np.cumsum(weights)
        keep = int(np.argmax(running >= top_p * running[-1])) + 1
        order, weights = order[:keep], weights[:keep]
    return dict(zip(order.tolist(), weights / weights.sum(), strict=True))


def distribution(sampler, logits):
    ids, mass = sampler.distribution(logits)
    ids = range(len(mass)) if ids is None else ids
    return dict(zip(map(int, ids), np.diff(mass, prepend=0.0) / mass[-1], strict=True))


def make_logits(kind, size, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = 1.25
    elif kind == "peaked":
        logits[rng.integers(size)] += 60
    elif kind == "masked":
        logits[rng.random(size) < 0.5] = -np.inf
        logits[rng.integers(size)] = 0
    return logits.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "peaked", "masked"])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 5000])
def test_distribution_is_the_reference(kind, size):
    logits = make_logits(kind, size)
    for temperature in (0.05, 0.7, 1.0, 10.0):
        for top_p in (1e-9, 0.1, 0.9, 0.99, 1.0):
            for top_k in (0, 1, 20, size):
                expected = reference_distribution(logits, temperature, top_p, top_k)
                found = distribution(Sampler(temperature, top_p, top_k, seed=0), logits)
                assert found.keys() == expected.keys()
                ids = list(expected)
                np.testing.assert_allclose([found[i] for i in ids], [expected[i] for i in ids], rtol=1e-9, atol=1e-12)


def test_large_vocabularies_take_the_reference_tokens():
    for kind in ("normal", "ties", "peaked"):
        logits = make_logits(kind, 151_936)
        found = distribution(Sampler(0.6, 0.95, 20, seed=1), logits)
        assert list(found) == list(reference_distribution(logits, 0.6, 0.95, 20))


def test_largest_is_a_stable_sort_cut_short():
    for kind in ("normal", "ties", "equal", "masked"):
        for size in (1, 2, 10, 999):
            logits = make_logits(kind, size, seed=size)
            order = np.argsort(-logits, kind="stable")
            for k in {1, 2, size // 2 + 1, size - 1 or 1, size, size + 5}:
                np.testing.assert_array_equal(largest(logits, k), order[:k])


def test_draws_follow_the_running_sum():
    """Every draw, against the definition, with the same random numbers."""
    logits = make_logits("ties", 500)
    for settings in ((1.0, 1.0, 0), (0.8, 0.9, 0), (1.3, 1.0, 7), (2.0, 0.5, 50)):
        sampler = Sampler(*settings, seed=11)
        uniform = np.random.Generator(np.random.PCG64(11))
        expected = reference_distribution(logits, *settings)
        ids = sorted(expected) if settings[1:] == (1.0, 0) else list(expected)
        running = np.cumsum([expected[i] for i in ids])
        for _ in range(300):
            u = uniform.random() * running[-1]
            assert sampler.sample(logits) == ids[int(np.argmax(running > u))]


def test_frequencies_match_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(1.0, seed=5)
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=4)
    np.testing.assert_allclose(counts / 20_000, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_greedy_takes_the_largest_and_ties_go_to_the_lowest_id():
    logits = np.array([1, 5, -np.inf, 5, 5], np.float32)
    assert Sampler().sample(logits) == 1
    assert Sampler(temperature=1.0, top_k=1).sample(logits) == 1
    assert Sampler(temperature=1.0, top_p=1e-6).sample(logits) == 1
    assert Sampler(temperature=5e-324).sample(logits[[0, 1]]) == 1
    assert {int(i) for i in Sampler(1.0, 1.0, 2).distribution(logits)[0]} == {1, 3}


def test_a_seed_gives_the_same_tokens_everywhere():
    """Fixed values: other machines, other NumPy releases and later versions must give these too."""
    logits = ((np.arange(1000) * 7919 % 1009) / 100).astype(np.float32)
    drawn = {
        settings: [sampler.sample(logits) for _ in range(8)]
        for settings in ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 1.0, 40))
        for sampler in [Sampler(*settings, seed=1234)]
    }
    assert drawn == {
        (1.0, 1.0, 0): [977, 376, 917, 265, 317, 113, 245, 317],
        (0.7, 0.9, 0): [977, 752, 779, 409, 198, 66, 653, 198],
        (1.0, 1.0, 40): [574, 620, 53, 587, 99, 33, 831, 99],
    }


def test_seeds_differ_and_an_unnamed_seed_can_be_named_later():
    logits = np.zeros(1000, np.float32)
    tokens = [[Sampler(1.0, seed=s).sample(logits) for _ in range(3)] for s in (0, 0, 1)]
    assert tokens[0] == tokens[1] != tokens[2]
    first = Sampler(1.0)
    assert first.seed != Sampler(1.0).seed
    again = Sampler(1.0, seed=first.seed)
    assert [first.sample(logits) for _ in range(9)] == [again.sample(logits) for _ in range(9)]


def test_a_copy_continues_the_same_sequence():
    logits = make_logits("normal", 300)
    sampler = Sampler(1.0, 0.95, seed=3)
    for _ in range(5):
        sampler.sample(logits)
    copy = sampler.copy()
    ahead = [sampler.sample(logits) for _ in range(20)]
    assert [copy.sample(logits) for _ in range(20)] == ahead
    assert copy.seed == sampler.seed


def test_masked_tokens_are_never_drawn():
    logits = np.full(50, -np.inf, np.float32)
    logits[[7, 49]] = 0
    for settings in ((1.0,), (1.0, 0.99), (1.0, 1.0, 10)):
        sampler = Sampler(*settings, seed=0)
        assert {sampler.sample(logits) for _ in range(200)} == {7, 49}


def test_the_highest_random_number_draws_a_token_of_positive_weight():
    logits = np.array([0, 0, -np.inf, -np.inf], np.float32)
    sampler = Sampler(1.0, seed=0)
    sampler._uniform = lambda: 1 - 2.0**-53
    assert sampler.sample(logits) == 1
    sampler._uniform = lambda: 0.0
    assert sampler.sample(logits) == 0
    assert sampler.sample(logits[::-1].copy()) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({3: np.nan}, "logits: nan at token 3"),
        ({9: np.nan, 4: np.nan, 1: np.inf}, "logits: nan at token 4"),
        ({5: np.inf}, "logits: inf at token 5"),
        (dict.fromkeys(range(20), -np.inf), "logits: -inf at token 0 and everywhere"),
    ],
)
def test_damaged_logits_are_an_error(temperature, bad, message):
    logits = np.zeros(20, np.float32)
    for i, value in bad.items():
        logits[i] = value
    with pytest.raises(HeadraceError, match=message):
        Sampler(temperature).sample(logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected a number >= 0, found -0.1"),
        ({"temperature": float("nan")}, "temperature: .* found nan"),
        ({"temperature": float("inf")}, "temperature: .* found inf"),
        ({"top_p": 0.0}, "top_p: expected 0 < top_p <= 1, found 0.0"),
        ({"top_p": 1.01}, "top_p: .* found 1.01"),
        ({"top_p": float("nan")}, "top_p: .* found nan"),
        ({"top_k": -1}, "top_k: expected an integer >= 0 .* found -1"),
        ({"top_k": 2.5}, "top_k: .* found 2.5"),
        ({"top_k": float("nan")}, "top_k: .* found nan"),
        ({"seed": -1}, "seed: expected an integer >= 0, found -1"),
    ],
)
def test_arguments_are_checked(settings, message):
    with pytest.raises(HeadraceError, match=message):
        Sampler(**settings)


def test_defaults_of_the_checkpoint_else_greedy():
    qwen = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20.0}

    def settings(generation, **overrides):
        sampler = sampler_from_defaults(generation, **overrides)
        return sampler.temperature, sampler.top_p, sampler.top_k

    assert settings({}) == (0, 1, 0)
    assert settings(qwen) == (0.6, 0.95, 20)
    assert settings({**qwen, "do_sample": False})[0] == 0
    assert settings({"do_sample": True, "temperature": None}) == (1, 1, 0)
    assert settings(qwen, temperature=0.0)[0] == 0
    assert settings({}, temperature=0.9) == (0.9, 1, 0)
    assert settings(qwen, temperature=1.5, top_p=0.5, top_k=3) == (1.5, 0.5, 3)
    assert sampler_from_defaults(qwen, seed=42).seed == 42
    with pytest.raises(HeadraceError, match=r"generation_config: top_p: .* found 'high'"):
        sampler_from_defaults({**qwen, "top_p": "high"})
    with pytest.raises(HeadraceError, match="temperature: expected a number >= 0, found -2"):
        sampler_from_defaults({**qwen, "temperature": -2})


@pytest.mark.parametrize("kind", ["normal", "equal", "peaked"])
def test_memory_stays_small(kind):
    """The memory plan counts it."""
    logits = make_logits(kind, 100_000)
    for settings in ((0.0,), (1.0,), (1.0, 0.9), (1.0, 0.9999), (1.0, 0.9, 20)):
        sampler = Sampler(*settings, seed=0)
        tracemalloc.start()
        sampler.sample(logits)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes <= 28 * logits.size


def test_exp_is_exact_to_the_last_bits():
    rng = np.random.default_rng(0)
    x = np.concatenate(([0.0, -700.0, -np.log(2)], -rng.random(50_000) * 700, -rng.random(50_000)))
    y = x.copy()
    _exp_in_place(y)
    assert y[0] == 1.0
    np.testing.assert_allclose(y, np.exp(x), rtol=5e-16)
    small = np.array([-700.1, -1e300, -np.inf])
    _exp_in_place(small)
    assert not small.any()

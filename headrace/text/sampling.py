"""Choosing the next token from logits: greedy, temperature, top-k, top-p.

The same logits, settings and seed give the same tokens on every machine: all arithmetic is float64
in a fixed order, exp is our own (NumPy's differs between instruction sets in the last bit), and
random numbers are PCG64's raw output, which NumPy promises not to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.errors import HeadraceError

# ln 2 in two parts, the first short enough that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP_DEGREE = 12  # error under 2^-51 for |x| <= ln 2 / 2
_EXP_MIN = -700.0  # exp is still a normal number here; smaller weights cannot be drawn
_BLOCK = 8192  # a block's temporaries stay in the cache


class Sampler:
    """Draws token ids. At temperature 0 the largest logit wins, ties to the lowest id.

    Otherwise weights are exp(logit / temperature) over the top_k largest logits (0: all), of which
    the fewest whose share reaches top_p are kept (1: all); in both, ties go to the lowest ids. Each
    draw uses one random number, and at most 28 bytes per logit for a moment.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> None:
        """seed: None takes one from the system; `self.seed` tells which."""
        if not (math.isfinite(temperature) and temperature >= 0):
            raise HeadraceError(f"temperature: expected a number >= 0, found {temperature}")
        if not 0 < top_p <= 1:
            raise HeadraceError(f"top_p: expected 0 < top_p <= 1, found {top_p}")
        if not (math.isfinite(top_k) and top_k >= 0 and top_k == int(top_k)):
            raise HeadraceError(f"top_k: expected an integer >= 0 (0: all), found {top_k}")
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        if seed < 0:
            raise HeadraceError(f"seed: expected an integer >= 0, found {seed}")
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self.top_k = int(top_k)
        self.seed = seed
        self._bits = np.random.PCG64(seed)

    def copy(self) -> Sampler:
        """A sampler that will draw what this one would."""
        other = Sampler(self.temperature, self.top_p, self.top_k, self.seed)
        other._bits.state = self._bits.state
        return other

    def sample(self, logits: np.ndarray) -> int:
        """The next token's id. logits: float32 [vocab_size]; -inf marks a token never to be drawn.

        Raises HeadraceError for NaN or +inf, which a sound model does not give, and for all -inf.
        """
        best = int(np.argmax(logits))  # the first NaN, where there is one
        if not np.isfinite(logits[best]):
            value = logits[best]
            raise HeadraceError(
                f"logits: {value} at token {best}"
                + (" and everywhere: no token can follow" if value == -np.inf else "")
                + "; the weights or the computation are damaged"
            )
        if self.temperature == 0:
            return best
        ids, mass = self.distribution(logits)
        total = mass[-1]
        # Below the total even when the product rounds up, so that a weight of 0 is never drawn.
        draw = min(self._uniform() * total, np.nextafter(total, 0))
        at = int(np.searchsorted(mass, draw, side="right"))
        return at if ids is None else int(ids[at])

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """What `sample` draws from at a temperature above 0: (ids, mass).

        ids: the kept tokens, likeliest first (top_k, top_p), or None for all in order of id.
        mass: float64, the running sum of their weights; the last is the total.
        logits must be finite or -inf, and not all -inf.
        """
        ids = None
        if 0 < self.top_k < logits.size:
            ids = largest(logits, self.top_k)
            logits = logits[ids]
        weights = _weights(logits, self.temperature)
        if self.top_p < 1:
            kept, mass = _nucleus(logits, weights, self.top_p)
            return (kept if ids is None else ids[kept]), mass
        return ids, np.cumsum(weights, out=weights)

    def _uniform(self) -> float:
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53


def sampler_from_defaults(
    generation: Mapping[str, Any],
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
) -> Sampler:
    """The checkpoint's own sampling (generation_config.json), else greedy; arguments override it.

    As in Hugging Face, a checkpoint asks for sampling with do_sample; its temperature is then 1
    unless it says otherwise. A temperature given here decides by itself.
    """
    default_temperature = _setting(generation, "temperature", 1.0)
    if not generation.get("do_sample"):
        default_temperature = 0.0
    return Sampler(
        default_temperature if temperature is None else temperature,
        _setting(generation, "top_p", 1.0) if top_p is None else top_p,
        _setting(generation, "top_k", 0) if top_k is None else top_k,
        seed,
    )


def _setting(generation: Mapping[str, Any], name: str, default: float) -> Any:
    value = generation.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise HeadraceError(f"generation_config: {name}: expected a number, found {value!r}")
    return value


def largest(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest, largest first, ties by ascending id: a stable sort's first k."""
    if k >= logits.size:
        return np.argsort(-logits, kind="stable")
    kth = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > kth)
    tied = np.flatnonzero(logits == kth)[: k - above.size]
    ids = np.concatenate((above, tied))
    return ids[np.argsort(-logits[ids], kind="stable")]


def _nucleus(logits: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest largest weights whose sum reaches top_p of all: positions and running sum."""
    target = top_p * np.cumsum(weights)[-1]
    k = 64
    while True:
        ids = largest(logits, k)
        mass = weights[ids]
        np.cumsum(mass, out=mass)
        if mass[-1] >= target or k >= logits.size:
            break
        k *= 8
    keep = min(int(np.searchsorted(mass, target)) + 1, mass.size)
    return ids[:keep], mass[:keep]


def _weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """exp((logit - largest) / temperature), float64 [n]: 1 for the largest."""
    weights = np.empty(logits.size, np.float64)
    peak = np.float64(logits.max())
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, weight 0
        for start in range(0, logits.size, _BLOCK):
            block = weights[start : start + _BLOCK]
            np.subtract(logits[start : start + _BLOCK], peak, out=block, dtype=np.float64)
            block /= temperature
            _exp_in_place(block)
    return weights


def _exp_in_place(x: np.ndarray) -> None:
    """exp of x <= 0, by single IEEE operations only: 2^n times a polynomial; 0 below _EXP_MIN."""
    tiny = x < _EXP_MIN
    x[tiny] = 0.0
    n = np.rint(x * (1 / math.log(2)))
    r = x - n * _LN2_HIGH
    r -= n * _LN2_LOW
    x.fill(1 / math.factorial(_EXP_DEGREE))
    for degree in range(_EXP_DEGREE - 1, -1, -1):
        x *= r
        x += 1 / math.factorial(degree)
    # 2^n by its bits: the exponent field of a double.
    power = n.astype(np.int64)
    power += 1023
    power <<= 52
    x *= power.view(np.float64)
    x[tiny] = 0.0

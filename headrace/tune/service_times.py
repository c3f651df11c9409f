"""How long one device takes for the parts of a streamed prefill, fitted to what was measured, so that prompts of other
lengths and other budgets can be predicted. EStream, section 3.4: L, X and T_ne."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

# A sample beyond so many times what was expected is the machine's hiccup, not the model's.
OUTLIER = 3.0
FAR_OUTLIER = 10.0  # of what is short and varies


@dataclass(frozen=True)
class ReadTimes:
    """A read takes read_s, and byte_s a byte, with the profile's Q in flight."""

    read_s: float
    byte_s: float


@dataclass(frozen=True)
class ComputeTimes:
    """A group is computed in group_s, and expert_s for each of its experts that has routes, and route_s for each
    route. Of an average layer."""

    group_s: float
    expert_s: float
    route_s: float


@dataclass(frozen=True)
class NonExpertTimes:
    """A layer until its routes are known: layer_s, row_s a row, key_s for each key that a row attends to. A pass takes
    pass_s and pass_row_s a row more before its first layer, and after_s after its last."""

    layer_s: float
    row_s: float
    key_s: float
    pass_s: float
    pass_row_s: float
    after_s: float

    def of_layer(self, rows: int, first: int) -> float:
        """rows: of the pass; first: the position of row 0."""
        return self.layer_s + self.row_s * rows + self.key_s * num_keys(rows, first)

    def of_pass(self, rows: int) -> float:
        return self.pass_s + self.pass_row_s * rows


@dataclass(frozen=True)
class ServiceTimes:
    """layer_factors: how much longer than the average layer each one's experts compute, [layers]. shares: of a token's
    routes, how many go to each expert, [layers, experts]; each layer's sum is num_experts_per_tok."""

    read: ReadTimes
    compute: ComputeTimes
    non_expert: NonExpertTimes
    layer_factors: tuple[float, ...]
    shares: np.ndarray


def num_keys(rows: int, first: int) -> float:
    """Keys that the rows of a pass attend to, together."""
    return rows * (first + (rows + 1) / 2)


# ---- fits. Nothing that is fitted is negative


def fit_read(nbytes: np.ndarray, seconds: np.ndarray) -> ReadTimes:
    """Of reads of all group sizes, [reads]."""
    return ReadTimes(*_line(np.stack([np.ones(len(nbytes)), nbytes], axis=1), seconds))


@dataclass(frozen=True)
class ComputeSamples:
    """Groups that were computed, of all group sizes: [samples] each, float64."""

    layer: np.ndarray
    experts: np.ndarray  # those with routes
    routes: np.ndarray
    seconds: np.ndarray
    idle_s: np.ndarray  # before it, though it could have begun: the group's own part


def fit_compute(samples: ComputeSamples, layer_bytes: Sequence[int]) -> tuple[ComputeTimes, tuple[float, ...]]:
    """And the layers' factors, which layers of one record size share."""
    terms = np.stack([samples.experts, samples.routes], axis=1)
    line = _line(terms, samples.seconds)
    sizes = np.asarray(layer_bytes)
    factors = np.ones(len(layer_bytes))
    for size in np.unique(sizes):
        here = sizes[samples.layer.astype(int)] == size
        if here.any():
            factors[sizes == size] = _scale(samples.seconds[here], terms[here] @ line)
    usual = samples.idle_s <= FAR_OUTLIER * np.median(samples.idle_s)
    return ComputeTimes(float(samples.idle_s[usual].mean()), *line.tolist()), tuple(factors.tolist())


def fit_non_expert(rows: np.ndarray, first: np.ndarray, seconds: np.ndarray, after_s: np.ndarray) -> NonExpertTimes:
    """rows, first: [passes]. seconds: [passes, layers], until each layer's routes were known; after_s: [passes]."""
    keys = np.array([num_keys(int(r), int(f)) for r, f in zip(rows, first, strict=True)])
    terms = np.stack([np.ones(len(rows)), rows, keys], axis=1)
    # Layer 0 has the pass's beginning in it.
    typical = np.median(seconds[:, 1:] if seconds.shape[1] > 1 else seconds, axis=1)
    layer_s, row_s, key_s = _line(terms, typical).tolist()
    more = np.maximum(0, seconds[:, 0] - typical)
    pass_s, pass_row_s = _line(terms[:, :2], more).tolist()
    return NonExpertTimes(layer_s, row_s, key_s, pass_s, pass_row_s, float(np.median(after_s)))


def _line(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least squares of terms @ x = values over x >= 0, [terms], scaled to meet their sum. Samples count
    by their relative error, and far outliers do not count."""
    weights = 1 / np.maximum(values, 1e-12)
    line = _fit(terms, values, weights)
    for _ in range(2):
        ratio = values / np.maximum(terms @ line, 1e-12)
        kept = (ratio < OUTLIER) & (ratio > 1 / OUTLIER)
        if not kept.any():
            break
        line = _fit(terms, values, weights * kept)
    return line * _scale(values, terms @ line)


def _fit(terms: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The best of all choices of terms that are not zero."""
    best, least = np.zeros(terms.shape[1]), np.inf
    for chosen in _subsets(terms.shape[1]):
        x = np.zeros(terms.shape[1])
        x[chosen] = np.linalg.lstsq(terms[:, chosen] * weights[:, None], values * weights, rcond=None)[0]
        error = float(np.sum(((terms @ x - values) * weights) ** 2))
        if (x >= 0).all() and error < least * (1 - 1e-9):
            best, least = x, error
    return best


def _subsets(n: int) -> Iterator[list[int]]:
    for size in range(1, n + 1):
        yield from (list(chosen) for chosen in combinations(range(n), size))


def _scale(seconds: np.ndarray, expected: np.ndarray) -> float:
    """What expected must be multiplied by to sum to what was measured, outliers aside."""
    ratio = seconds / np.maximum(expected, 1e-12)
    kept = ratio <= OUTLIER * np.median(ratio)
    return float(seconds[kept].sum() / max(expected[kept].sum(), 1e-12))

"""Group size, queue depth and banks for a budget and a prompt (EStream, equations 6 to 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.experts.pipeline import Pipeline
from headrace.tune.profile import Bandwidth, Profile
from headrace.tune.request import ModelShape, PromptPass, Request, prompt_passes

# Equation 7: what share of the best bandwidth will do.
ENOUGH_BANDWIDTH = 0.95
# Of the best prediction: what is saved in banks keeps experts for decode.
NEAR_BEST = 1.01


@dataclass(frozen=True)
class Point:
    """A configuration and the prefill time that the model predicts for it."""

    group_size: int
    queue_depth: int
    banks: int
    bank_bytes: int  # of all banks
    seconds: float


@dataclass(frozen=True)
class Curve:
    """One group size: seconds[i] with first_banks + i banks, up to as many as fit (equation 8)."""

    group_size: int
    queue_depth: int
    first_banks: int
    one_bank_bytes: int
    seconds: np.ndarray

    def point(self, i: int) -> Point:
        banks = self.first_banks + i
        return Point(self.group_size, self.queue_depth, banks, banks * self.one_bank_bytes, float(self.seconds[i]))


def choose_queue_depth(bandwidths: Sequence[Bandwidth]) -> int:
    """Equation 7: the least depth with ENOUGH_BANDWIDTH of the best one's. A depth counts by its mean over group sizes,
    each in shares of that size's peak: one cell alone is as uncertain as the depths differ."""
    peak: dict[int, float] = {}
    for b in bandwidths:
        peak[b.group_size] = max(peak.get(b.group_size, 0), b.bytes_per_s)
    shares: dict[int, list[float]] = {}
    for b in bandwidths:
        shares.setdefault(b.queue_depth, []).append(b.bytes_per_s / peak[b.group_size])
    mean = {depth: sum(each) / len(each) for depth, each in shares.items()}
    return min(depth for depth, share in mean.items() if share >= ENOUGH_BANDWIDTH * max(mean.values()))


def max_banks(shape: ModelShape, group_size: int, arena_bytes: int) -> int:
    """Equation 8: what fits, and no more than a pass has groups."""
    return min(shape.num_groups(group_size), arena_bytes // (group_size * shape.largest_record_bytes))


def predict(
    profile: Profile, shape: ModelShape, passes: Sequence[PromptPass], arena_bytes: int, queue_depth: int | None = None
) -> list[Curve]:
    """Of every group size that was measured and of which as many banks fit as reads are in flight; where the arena is
    too small for all of those, of those that were not. queue_depth: the profile's, or, where no group size is small
    enough for it, the largest for which one is."""
    request = Request(shape, profile.times, passes)
    sizes = sorted({*profile.group_sizes, *shape.group_sizes()})
    most = {g: max_banks(shape, g, arena_bytes) for g in sizes}
    depth = queue_depth or min(profile.queue_depth, max(most.values()))
    fits = [g for g in sizes if most[g] >= depth > 0]
    curves = []
    for group_size in [g for g in fits if g in profile.group_sizes] or fits:
        model = request.model(group_size, profile.depth_factor(group_size, depth))
        seconds = model.sweep_banks(depth, depth, most[group_size])
        curves.append(Curve(group_size, depth, depth, group_size * shape.largest_record_bytes, seconds))
    return curves


def choose(curves: Sequence[Curve]) -> Point:
    """The fewest bytes of banks with which prefill takes at most NEAR_BEST of what the best configuration takes; the
    fastest among equals. So it is the fewest banks for its group size (equation 9), and no group size is better by
    more than that (equation 10)."""
    best = min(float(c.seconds.min()) for c in curves)
    near = []
    for curve in curves:
        fits = np.flatnonzero(curve.seconds <= best * NEAR_BEST)
        if len(fits):
            near.append(curve.point(int(fits[0])))
    return min(near, key=lambda p: (p.bank_bytes, p.seconds))


def configured(
    profile: Profile, shape: ModelShape, num_tokens: int, max_rows: int, arena_bytes: int
) -> Pipeline | None:
    """What choose() gives for a prompt; None for an arena without room for a bank."""
    curves = predict(profile, shape, prompt_passes(num_tokens, max_rows), arena_bytes)
    if not curves:
        return None
    point = choose(curves)
    return Pipeline(point.group_size, point.queue_depth, point.banks)


def pareto_front(curves: Sequence[Curve]) -> list[Point]:
    """Points of which none is both smaller and faster than another, by memory ascending."""
    points = sorted(
        (c.point(i) for c in curves for i in range(len(c.seconds))), key=lambda p: (p.bank_bytes, p.seconds)
    )
    front: list[Point] = []
    for point in points:
        if not front or point.seconds < front[-1].seconds:
            front.append(point)
    return front

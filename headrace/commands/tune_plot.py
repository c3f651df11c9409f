"""Plots of `headrace tune`, with Matplotlib: latency against memory, and loads and computation of two layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.commands.plot_file import save_figure
from headrace.tune.configure import Curve, Point, pareto_front

GIB = 1 << 30


@dataclass(frozen=True)
class Span:
    """A group's read or computation. layer: counted through the passes."""

    layer: int
    begin_s: float
    end_s: float
    is_used: bool = True


@dataclass(frozen=True)
class LayersTimeline:
    title: str
    reads: Sequence[Span]
    computes: Sequence[Span]


@dataclass(frozen=True)
class TunePlot:
    """other_bytes: of the process, without banks. chosen: by what the legend says. resident_s: without any read."""

    title: str
    other_bytes: int
    curves: Sequence[Curve]
    chosen: dict[str, Point]
    resident_s: float
    timelines: Sequence[LayersTimeline]


def plot_tune(p: TunePlot, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(10, 4 + 2.2 * len(p.timelines)), layout="constrained")
    figure.suptitle(p.title)
    heights = [3.4] + [2] * len(p.timelines)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _plot_front(axes[0], p)
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes[0].xaxis.set_minor_locator(NullLocator())
    axes[0].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    for axis, timeline in zip(axes[1:], p.timelines, strict=True):
        _plot_layers(axis, timeline)
    save_figure(figure, path)


def _plot_front(axis: Any, p: TunePlot) -> None:
    def memory(nbytes: Any) -> Any:
        return (p.other_bytes + nbytes) / GIB

    for curve in p.curves:
        banks = curve.first_banks + np.arange(len(curve.seconds))
        axis.plot(memory(banks * curve.one_bank_bytes), curve.seconds, linewidth=0.9, label=f"G {curve.group_size}")
    front = pareto_front(p.curves)
    x, y = [memory(f.bank_bytes) for f in front], [f.seconds for f in front]
    axis.step(x, y, where="post", color="black", linewidth=1.6, label="Pareto front")
    names: dict[Point, list[str]] = {}  # of each point, so that none hides another
    for name, point in p.chosen.items():
        names.setdefault(point, []).append(name)
    for (point, here), marker in zip(names.items(), "oDs^vPX*", strict=False):
        label = f"{' and '.join(here)}: G {point.group_size}, Q {point.queue_depth}, B {point.banks}"
        axis.plot(memory(point.bank_bytes), point.seconds, marker, color="crimson", markersize=7, label=label)
    axis.axhline(p.resident_s, linestyle=":", color="black", label="everything resident")
    axis.set(xlabel="process memory with these banks, GiB", ylabel="prefill, s", xscale="log")
    axis.set_ylim(0, max(y) * 1.15)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", ncols=2)


def _plot_layers(axis: Any, timeline: LayersTimeline) -> None:
    """Reads in as many rows as were in flight at once, computation below them. Colours tell the two layers apart."""
    layers = sorted({span.layer for span in (*timeline.reads, *timeline.computes)})
    colours = {layer: f"C{i}" for i, layer in enumerate(layers)}
    start = min((span.begin_s for span in (*timeline.reads, *timeline.computes)), default=0.0)
    lanes: list[float] = []  # until when each is taken
    for span in sorted(timeline.reads, key=lambda s: s.begin_s):
        lane = next((i for i, end in enumerate(lanes) if end <= span.begin_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        _bar(axis, span, start, lane + 1, colours[span.layer])
    for span in timeline.computes:
        _bar(axis, span, start, 0, colours[span.layer])
    axis.set_yticks(range(len(lanes) + 1), ["compute", *(f"read {i + 1}" for i in range(len(lanes)))])
    axis.set_ylim(-0.6, len(lanes) + 0.6)
    axis.set(xlabel="ms", title=timeline.title)
    axis.grid(alpha=0.3, axis="x")


def _bar(axis: Any, span: Span, start: float, row: int, colour: str) -> None:
    axis.broken_barh(
        [((span.begin_s - start) * 1e3, (span.end_s - span.begin_s) * 1e3)],
        (row - 0.4, 0.8),
        facecolors=colour if span.is_used else "none",
        edgecolors="white" if span.is_used else colour,
        linewidth=0.5,
    )


def predicted_layers(
    times: dict[str, Any], num_groups: Sequence[int], layers: Sequence[int], title: str
) -> LayersTimeline:
    """times: PipelineModel.times(). num_groups: of each layer, counted through the passes."""
    first = np.concatenate([[0], np.cumsum(num_groups)])
    reads, computes = [], []
    for layer in layers:
        for k in range(first[layer], first[layer + 1]):
            is_used = not np.isnan(times["compute_end_s"][k])
            if not np.isnan(times["read_end_s"][k]):
                reads.append(Span(layer, times["read_begin_s"][k], times["read_end_s"][k], is_used))
            if is_used:
                computes.append(Span(layer, times["compute_begin_s"][k], times["compute_end_s"][k]))
    return LayersTimeline(title, reads, computes)

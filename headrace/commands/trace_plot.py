"""Plots of a trace's report, with Matplotlib: reuse (MoESpec, Figure 1), unions, working sets, expert shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.commands.plot_file import save_figure
from headrace.commands.words import count_of
from headrace.errors import HeadraceError
from headrace.experts.reuse import Reuse


def plot_reuse(r: Reuse, title: str, path: Path) -> None:
    if not len(r.n):
        raise HeadraceError(f"{title}: no two tokens of a sequence in a row, so nothing to plot; record a longer text")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 8), layout="constrained")
    figure.suptitle(
        f"{title}: {count_of(r.num_tokens, 'token')}, {count_of(r.num_layers, 'layer')}, "
        f"{r.top_k} of {r.num_experts} experts"
    )
    (reuse, union), (working, shares) = figure.subplots(2, 2)

    reuse.plot(r.n, r.rho, color="0.8", linewidth=0.8)
    reuse.plot(r.n, r.mean, marker="o", label="layer mean")
    if not np.isnan(r.mean_low).all():
        reuse.fill_between(r.n, r.mean_low, r.mean_high, alpha=0.3, label="95 % interval")
    reuse.plot(r.n, r.uniform, linestyle=":", color="black", label="uniform routing")
    reuse.set(xlabel="consecutive tokens n", ylabel="reuse ρ(n)", ylim=(0, 1))

    # Under uniform routing U(n) = N (1 - q^n).
    even = r.num_experts * (1 - (1 - r.top_k / r.num_experts) ** r.n) / (r.n * r.top_k)
    union.plot(r.n, r.share, marker="o", label="trace")
    union.plot(r.n, even, linestyle=":", color="black", label="uniform routing")
    union.set(xlabel="tokens per pass n", ylabel="distinct experts per route ū(n)", ylim=(0, 1))

    tokens = np.array(list(r.working_sets))
    means = np.array([mean for _, mean in r.working_sets.values()]) / r.num_experts
    working.plot(tokens, means, color="0.8", linewidth=0.8)
    working.plot(tokens, means.mean(axis=1), marker="o", label="layer mean")
    uniform = 1 - (1 - r.top_k / r.num_experts) ** tokens
    working.plot(tokens, uniform, linestyle=":", color="black", label="uniform routing")
    working.set(xlabel="window in tokens", ylabel="share of the experts used", ylim=(0, 1.02))
    working.set_xscale("log", base=2)

    image = shares.imshow(r.shares * r.num_experts, aspect="auto", cmap="viridis", vmin=0)
    figure.colorbar(image, ax=shares, label="share of routes, over even use")
    shares.set(xlabel="expert", ylabel="layer")
    shares.yaxis.set_major_locator(MaxNLocator(integer=True))
    shares.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (reuse, union, working):
        axes.grid(alpha=0.3)
        axes.legend()

    save_figure(figure, path)

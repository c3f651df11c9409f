"""`headrace trace --report`: reuse, unions, expert shares and working sets of a recorded trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from headrace.commands.words import count_of
from headrace.experts.reuse import MIN_PIECES, Reuse, measure_reuse
from headrace.experts.traces import Trace, open_trace


def report_trace(path: Path, plot: Path | None, partial: bool, as_json: bool) -> None:
    if plot is not None:
        from headrace.commands.plot_file import check_plot
        from headrace.commands.trace_plot import plot_reuse

        check_plot(plot)
    trace = open_trace(path, partial=partial)
    reuse = measure_reuse(trace)
    if plot is not None:
        plot_reuse(reuse, path.name, plot)
    if as_json:
        print(json.dumps(as_dict(trace, reuse)))
    else:
        print("\n".join(_lines(trace, reuse)))


def as_dict(trace: Trace, r: Reuse) -> dict[str, Any]:
    """windows: by length n, layer means and each layer's. Intervals are null where there is too little to resample."""

    def interval(low: np.ndarray, high: np.ndarray, *at: int) -> list[float] | None:
        return None if np.isnan(low[at]) else [float(low[at]), float(high[at])]

    return {
        "trace": str(trace.path),
        "model": vars(trace.model) if trace.model else None,
        "tokens": r.num_tokens,
        "complete_tokens": trace.num_tokens,
        "sequences": r.num_sequences,
        "num_layers": r.num_layers,
        "num_experts": r.num_experts,
        "top_k": r.top_k,
        "resampled": r.resampled,
        "windows": [
            {
                "n": int(n),
                "reuse": float(r.mean[i]),
                "reuse_interval": interval(r.mean_low, r.mean_high, i),
                "uniform_reuse": float(r.uniform[i]),
                "union": float(r.union[i].mean()),
                "share": float(r.share[i]),
                "layers": [
                    {
                        "reuse": float(r.rho[i, layer]),
                        "reuse_interval": interval(r.rho_low, r.rho_high, i, layer),
                        "union": float(r.union[i, layer]),
                    }
                    for layer in range(r.num_layers)
                ],
            }
            for i, n in enumerate(r.n)
        ],
        "experts": [
            {"entropy_bits": float(entropy), "shares": shares.tolist()}
            for entropy, shares in zip(r.entropy_bits, r.shares, strict=True)
        ],
        "working_sets": [
            {
                "tokens": tokens,
                "windows": windows,
                "experts": float(mean.mean()),
                "residency": float(mean.mean()) / r.num_experts,
                "layers": mean.tolist(),
            }
            for tokens, (windows, mean) in r.working_sets.items()
        ],
    }


def _lines(trace: Trace, r: Reuse) -> list[str]:
    d = as_dict(trace, r)
    model = f" of {trace.model.name} ({trace.model.architecture}, {trace.model.fingerprint})" if trace.model else ""
    known = "" if trace.num_experts else " (the highest id says)"
    lines = [
        f"{trace.path}: {count_of(r.num_tokens, 'token')} in {count_of(r.num_sequences, 'sequence')}{model}, "
        f"{count_of(r.num_layers, 'layer')}, {r.top_k} of {r.num_experts} experts{known}",
        "",
    ]
    if d["windows"]:
        too_few = any(w["reuse_interval"] is None for w in d["windows"])
        lines.append(
            f"reuse and unions of n consecutive tokens, layer means; 95 % intervals from {r.resampled}"
            + (f", none from fewer than {MIN_PIECES}" if too_few else "")
        )
        lines.append(f"{'n':>3} {'reuse':>7} {'interval':>15} {'uniform':>8} {'union':>7} {'share':>6}")
    else:
        lines.append("no two tokens of a sequence in a row, so nothing about reuse")
    for w in d["windows"]:
        lines.append(
            f"{w['n']:>3} {w['reuse']:>7.3f} {_interval(w['reuse_interval']):>15} {w['uniform_reuse']:>8.3f} "
            f"{w['union']:>7.2f} {w['share']:>6.3f}"
        )
    lines += ["", "experts that windows of so many tokens use, layer means"]
    lines.append(f"{'tokens':>8} {'windows':>8} {'experts':>8} {'of all':>7}")
    for s in d["working_sets"]:
        lines.append(f"{s['tokens']:>8} {s['windows']:>8} {s['experts']:>8.2f} {s['residency']:>7.1%}")
    lengths = d["windows"][:1] + d["windows"][1:][-1:]
    lines += ["", f"layers; entropy of expert shares in bits, at most {math.log2(r.num_experts):.2f}"]
    lines.append(
        f"{'layer':>5} "
        + "".join(f"{'reuse(' + str(w['n']) + ')':>9} {'interval':>15} " for w in lengths)
        + f"{'entropy':>8} {'top expert':>16}"
    )
    for layer, expert in enumerate(d["experts"]):
        top = max(range(r.num_experts), key=lambda e: expert["shares"][e])
        row = (w["layers"][layer] for w in lengths)
        lines.append(
            f"{layer:>5} "
            + "".join(f"{w['reuse']:>9.3f} {_interval(w['reuse_interval']):>15} " for w in row)
            + f"{expert['entropy_bits']:>8.2f} {str(top) + ': ' + format(expert['shares'][top], '.1%'):>16}"
        )
    return lines


def _interval(ends: list[float] | None) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "-"

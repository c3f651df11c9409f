"""`headrace simulate`: cache policies compared on a recorded trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from headrace import _core, machine
from headrace.commands.model import open_model
from headrace.commands.words import count_of, percent, significant
from headrace.errors import UsageError
from headrace.experts.recorded_run import replay_run
from headrace.experts.simulate import Policy, Shape, Simulation, read_shape, simulate
from headrace.experts.source import expert_source
from headrace.experts.traces import Trace, open_trace
from headrace.sizes import format_size


def _shape(trace: Trace, model: str | None, num_experts: int | None, record_bytes: int | None) -> Shape:
    """Of the trace, with record sizes if they or a model are given."""
    if model is None:
        shape = read_shape(trace)
        found = shape.num_experts[0]
        if num_experts is not None and (num_experts < found or trace.num_experts not in (None, num_experts)):
            least = "" if trace.num_experts else "at least "
            raise UsageError("--experts", f"expected {least}{found}, as {trace.path} has, found {num_experts}")
        sizes = (record_bytes,) * trace.num_layers if record_bytes else None
        return replace(shape, num_experts=(num_experts or found,) * trace.num_layers, record_bytes=sizes)
    checkpoint = open_model(model)
    config = checkpoint.config
    trace.check_shape(len(checkpoint.experts), config.num_experts, config.num_experts_per_tok, checkpoint.name)
    source = expert_source(checkpoint)
    sizes = tuple(source.record_bytes(layer) for layer in range(len(checkpoint.experts)))
    return replace(read_shape(trace, config.num_experts), record_bytes=sizes)


def run_simulate(
    path: Path,
    policies: Sequence[Policy],
    residencies: Sequence[Fraction],
    settings: Simulation,
    prompt_tokens: int | None,
    num_experts: int | None,
    model: str | None,
    record_bytes: int | None,
    num_threads: int | None,
    as_json: bool,
) -> None:
    _core.exit_on_interrupt(True)  # nothing is written
    trace = open_trace(path)
    shape = _shape(trace, model, num_experts, record_bytes)
    if prompt_tokens is None:
        prompt_tokens = -(-shape.num_tokens // 10)
    if prompt_tokens > shape.num_tokens:
        raise UsageError(
            "--prompt", f"expected at most the {count_of(shape.num_tokens, 'token')} of {path}, found {prompt_tokens}"
        )
    triggers = (settings.link and settings.link.triggers) or ()
    if triggers and triggers[-1] >= trace.num_layers:
        raise UsageError(
            "--triggers", f"expected layers of 0 to {trace.num_layers - 1}, which {path} has, found {triggers[-1]}"
        )
    settings = replace(settings, prompt_tokens=prompt_tokens)
    rows = simulate(trace, shape, policies, residencies, settings, num_threads or machine.num_cpus())
    report = {
        "trace": str(path),
        "tokens": shape.num_tokens,
        "layers": len(shape.num_experts),
        "experts": shape.num_experts[0],
        "top_k": shape.top_k,
        "window": settings.window,
        "pins": settings.pins,
        "prompt_tokens": prompt_tokens,
        "prefetch": {"transfers_per_layer": settings.transfers_per_layer, "recall": settings.recall}
        if settings.transfers_per_layer
        else None,
        "link": asdict(settings.link) if settings.link else None,
        "rows": rows,
    }
    print(json.dumps(report) if as_json else _table(report, shape))


def simulate_recorded(path: Path, partial: bool, as_json: bool) -> None:
    """Replays the run that a trace holds; HeadraceError if it would have counted anything else."""
    _core.exit_on_interrupt(True)  # nothing is written
    trace = open_trace(path, partial=partial)
    run = replay_run(trace)
    report = {
        "trace": str(path),
        "tokens": run.num_tokens,
        "passes": run.num_passes,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "policy": run.settings.policy,
        "arena_bytes": run.arena_bytes,
        **run.counters,
    }
    if as_json:
        print(json.dumps(report))
        return
    arena = format_size(run.arena_bytes[0])
    if len(run.arena_bytes) > 1:
        arena += f" (then {', '.join(map(format_size, run.arena_bytes[1:4]))}{', ...' * (len(run.arena_bytes) > 4)})"
    c = run.counters
    print(
        f"{path}: {run.settings.policy}, {count_of(run.num_tokens, 'token')} in "
        f"{count_of(run.num_passes, 'pass')}, arena of {arena}: "
        f"{c['hits']} hits, {c['late_hits']} late hits, {c['loads']} loads, {c['prefetches']} prefetches, "
        f"{c['evictions']} evictions, read {format_size(c['bytes_read'])}, unused {format_size(c['bytes_unused'])}; "
        "the replay counts what the run counted"
    )


def _table(report: dict[str, Any], shape: Shape) -> str:
    """Hit rates, a line a policy; if there is more to say, a line a policy and residency."""
    out = [
        f"{report['trace']}: {count_of(report['tokens'], 'token')}, {count_of(report['layers'], 'layer')}, "
        f"{report['top_k']} of {report['experts']} experts"
        + (f", passes of {report['window']}" if report["window"] > 1 else "")
        + ("" if report["pins"] else ", no pins")
    ]
    rows = report["rows"]
    if not (report["prefetch"] or report["link"] or shape.record_bytes):
        residencies = list(dict.fromkeys(r["residency"] for r in rows))
        out.append(f"{'hit rate at':12} " + " ".join(f"{percent(r):>7}" for r in residencies))
        for name in dict.fromkeys(r["policy"] for r in rows):
            out.append(f"{name:12} " + " ".join(f"{r['hit_rate']:7.1%}" for r in rows if r["policy"] == name))
        return "\n".join(out)
    if report["link"]:
        out.append(_assumed(report["link"], shape))
    lines = [_cells(r, report, shape) for r in rows]
    for cells in ([*lines[0]], *(line.values() for line in lines)):
        policy, resident, *figures = cells
        out.append(f"{policy:12} {resident:>8} " + " ".join(f"{figure:>10}" for figure in figures))
    return "\n".join(out)


def _cells(row: dict[str, Any], report: dict[str, Any], shape: Shape) -> dict[str, str]:
    """One line of the long table, by column."""
    uses = max(1, row["hits"] + row["late_hits"] + row["loads"])
    cells = {
        "policy": row["policy"],
        "resident": percent(row["residency"]),
        "hits": f"{row['hit_rate']:.1%}",
    }
    if report["prefetch"]:
        cells |= {
            "late": f"{row['late_hits'] / uses:.1%}",
            "loads": f"{row['loads'] / uses:.1%}",
            "prefetched": str(row["prefetches"]),
            "unused": f"{row['prefetches_unused'] / max(1, row['prefetches']):.1%}",
        }
    if shape.record_bytes:
        cells["read/token"] = format_size(row["bytes_read"] // shape.num_tokens)
    if report["link"]:
        cells |= {name: significant(row[f"{name}_tps"]) for name in ("demand", "bound", "loose")}
    return cells


def _assumed(link: dict[str, Any], shape: Shape) -> str:
    """What the bound's figures hold for."""
    sizes = [format_size(size) for size in sorted({*(shape.record_bytes or ())})]
    layers = link["triggers"]
    at = "all layers" if layers is None else f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    return (
        f"tokens/s over a link of {significant(link['bytes_per_s'] / 1e9)} GB/s and {link['latency_s']:g} s a transfer;"
        f" experts of {' to '.join(sizes[:1] + sizes[1:][-1:])}; layers of {link['before_s']:g} s before the router "
        f"and {link['after_s']:g} s after it; forecasts at {at}, of {count_of(link['horizon'], 'pass')} ahead"
    )

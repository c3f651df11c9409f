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
from headrace.engine import expert_source
from headrace.errors import HeadraceError
from headrace.experts.recorded_run import replay_run
from headrace.experts.simulate import Policy, Shape, Simulation, read_shape, simulate
from headrace.experts.traces import Trace, open_trace
from headrace.sizes import format_size


def _shape(trace: Trace, model: str | None, num_experts: int | None, record_bytes: int | None) -> Shape:
    """Of the trace, with record sizes if they or a model are given."""
    if model is None:
        shape = read_shape(trace, num_experts)
        return replace(shape, record_bytes=(record_bytes,) * trace.num_layers) if record_bytes else shape
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
        raise HeadraceError(f"{path}: a prompt of {prompt_tokens} tokens, the trace has {shape.num_tokens}")
    if settings.link is not None and (shape.record_bytes is None or settings.transfers_per_layer):
        raise HeadraceError("--bound needs the experts' size, --model M or --record SIZE, and no --prefetch")
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
    print(json.dumps(report) if as_json else _table(report))


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
        f"{path}: {run.settings.policy}, {run.num_tokens} tokens in {run.num_passes} passes, arena of {arena}: "
        f"{c['hits']} hits, {c['late_hits']} late hits, {c['loads']} loads, {c['prefetches']} prefetches, "
        f"{c['evictions']} evictions, read {format_size(c['bytes_read'])}, unused {format_size(c['bytes_unused'])}; "
        "the replay counts what the run counted"
    )


def _table(report: dict[str, Any]) -> str:
    """Hit rates, a line a policy; with prefetch a line a policy and residency."""
    out = [
        f"{report['trace']}: {report['tokens']} tokens, {report['layers']} layers, "
        f"{report['top_k']} of {report['experts']} experts"
        + (f", passes of {report['window']}" if report["window"] > 1 else "")
        + ("" if report["pins"] else ", no pins")
    ]
    rows = report["rows"]
    if report["prefetch"]:
        heads = ("hits", "late", "loads", "prefetched", "unused")
        out.append(f"{'policy':12} {'resident':>8} " + " ".join(f"{head:>7}" for head in heads))
        for r in rows:
            uses = max(1, r["hits"] + r["late_hits"] + r["loads"])
            shares = [r["hits"], r["late_hits"], r["loads"]]
            ahead = max(1, r["prefetches"])
            out.append(
                f"{r['policy']:12} {r['residency']:8.0%} "
                + " ".join(f"{n / uses:7.1%}" for n in shares)
                + f" {r['prefetches']:10} {r['prefetches_unused'] / ahead:7.1%}"
            )
        return "\n".join(out)
    if report["link"]:
        out.append(f"{'tokens/s':12} {'resident':>8} {'hit rate':>8} {'demand':>8} {'bound':>8} {'loose':>8}")
        for r in rows:
            speeds = [r["demand_tps"], r["bound_tps"], r["loose_tps"]]
            out.append(
                f"{r['policy']:12} {r['residency']:8.0%} {r['hit_rate']:8.1%} " + " ".join(f"{s:8.2f}" for s in speeds)
            )
        return "\n".join(out)
    residencies = list(dict.fromkeys(r["residency"] for r in rows))
    out.append(f"{'hit rate at':12} " + " ".join(f"{r:7.1%}" for r in residencies))
    for name in dict.fromkeys(r["policy"] for r in rows):
        out.append(f"{name:12} " + " ".join(f"{r['hit_rate']:7.1%}" for r in rows if r["policy"] == name))
    return "\n".join(out)

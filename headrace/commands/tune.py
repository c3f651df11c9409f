"""`headrace tune`: measures device and model, keeps the profile, and says what it gives for a budget."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace import _core, machine
from headrace.commands.model import open_model, warn
from headrace.commands.words import count_of
from headrace.engine import Engine, EngineOptions, make_plan
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint
from headrace.sizes import format_size
from headrace.tune.calibrate import SHORT_TOKENS, Calibration, Progress, calibrate, engine_options
from headrace.tune.configure import Curve, Point, choose, max_banks, predict
from headrace.tune.profile import Profile, check_place, locate_profile, save_profile, shape_of
from headrace.tune.request import ModelShape, Request, prompt_passes

# Prompts that the report gives configurations for, and shares of all experts that the plot shows.
PROMPT_TOKENS = (8, 128, 512, 1024, 4096)
SHARES = (0.125, 0.25, 0.5)
# A profile that was calibrated with so many times as many tokens is not replaced.
MUCH_BETTER = 4


def tune(
    model: str,
    memory_bytes: int | None,
    num_threads: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    _core.exit_on_interrupt(True)  # until there is something to write
    if plot is not None:
        from headrace.commands.plot_file import check_plot

        check_plot(plot)
    start = time.perf_counter()
    checkpoint = open_model(model)
    shape = shape_of(checkpoint)
    check_place(checkpoint, num_threads)
    options = engine_options(checkpoint, memory_bytes, num_threads)
    with _progress(not as_json) as progress, Engine(checkpoint, options) as e:
        arena_bytes, plan = e.prompt_arena_bytes(e.max_rows), e.plan
        calibration = calibrate(e, progress)
    profile = calibration.profile
    _warn_of_little(profile, shape, checkpoint.config.max_position_embeddings, arena_bytes)
    _core.exit_on_interrupt(False)
    known = locate_profile(checkpoint, num_threads)
    if known is not None and known[1].calibration_tokens >= MUCH_BETTER * profile.calibration_tokens:
        few = profile.calibration_tokens
        path, profile = known
        many = profile.calibration_tokens
        warn(f"{path}: stays, being calibrated with {many} tokens and not {few}; remove it to replace it")
    else:
        path = save_profile(profile, checkpoint)
    choices = _choices(checkpoint, profile, replace(options, memory_bytes=plan.budget_bytes, pipeline=None))
    report = {
        "model": checkpoint.name,
        "profile": str(path),
        "budget_bytes": plan.budget_bytes,
        "peak_rss_bytes": machine.peak_rss_bytes(),
        "arena_bytes": arena_bytes,
        "num_threads": profile.device.num_threads,
        "device": asdict(profile.device),
        "queue_depth": profile.queue_depth,
        "bandwidths": [asdict(b) for b in profile.bandwidths],
        "calibration_tokens": profile.calibration_tokens,
        "calibration_group_sizes": profile.group_sizes,
        "read": asdict(profile.times.read),
        "compute": asdict(profile.times.compute),
        "non_expert": asdict(profile.times.non_expert),
        "prompts": [{"tokens": tokens, **asdict(point)} for tokens, point in choices.items()],
        "seconds": time.perf_counter() - start,
    }
    if plot is not None:
        _plot(plot, checkpoint.name, calibration, shape, arena_bytes, plan.other_bytes)
        report["plot"] = str(plot)
    if as_json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(report, profile)))


def _warn_of_little(profile: Profile, shape: ModelShape, context: int, arena_bytes: int) -> None:
    """Of a calibration that what it was given did not suffice for. context: the model's."""
    tokens, sizes, depth = profile.calibration_tokens, shape.group_sizes(), profile.queue_depth
    if tokens < min(SHORT_TOKENS, context // 2):
        warn(
            f"the budget has room for {tokens} tokens to calibrate with, so what longer prompts take is a rough guess; "
            "tune with a larger --memory: the profile serves small budgets too"
        )
    elif len(profile.group_sizes) < len(sizes[:2]):
        is_budget = max_banks(shape, sizes[1], arena_bytes) <= depth
        cause, remedy = ("room", "with a larger --memory") if is_budget else ("time", "when the machine is less busy")
        warn(f"there was {cause} for groups of {profile.group_sizes[0]} alone; tune again {remedy}")


def _choices(checkpoint: Checkpoint, profile: Profile, options: EngineOptions) -> dict[int, Point]:
    """For each of PROMPT_TOKENS that the budget has room for."""
    choices, shape = {}, shape_of(checkpoint)
    for tokens in PROMPT_TOKENS:
        try:
            plan = make_plan(checkpoint, replace(options, context=tokens, prompt_rows=tokens))
        except HeadraceError:  # more than the budget or the model has room for
            continue
        choices[tokens] = choose(predict(profile, shape, prompt_passes(tokens, plan.max_rows), plan.arena_bytes))
    return choices


def _lines(report: dict[str, Any], profile: Profile) -> Iterator[str]:
    device = profile.device
    yield f"{report['model']} on {device.cpu}, {count_of(device.num_threads, 'thread')}, {device.filesystem}"
    yield ""
    sizes = sorted({b.group_size for b in profile.bandwidths})
    depths = sorted({b.queue_depth for b in profile.bandwidths})
    yield "grouped reads, GB/s".ljust(22) + "".join(f"{'Q ' + str(q):>7}" for q in depths)
    speed = {(b.group_size, b.queue_depth): f"{b.bytes_per_s / 1e9:.2f}" for b in profile.bandwidths}
    for size in sizes:
        yield f"  G {size}".ljust(22) + "".join(f"{speed.get((size, q), '-'):>7}" for q in depths)
    yield f"chosen: Q {profile.queue_depth}"
    yield ""
    budget, arena = format_size(report["budget_bytes"]), format_size(report["arena_bytes"])
    yield f"{budget}, of which {arena} for experts; calibrated with {profile.calibration_tokens} tokens"
    yield f"{'prompt':>8} {'G':>4} {'Q':>3} {'B':>4} {'banks':>10} {'prefill, predicted':>20}"
    for p in report["prompts"]:
        yield (
            f"{p['tokens']:>8} {p['group_size']:>4} {p['queue_depth']:>3} {p['banks']:>4} "
            f"{format_size(p['bank_bytes']):>10} {p['seconds']:>18.2f} s"
        )
    yield ""
    yield f"profile: {report['profile']}"


def _plot(
    path: Path, name: str, calibration: Calibration, shape: ModelShape, arena_bytes: int, other_bytes: int
) -> None:
    from headrace.commands.tune_plot import LayersTimeline, Span, TunePlot, plot_tune, predicted_layers

    profile = calibration.profile
    passes = prompt_passes(profile.calibration_tokens, profile.calibration_tokens)
    request = Request(shape, profile.times, passes)

    def chosen(nbytes: int) -> Point:
        return choose(predict(profile, shape, passes, nbytes))

    here = chosen(arena_bytes)
    points = {"this budget": here}
    for share in SHARES:
        nbytes = int(shape.expert_bytes * share)
        if nbytes >= shape.largest_record_bytes:
            points[f"{share:.1%} of experts"] = chosen(nbytes)
    curves: list[Curve] = predict(profile, shape, passes, shape.expert_bytes)
    model = request.model(here.group_size, profile.depth_factor(here.group_size, here.queue_depth))
    times = model.times(here.queue_depth, here.banks)
    middle = max(0, len(shape.num_experts) // 2 - 1)
    layers = (middle, min(middle + 1, len(shape.num_experts) - 1))
    counts = [-(-n // here.group_size) for n in shape.num_experts]
    # The calibration's nearest: its time may not have sufficed for this group size.
    measured = min(calibration.passes, key=lambda p: (abs(math.log2(p.group_size / here.group_size)), -p.rows))

    def spans(rows: dict[str, Any], used: bool) -> list[Span]:
        columns = zip(rows["layer"], rows["start_s"], rows["end_s"], strict=True)
        return [Span(int(layer), float(begin), float(end), used) for layer, begin, end in columns if layer in layers]

    two = f"layers {layers[0]} and {layers[1]}"
    title = f"measured with G {measured.group_size}, Q {measured.queue_depth}: {two}"
    plot_tune(
        TunePlot(
            f"{name}, {profile.calibration_tokens} tokens, {count_of(profile.device.num_threads, 'thread')}",
            other_bytes,
            curves,
            points,
            times["compute_s"],
            [
                predicted_layers(
                    times,
                    counts,
                    layers,
                    f"predicted for G {here.group_size}, Q {here.queue_depth}, B {here.banks}: {two}",
                ),
                LayersTimeline(title, spans(measured.reads, True), spans(measured.computes, True)),
            ],
        ),
        path,
    )


@contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    """A progress bar on stderr, on a terminal, or a callback that does nothing."""
    if not show or not sys.stderr.isatty():
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("tuning"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda done, text: bar.update(task, completed=done, description=text)

"""`headrace bench`: speed on seeded random token ids, median of R runs; the model's own choices are never fed.

With --replay, routes come from a recorded trace, so that a model of random weights runs under real routing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from headrace import _core
from headrace.commands.model import open_model, warn
from headrace.commands.run import hit_rate, session_report
from headrace.commands.words import percent, significant
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError
from headrace.experts.pipeline import ABLATIONS, SCHEDULES, Pipeline, ablation, default_pipeline
from headrace.experts.simulate import Policy
from headrace.experts.traces import Replay, load_replay, open_trace
from headrace.formats.checkpoint import Checkpoint
from headrace.sizes import format_size
from headrace.tune.profile import shape_of


def open_replay(checkpoint: Checkpoint, path: Path, max_tokens: int) -> Replay:
    """The first tokens of a trace. HeadraceError if it is not of a model of this shape."""
    config = checkpoint.config
    trace = open_trace(path, config.num_experts)
    trace.check_shape(len(checkpoint.experts), config.num_experts, config.num_experts_per_tok, checkpoint.name)
    return load_replay(trace, max_tokens)


def future_passes(replay: Replay, prompt_tokens: int, gen_tokens: int, max_rows: int) -> Iterator[list[np.ndarray]]:
    """The distinct experts of each pass and layer of a prefill and so many steps, as Session cuts them: the last
    layer's experts see only rows whose logits are wanted, the prompt's last and each step's."""
    for first in [*range(0, prompt_tokens, max_rows), *range(prompt_tokens, prompt_tokens + gen_tokens)]:
        end = min(first + max_rows, prompt_tokens) if first < prompt_tokens else first + 1
        routes = replay.rows(first, end - first)
        wanted = routes[-1, -1:] if end >= prompt_tokens else routes[-1, :0]
        yield [np.unique(layer) for layer in (*routes[:-1], wanted)]


@dataclass(frozen=True)
class Schedule:
    """How prompts are read. name: one of SCHEDULES or ABLATIONS, or "resident": all experts stay, and each prompt runs
    once before it is measured. Of the sizes, all None: the engine's own; one None: the default's."""

    name: str = "early"
    group_size: int | None = None
    queue_depth: int | None = None
    banks: int | None = None

    @property
    def is_fixed(self) -> bool:
        return self.name in ABLATIONS

    @property
    def reads(self) -> str:
        return self.name if self.name in SCHEDULES else "early"

    def pipeline(self, checkpoint: Checkpoint) -> Pipeline | None:
        default = default_pipeline(shape_of(checkpoint).largest_record_bytes)
        if self.is_fixed:
            return ablation(self.name, checkpoint.config.num_experts, default)
        asked = (self.group_size, self.queue_depth, self.banks)
        if asked == (None, None, None):
            return None
        return Pipeline(
            asked[0] or default.group_size, asked[1] or default.queue_depth, asked[2] or default.banks, self.reads
        )


def bench(
    model: str,
    prompt_tokens: int,
    gen_tokens: int,
    repeat: int,
    memory_bytes: int | None,
    num_threads: int | None,
    seed: int,
    trace: Path | None,
    policy: Policy,
    schedule: Schedule,
    oracle_recall: float | None,
    as_json: bool,
) -> None:
    _core.exit_on_interrupt(True)  # nothing is written
    checkpoint = open_model(model)
    replay = open_replay(checkpoint, trace, prompt_tokens + gen_tokens) if trace is not None else None
    options = EngineOptions(
        context=prompt_tokens + gen_tokens,
        memory_bytes=memory_bytes,
        num_threads=num_threads,
        prompt_rows=prompt_tokens,
        policy=policy.native,
        warn=warn,
        pipeline=schedule.pipeline(checkpoint),
        schedule=schedule.reads,
        oracle_recall=oracle_recall,
        oracle_seed=seed,
    )
    is_resident = schedule.name == "resident"
    lookahead = max(policy.lookahead, 0 if oracle_recall is None else 1)
    runs = []
    with Engine(checkpoint, options) as engine:
        rng = np.random.default_rng(seed)
        if is_resident and engine.report()["residency"] < 1:
            raise HeadraceError(
                f"a resident run needs all experts in memory: give --memory {format_size(engine.plan.resident_bytes)}"
            )
        if lookahead and replay is not None:
            rows = engine.max_rows
            times = [0, gen_tokens] if is_resident else [gen_tokens]
            passes = (p for _ in range(repeat) for n in times for p in future_passes(replay, prompt_tokens, n, rows))
            engine.foresee(passes, lookahead)
        for _ in range(repeat):
            ids = rng.integers(0, checkpoint.config.vocab_size, prompt_tokens + gen_tokens).tolist()
            if is_resident:
                warm = engine.session(replay=replay)
                warm.prefill(ids[:prompt_tokens])
                warm.close()
            session = engine.session(replay=replay)
            session.prefill(ids[:prompt_tokens])
            pipeline = engine.pipeline(min(prompt_tokens, engine.max_rows))
            for token in ids[prompt_tokens:]:
                session.step(token)
            runs.append(
                {
                    **session_report(session),
                    "ttft_s": session.prefill_figures.seconds,
                    "decode_hit_rate": hit_rate(session.decode_figures),
                }
            )
            session.close()
        whence = engine.pipeline_source
        if options.pipeline is not None and pipeline != options.pipeline:
            whence += ", as far as the arena has room"
        # The run whose decode speed is the median stands for the counters.
        middle = sorted(runs, key=lambda r: r["decode_tps"] or 0)[len(runs) // 2]
        report = {
            **engine.report(),
            "policy": policy.name,
            "schedule": schedule.name,
            "pipeline": asdict(pipeline),
            "pipeline_from": whence,
            "oracle_recall": oracle_recall,
            **middle,
            "prompt_tokens": prompt_tokens,
            "generated_tokens": gen_tokens,
            "prefill_tps": median(r["prefill_tps"] for r in runs),
            "decode_tps": median(r["decode_tps"] for r in runs) if gen_tokens else None,
            "ttft_s": median(r["ttft_s"] for r in runs),
            "replay": {"trace": replay.name, "tokens": replay.num_tokens} if replay is not None else None,
            "repeat": repeat,
            "runs": runs,
        }
    if as_json:
        print(json.dumps(report))
        return
    decode = report["decode"]
    per_token = decode["expert_bytes_read"] / gen_tokens if gen_tokens else 0
    print(
        f"{report['model']}: prefill {prompt_tokens} at {significant(report['prefill_tps'])} tokens/s"
        + (
            f", decode {gen_tokens} at {significant(report['decode_tps'])} tokens/s, "
            f"hit rate {report['decode_hit_rate']:.1%}, {format_size(int(per_token))} read a token"
            if gen_tokens
            else ""
        )
        + f" (median of {repeat}); "
        + (f"routes of {replay.name}; " if replay is not None else "")
        + f"{schedule.name} G {pipeline.group_size} Q {pipeline.queue_depth} B {pipeline.banks} "
        f"({whence}); residency {percent(report['residency'])}, "
        f"peak memory {format_size(report['peak_rss_bytes'])} "
        f"of {format_size(report['budget_bytes'])}, {report['num_threads']} threads, {report['isa']}"
    )

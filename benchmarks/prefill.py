"""Streamed prefill beside what it can be at best: the larger of reading and computing.

    python benchmarks/prefill.py STORE [--shares .125,.25,.5] [--tokens 8,128,256,512,640,1024,4096] [--rounds 3]
        [--threads 2] [--only ratios,schedules,sweep,handover] [--sizes G,...] [--depths Q,...] [--banks B,...]
        [--trace TRACE] [-o results.json]

STORE can be made by benchmarks/synth.py and `headrace pack`. Every streamed run is a process of its own, from an empty
arena, in a memory cgroup whose limit is its budget (where one can be made; needs root). A share is of all experts'
bytes: the arena that is left while the prompt runs.

ratios     TTFT over max(T_io, T_exec). T_exec: the same prompt with everything resident, T_io: the bytes of the experts
           that it routes to over the read bandwidth (groups of the run's size, as deep as the run reads); both measured
           in the same round. Medians over rounds of each round's ratio.
schedules  on demand, after routing, early, and EStream's ablations, at 1,024 tokens: TTFT, bubble rate.
sweep      every (G, Q, B) of --sizes, --depths and --banks that fits each share, at 1,024 tokens, interleaved; and what
           the profile (`headrace tune STORE`) or, without one, the default chooses.
handover   decode after a prompt (--trace: its routes; needed here): hit rate of the first 64 steps with what the
           prompt's routes keep, and with what came last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from compare_llama_cpp import write_results

from headrace import _core, machine
from headrace.commands.bench import open_replay
from headrace.engine import Engine, EngineOptions, make_plan
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline, ablation, default_pipeline, fit_pipeline
from headrace.experts.source import expert_source
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import Checkpoint
from headrace.tune.configure import configured
from headrace.tune.profile import find_profile, shape_of

SHARES = (0.125, 0.25, 0.5)
TOKENS = (8, 128, 256, 512, 640, 1024, 4096)
SWEEP_TOKENS = 1024
TABLES = ("ratios", "schedules", "sweep", "handover")
DECODE_STEPS = 64
MEMCAP = Path(__file__).with_name("memcap.py")


def options(tokens: int, args: argparse.Namespace, **more: Any) -> EngineOptions:
    more = {"context": tokens + DECODE_STEPS, "prompt_rows": tokens, "num_threads": args.threads} | more
    return EngineOptions(**more)


def budget_bytes(checkpoint: Checkpoint, tokens: int, share: float, args: argparse.Namespace) -> int:
    """Of a process whose arena holds that share of the experts while it runs such a prompt in one pass."""
    plan = make_plan(checkpoint, options(tokens, args, max_rows=tokens))
    return plan.other_bytes + int(share * plan.expert_bytes) + (4 << 20)


# ---- one streamed run, in a process of its own


def child(args: argparse.Namespace) -> None:
    asked = json.loads(args.child)
    checkpoint = open_checkpoint(Path(args.model))
    tokens = asked["tokens"]
    if "share" in asked:
        print(json.dumps({"budget_bytes": budget_bytes(checkpoint, tokens, asked["share"], args)}))
        return
    pipeline = Pipeline(**asked["pipeline"]) if asked["pipeline"] else None
    given = options(tokens, args, memory_bytes=asked["budget_bytes"], pipeline=pipeline, max_rows=tokens)
    rng = np.random.default_rng(0)
    with Engine(checkpoint, given) as engine:
        session = engine.session()
        ids = rng.integers(0, checkpoint.config.vocab_size, tokens).tolist()
        session.prefill(ids)
        figures = session.prefill_figures
        arena_bytes, chosen = engine.experts.arena_bytes, engine.pipeline(tokens)
    c = figures.counters
    out = {
        "ttft_s": figures.seconds,
        "bubble_rate": figures.bubble_rate,
        "experts": c["hits"] + c["late_hits"] + c["loads"],
        "arena_share": arena_bytes / expert_source(checkpoint).total_bytes(),
        "pipeline": asdict(chosen),
        "peak_rss_bytes": machine.peak_rss_bytes(),
        **figures.as_dict(),
    }
    print(json.dumps(out))


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.checkpoint = open_checkpoint(Path(args.model))
        self.record_bytes = shape_of(self.checkpoint).largest_record_bytes
        self.source = expert_source(self.checkpoint)
        self.budgets: dict[tuple[int, float], int] = {}
        self.is_capped = True
        self.resident: Engine | None = None
        self.profile = find_profile(self.checkpoint, args.threads)

    def run_child(self, asked: dict[str, Any], limit_bytes: int | None = None) -> dict[str, Any]:
        command = [sys.executable, __file__, self.args.model, "--threads", str(self.args.threads)]
        command += ["--child", json.dumps(asked)]
        if limit_bytes and self.is_capped:
            done = subprocess.run([sys.executable, MEMCAP, str(limit_bytes), *command], capture_output=True, text=True)
            if done.returncode == 3:
                print("no memory cgroup can be made here: runs are not confined", file=sys.stderr)
                self.is_capped = False
                return self.run_child(asked, limit_bytes)
        else:
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HeadraceError(f"a run failed ({done.returncode}): {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def budget_bytes(self, tokens: int, share: float) -> int:
        if (tokens, share) not in self.budgets:
            found = self.run_child({"tokens": tokens, "share": share})
            self.budgets[tokens, share] = found["budget_bytes"]
        return self.budgets[tokens, share]

    def streamed(self, tokens: int, share: float, pipeline: Pipeline | None = None) -> dict[str, Any]:
        budget = self.budget_bytes(tokens, share)
        asked = {"tokens": tokens, "budget_bytes": budget, "pipeline": asdict(pipeline) if pipeline else None}
        run = self.run_child(asked, budget)
        if run["peak_rss_bytes"] > budget:
            raise HeadraceError(f"a run took {run['peak_rss_bytes']} bytes of {budget}")
        return run

    def resident_s(self, tokens: int) -> float:
        """The prompt with everything in memory."""
        if self.resident is None:
            longest = max(self.args.tokens)
            self.resident = Engine(self.checkpoint, options(longest, self.args))
            self._prefill(longest)  # reads every expert
        return self._prefill(tokens)

    def _prefill(self, tokens: int) -> float:
        assert self.resident is not None
        session = self.resident.session()
        session.prefill(np.random.default_rng(0).integers(0, self.checkpoint.config.vocab_size, tokens).tolist())
        session.close()
        return session.prefill_figures.seconds

    def bytes_per_s(self, pipeline: dict[str, Any], seconds: float = 0.7) -> float:
        """Of group reads that nobody computes, half as many banks as this again in an arena of their own."""
        group_size, queue_depth = pipeline["group_size"], pipeline["queue_depth"]
        banks = 2 * queue_depth
        memory = _core.ExpertMemory(self.source, banks * group_size * self.record_bytes, max(4, queue_depth))
        sizes = [layer.num_experts for layer in self.checkpoint.experts]
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            memory.begin_stream(group_size, queue_depth, banks, True, [True] * len(sizes), True)
            for layer, num_experts in enumerate(sizes):
                memory.begin(layer, list(range(num_experts)))
                while taken := memory.take(True):
                    for index in taken:
                        memory.release(index)
                memory.end()
                if time.perf_counter() - start > seconds:
                    break
            memory.end_stream()
        return memory.counters()["bytes_read"] / (time.perf_counter() - start)

    # ---- tables

    def ratios(self) -> list[dict[str, Any]]:
        rows = []
        for share in self.args.shares:
            for tokens in self.args.tokens:
                rounds = []
                pipeline: dict[str, Any] = asdict(fit_pipeline(default_pipeline(self.record_bytes), 1 << 60, 1))
                for _ in range(self.args.rounds):
                    run = self.streamed(tokens, share, self.configured(tokens, share))
                    pipeline = run["pipeline"]
                    exec_s, speed = self.resident_s(tokens), self.bytes_per_s(pipeline)
                    io_s = run["experts"] * self.record_bytes / speed
                    rounds.append({**run, "exec_s": exec_s, "io_s": io_s, "ratio": run["ttft_s"] / max(io_s, exec_s)})
                names = ("ttft_s", "exec_s", "io_s", "ratio", "bubble_rate", "arena_share")
                row = {"share": share, "tokens": tokens, **{n: median(r[n] for r in rounds) for n in names}}
                row |= {"tps": tokens / row["ttft_s"], "over_resident": row["ttft_s"] / row["exec_s"], "rounds": rounds}
                rows.append(row | {"pipeline": pipeline})
                print(
                    f"{share:6.1%} {tokens:5d} tokens: TTFT {row['ttft_s']:.3f} s ({row['tps']:.0f} tokens/s), T_io "
                    f"{row['io_s']:.3f}, T_exec {row['exec_s']:.3f}, ratio {row['ratio']:.3f}, over resident "
                    f"{row['over_resident']:.3f}, bubble {row['bubble_rate']:.3f}, arena {row['arena_share']:.1%}, "
                    f"G {pipeline['group_size']} Q {pipeline['queue_depth']} B {pipeline['banks']}",
                    flush=True,
                )
        return rows

    def configured(self, tokens: int, share: float) -> Pipeline | None:
        """By the profile that is kept with the store, if there is one."""
        arena_bytes = int(share * self.source.total_bytes())
        if self.profile is None:
            return None
        return configured(self.profile, shape_of(self.checkpoint), tokens, tokens, arena_bytes)

    def schedules(self) -> list[dict[str, Any]]:
        share, tokens = self.args.shares[len(self.args.shares) // 2], SWEEP_TOKENS
        base = self.configured(tokens, share) or default_pipeline(self.record_bytes)
        size, depth, banks = base.group_size, base.queue_depth, base.banks
        kinds = {name: Pipeline(size, depth, banks, name) for name in ("on-demand", "after-routing", "early")}
        most = max(layer.num_experts for layer in self.checkpoint.experts)
        kinds |= {name: ablation(name, most, base) for name in ("naive", "whole-layers")}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
        resident = []
        for _ in range(self.args.rounds):
            for name, pipeline in kinds.items():
                runs[name].append(self.streamed(tokens, share, pipeline))
            resident.append(self.resident_s(tokens))
        rows = [{"schedule": "resident", "ttft_s": median(resident), "bubble_rate": 0.0}]
        for name in kinds:
            keys = ("ttft_s", "bubble_rate", "io_wait_s", "io_busy_s")
            row = {key: median(r[key] for r in runs[name]) for key in keys}
            rows.append({"schedule": name, **row, "pipeline": runs[name][0]["pipeline"]})
        for row in rows:
            print(f"{row['schedule']:14} TTFT {row['ttft_s']:.3f} s, bubble {row['bubble_rate']:.3f}", flush=True)
        return rows

    def sweep(self) -> list[dict[str, Any]]:
        rows = []
        for share in self.args.shares:
            slots = int(share * self.source.total_bytes()) // self.record_bytes
            a = self.args
            points = [
                Pipeline(g, q, b) for g in a.sizes for q in a.depths for b in a.banks if q <= b and g * b <= slots
            ]
            configured = self.configured(SWEEP_TOKENS, share) or default_pipeline(self.record_bytes)
            points = [p for p in points if p != configured] + [configured]
            seconds: list[list[float]] = [[] for _ in points]
            for _ in range(self.args.rounds):
                for i, pipeline in enumerate(points):
                    seconds[i].append(self.streamed(SWEEP_TOKENS, share, pipeline)["ttft_s"])
            times = [median(s) for s in seconds]
            best = sorted(range(len(points)), key=lambda i: times[i])[:5]
            mean = sum(times[i] for i in best) / len(best)
            rows.append(
                {
                    "share": share,
                    "points": [{**asdict(p), "ttft_s": t} for p, t in zip(points, times, strict=True)],
                    "configured": asdict(configured),
                    "configured_s": times[-1],
                    "best_five_mean_s": mean,
                    "over_best_five": times[-1] / mean,
                }
            )
            print(
                f"{share:6.1%}: {len(points)} points, configured G {configured.group_size} Q {configured.queue_depth} "
                f"B {configured.banks} {times[-1]:.3f} s, {times[-1] / mean:.3f} of the five best (G, Q, B) "
                f"{[(points[i].group_size, points[i].queue_depth, points[i].banks) for i in best]}",
                flush=True,
            )
        return rows

    def handover(self) -> list[dict[str, Any]]:
        if not self.args.trace:
            raise HeadraceError("handover: give a trace of the model's shape with --trace")
        tokens = 192
        replay = open_replay(self.checkpoint, Path(self.args.trace), tokens + DECODE_STEPS)
        rows = []
        for share in self.args.shares:
            budget = self.budget_bytes(tokens, share)
            arena = int(share * self.source.total_bytes())
            row: dict[str, Any] = {"share": share}
            # Banks for all there is keep what came last: nothing else has a slot.
            few = self.configured(tokens, share) or default_pipeline(self.record_bytes)
            many = Pipeline(few.group_size, few.queue_depth, max(1, arena // self.record_bytes // few.group_size))
            for name, pipeline in {"by routes": few, "last layers": many}.items():
                with Engine(
                    self.checkpoint, options(tokens, self.args, memory_bytes=budget, pipeline=pipeline)
                ) as engine:
                    engine.limit_arena(arena)
                    session = engine.session(replay=replay)
                    session.prefill([1] * tokens)
                    for _ in range(DECODE_STEPS):
                        session.step(1)
                    c = session.decode_figures.counters
                    uses = c["hits"] + c["late_hits"] + c["loads"]
                    row[name] = (uses - c["loads"]) / uses
            print(f"{share:6.1%}: hit rate {row['by routes']:.3f}, with the last layers {row['last layers']:.3f}")
            rows.append(row)
        return rows


def numbers(text: str, kind: type) -> tuple[Any, ...]:
    return tuple(kind(part) for part in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shares", type=lambda t: numbers(t, float), default=SHARES)
    parser.add_argument("--tokens", type=lambda t: numbers(t, int), default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=machine.num_cpus())
    parser.add_argument("--only", type=lambda t: numbers(t, str), default=TABLES[:3])
    parser.add_argument("--trace")
    parser.add_argument("--sizes", type=lambda t: numbers(t, int), default=(1, 2, 4, 8, 16), help="G of the sweep")
    parser.add_argument("--depths", type=lambda t: numbers(t, int), default=(1, 2, 3, 4, 6), help="Q of the sweep")
    parser.add_argument("--banks", type=lambda t: numbers(t, int), default=(1, 2, 3, 4, 6, 8, 12, 16), help="B")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in TABLES]
    if unknown:
        parser.error(f"--only: expected some of {', '.join(TABLES)}, found {unknown[0]}")
    try:
        if args.child:
            child(args)
            return 0
        bench = Bench(args)
        results = {name: getattr(bench, name)() for name in TABLES if name in args.only}
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    if args.output:
        write_results(args, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

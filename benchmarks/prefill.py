"""Streamed prefill beside what it can be at best: the larger of reading and computing.

    python benchmarks/prefill.py STORE [--shares .125,.25,.5] [--tokens 8,128,256,512,640,1024,4096] [--rounds 3]
        [--threads 2] [--only ratios,schedules,sweep,handover] [--sizes G,...] [--depths Q,...] [--banks B,...]
        [--sweep-tokens N] [--trace TRACE] [-o results.json]

STORE can be made by benchmarks/synth.py and `headrace pack`. Every streamed run begins with an empty arena, in a
process of its own (one for each round of the sweep), in a memory cgroup whose limit is its budget (where one can be
made; needs root). A share is of all experts' bytes: the arena that is left while the prompt runs.

ratios     TTFT over max(T_io, T_exec). T_exec: the same prompt with everything resident, T_io: the bytes of the experts
           that it routes to over the read bandwidth (groups of the run's size, as deep as the run reads); both measured
           in the same round. Medians over rounds of each round's ratio.
schedules  on demand, after routing, early, and EStream's ablations, for a prompt of --sweep-tokens: TTFT, bubble rate.
sweep      every (G, Q, B) of --sizes, --depths and --banks that fits each share, in another order every round, each
           run over the machine's speed at the time; and what the profile (`headrace tune STORE`) or, without one, the
           default chooses.
handover   decode after a prompt (--trace: its routes; needed here): hit rate of the first steps with what the prompt's
           routes keep, and, by the simulator, with what the prompt used last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from compare_llama_cpp import write_results

from headrace import _core, machine
from headrace.commands.bench import open_replay
from headrace.commands.run import hit_rate
from headrace.engine import Engine, EngineOptions, Figures, make_plan
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline, ablation, default_pipeline
from headrace.experts.source import expert_source
from headrace.experts.traces import Replay
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
    pipelines = [Pipeline(**p) if p else None for p in asked["pipelines"]]
    deepest = max(filter(None, pipelines), key=lambda p: p.queue_depth, default=None)  # a loader thread for each read
    given = options(tokens, args, memory_bytes=asked["budget_bytes"], pipeline=deepest, max_rows=tokens)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, checkpoint.config.vocab_size, tokens).tolist()
    with Engine(checkpoint, given) as engine:
        arena_bytes = engine.prompt_arena_bytes(tokens)
        runs = []
        for pipeline in pipelines:
            engine.options = replace(engine.options, pipeline=pipeline)
            engine.limit_arena(1)  # one expert: forgets the others
            engine.limit_arena(arena_bytes)
            session = engine.session()
            session.prefill(ids)
            session.close()
            figures = session.prefill_figures
            c = figures.counters
            runs.append(
                {
                    "ttft_s": figures.seconds,
                    "bubble_rate": figures.bubble_rate,
                    "experts": c["hits"] + c["late_hits"] + c["loads"],
                    "arena_share": engine.experts.arena_bytes / expert_source(checkpoint).total_bytes(),
                    "pipeline": asdict(engine.pipeline(tokens)),
                    **figures.as_dict(),
                }
            )
    print(json.dumps({"runs": runs, "peak_rss_bytes": machine.peak_rss_bytes()}))


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

    def streamed(self, tokens: int, share: float, pipelines: Sequence[Pipeline | None]) -> list[dict[str, Any]]:
        """The prompt by each of these (None: by what the engine takes) in one process."""
        budget = self.budget_bytes(tokens, share)
        asked = {"tokens": tokens, "budget_bytes": budget, "pipelines": [asdict(p) if p else None for p in pipelines]}
        ran = self.run_child(asked, budget)
        if ran["peak_rss_bytes"] > budget:
            raise HeadraceError(f"a run took {ran['peak_rss_bytes']} bytes of {budget}")
        runs: list[dict[str, Any]] = ran["runs"]
        return runs

    def resident_s(self, tokens: int) -> float:
        """The prompt with everything in memory."""
        if self.resident is None:
            longest = max(*self.args.tokens, self.args.sweep_tokens)
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
                for _ in range(self.args.rounds):
                    (run,) = self.streamed(tokens, share, [self.configured(tokens, share)])
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

    def pipeline(self, tokens: int, share: float) -> Pipeline:
        return self.configured(tokens, share) or default_pipeline(self.record_bytes)

    def schedules(self) -> list[dict[str, Any]]:
        share, tokens = self.args.shares[len(self.args.shares) // 2], self.args.sweep_tokens
        base = self.pipeline(tokens, share)
        size, depth, banks = base.group_size, base.queue_depth, base.banks
        kinds = {name: Pipeline(size, depth, banks, name) for name in ("on-demand", "after-routing", "early")}
        most = max(layer.num_experts for layer in self.checkpoint.experts)
        kinds |= {name: ablation(name, most, base) for name in ("naive", "whole-layers")}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
        resident = []
        for _ in range(self.args.rounds):
            for name, pipeline in kinds.items():
                runs[name] += self.streamed(tokens, share, [pipeline])
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
            configured = self.pipeline(self.args.sweep_tokens, share)
            points = [p for p in points if p != configured] + [configured]
            seconds = np.zeros((self.args.rounds, len(points)))
            rng = np.random.default_rng(0)
            for of_round in seconds:
                order = rng.permutation(len(points))
                runs = self.streamed(self.args.sweep_tokens, share, [points[i] for i in order])
                of_round[order] = without_drift(np.array([run["ttft_s"] for run in runs]))
            times = np.median(seconds, axis=0).tolist()
            best = sorted(range(len(points)), key=lambda i: times[i])[:5]
            mean = sum(times[i] for i in best) / len(best)
            rows.append(
                {
                    "share": share,
                    "points": [
                        {**asdict(p), "ttft_s": t, "rounds": seconds[:, i].tolist()}
                        for i, (p, t) in enumerate(zip(points, times, strict=True))
                    ],
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

    def lru_hit_rates(self, replay: Replay, tokens: int, arena_bytes: int) -> list[float]:
        """Of each step after a prompt that leaves in memory what it used last."""
        shape = shape_of(self.checkpoint)
        simulator = _core.Simulator(
            list(shape.num_experts), list(shape.record_bytes), arena_bytes, "lru", window=2**32 - 1
        )
        counts = []
        for first, n in [(0, tokens), *((tokens + i, 1) for i in range(DECODE_STEPS))]:
            ids = np.ascontiguousarray(replay.rows(first, n).transpose(1, 0, 2))
            ids[:-1, -1] = -1  # rows without wanted logits do not go through the last layer's experts
            simulator.feed(ids)
            simulator.end_pass()
            counts.append(simulator.counters())
        return hit_rates(counts)

    def handover(self) -> list[dict[str, Any]]:
        if not self.args.trace:
            raise HeadraceError("handover: give a trace of the model's shape with --trace")
        tokens = 192
        replay = open_replay(self.checkpoint, Path(self.args.trace), tokens + DECODE_STEPS)
        rows = []
        for share in self.args.shares:
            budget = self.budget_bytes(tokens, share)
            arena = int(share * self.source.total_bytes())
            given = options(tokens, self.args, memory_bytes=budget, pipeline=self.pipeline(tokens, share))
            with Engine(self.checkpoint, given) as engine:
                engine.limit_arena(arena)
                session = engine.session(replay=replay)
                session.prefill([1] * tokens)
                counts = [engine.counters()]
                for _ in range(DECODE_STEPS):
                    session.step(1)
                    counts.append(engine.counters())
            by_routes, last = hit_rates(counts), self.lru_hit_rates(replay, tokens, arena)
            row: dict[str, Any] = {"share": share, "by_routes": by_routes, "used_last": last}
            rows.append(row)
            for n in (1, 4, 16, DECODE_STEPS):
                mean = [sum(rates[:n]) / n for rates in (by_routes, last)]
                print(
                    f"{share:6.1%}, {n} steps: hit rate {mean[0]:.3f}, with what was used last {mean[1]:.3f}",
                    flush=True,
                )
        return rows


def hit_rates(counts: list[dict[str, int]]) -> list[float]:
    """Of the steps between one of these counters and the next."""
    rates = []
    for before, after in pairwise(counts):
        step = Figures()
        step.add(1, 0.0, before, after)
        rates.append(hit_rate(step) or 0.0)
    return rates


def without_drift(seconds: np.ndarray) -> np.ndarray:
    """Of runs in an order that is random: each over the median of the 15 around it, which the machine's speed at the
    time is all that it shares with; in seconds of the median run."""
    around = [np.median(seconds[max(0, i - 7) : i + 8]) for i in range(len(seconds))]
    return seconds / around * np.median(seconds)


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
    parser.add_argument("--sweep-tokens", type=int, default=SWEEP_TOKENS, help="of the prompt of schedules and sweep")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in TABLES]
    if unknown:
        parser.error(f"--only: expected some of {', '.join(TABLES)}, found {unknown[0]}")
    if args.rounds < 1 or not all(0 < share <= 1 for share in args.shares):
        parser.error("expected a round or more, and shares of the experts above 0 and up to 1")
    try:
        if args.child:
            child(args)
            return 0
        bench = Bench(args)
        results: dict[str, Any] = {}
        for name in TABLES:
            if name in args.only:
                results[name] = getattr(bench, name)()
                if args.output:
                    write_results(args, **results)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

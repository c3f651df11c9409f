"""A resident model beside what the machine can do: decode, prefill, and passes of 1 to 16 tokens.

    python benchmarks/whole_model.py MODEL --micro PATH [--trace TRACE] [--threads 2] [--rounds 7]
        [--only decode,prefill,passes] [-o results.json]

MODEL can be made by benchmarks/synth.py. PATH is the `micro` that this builds:

    cmake -S . -B build-bench -DHEADRACE_BENCHMARKS=ON && cmake --build build-bench --target micro

It measures the references (streaming read, int8 and float products) right before each pass, so that a slow minute of
the machine slows both. With --trace, routes come from a recorded trace and passes of n tokens hit the experts that n
consecutive tokens of it hit.

decode   one token at contexts 64, 512 and 4,000: tokens/s, and the bytes of all weights that it needs over the time,
         as a share of the read ("of stream"), without and with the keys and values that it reads; and the attention
         op alone, by its keys and values.
prefill  128, 512, 2048 and 4096 tokens: tokens/s, multiply-accumulates as a share of the int8 (float) products.
passes   n tokens at context 64, the expert op with the deduplicating and with the per-slot kernel: bytes of the
         distinct experts over the op's time (of stream); the whole pass over the time that reading the dense weights
         and the distinct experts takes at the read's rate ("over bytes"); per slot also t(n) / (n t(1)).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from compare_llama_cpp import write_results

from headrace.commands.bench import open_replay
from headrace.engine import Engine, EngineOptions, Session
from headrace.errors import HeadraceError
from headrace.experts.traces import Replay
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import Checkpoint, DType
from headrace.models.families import build_graph

PREFILLS = (128, 512, 2048, 4096)
PASSES = (1, 2, 3, 4, 6, 8, 12, 16)
DECODE_CONTEXTS, PASS_CONTEXT = (64, 512, 4000), 64
TABLES = ("decode", "prefill", "passes")
QUANTIZED = (DType.Q4_0, DType.Q8_0)


class Reference:
    """`micro reference`, which measures whenever it is asked."""

    def __init__(self, micro: str, threads: int):
        self._process = subprocess.Popen(
            [micro, "reference", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> dict[str, float]:
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise ValueError(f"{self._process.args[0]}: printed {line!r}, expected the references; is it `micro`?")
        return json.loads(line)

    def measure(self) -> dict[str, float]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()


class Weights:
    """Bytes and multiply-accumulates of a model, from its files' headers."""

    def __init__(self, checkpoint: Checkpoint, record_bytes: list[int]):
        config = checkpoint.config
        graph = build_graph(checkpoint, route_capacity=config.num_experts_per_tok)
        linears = [checkpoint.tensors[node.weights[0].name] for node in graph.nodes if node.op == "linear"]
        self.dense_bytes = sum(t.nbytes for t in linears)
        self.record_bytes = record_bytes
        self.is_quantized = linears[0].dtype in QUANTIZED
        head_macs = config.vocab_size * config.hidden_size  # of one row a pass
        dense_macs = sum(int(np.prod(t.shape)) for t in linears) - head_macs
        expert_macs = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
        self.macs_per_token = dense_macs + expert_macs * config.num_hidden_layers

    def union_bytes(self, routes: np.ndarray) -> int:
        """routes: [layers, n, top_k]. Bytes of the distinct experts."""
        return sum(len(np.unique(layer)) * size for layer, size in zip(routes, self.record_bytes, strict=True))


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.checkpoint = open_checkpoint(Path(args.model))
        config = self.checkpoint.config
        self.replay: Replay | None = None
        if args.trace:
            self.replay = open_replay(self.checkpoint, Path(args.trace), config.max_position_embeddings)
        self.engine = Engine(
            self.checkpoint,
            EngineOptions(
                context=min(config.max_position_embeddings, max(PREFILLS)),
                num_threads=args.threads,
                prompt_rows=max(PREFILLS),
                max_out_rows=max(PASSES),
            ),
        )
        self.reference = Reference(args.micro, args.threads)
        experts = self.engine.experts
        self.weights = Weights(
            self.checkpoint, [self.engine.record_bytes(i) for i in range(len(self.checkpoint.experts))]
        )
        self.rng = np.random.default_rng(0)
        self._fill_arena()
        print(f"{self.checkpoint.name}: {experts.num_slots} slots, {self.engine.num_threads} threads", file=sys.stderr)

    def _fill_arena(self) -> None:
        """Own routes of random tokens touch every expert; a replayed trace may not."""
        session = self.engine.session()
        for _ in range(8):
            session.rollback(0)
            session.prefill(self.ids(self.engine.max_rows))
        session.close()

    def ids(self, n: int) -> list[int]:
        return self.rng.integers(0, self.checkpoint.config.vocab_size, n).tolist()

    def timed(self, run: Any) -> tuple[float, dict[str, float], dict[str, float]]:
        """Seconds, seconds by op, and the references measured right before."""
        reference = self.reference.measure()
        before, start = self.engine._executor.op_seconds, time.perf_counter()
        run()
        seconds, after = time.perf_counter() - start, self.engine._executor.op_seconds
        return seconds, {op: after[op] - before[op] for op in after}, reference

    def routes(self, session: Session, n: int) -> np.ndarray:
        assert self.replay is not None
        return self.replay.rows(session.length, n)

    # ---- the three tables

    def decode(self) -> list[dict]:
        config = self.checkpoint.config
        weights = self.weights.dense_bytes + config.num_experts_per_tok * sum(self.weights.record_bytes)
        position_bytes = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers  # F16
        rows = []
        for context in DECODE_CONTEXTS:
            session = self.engine.session(replay=self.replay)
            session.prefill(self.ids(context))
            kv = (context + 1) * position_bytes
            cells = []
            for _ in range(8 * self.args.rounds):
                s, ops, reference = self.timed(lambda session=session: session.step(self.ids(1)[0]))
                session.rollback(context)
                stream = reference["stream_bytes_per_s"]
                shares = weights / s / stream, (weights + kv) / s / stream, kv / ops["attention"] / stream
                cells.append((s, ops, *shares))
            session.close()
            by_op = [cell[1] for cell in cells]
            rows.append(
                {
                    "context": context,
                    "tps": 1 / median(cell[0] for cell in cells),
                    "weight_bytes": weights,
                    "kv_bytes": kv,
                    "of_stream": median(cell[2] for cell in cells),
                    "of_stream_with_kv": median(cell[3] for cell in cells),
                    "attention_of_stream": median(cell[4] for cell in cells),
                    "op_ms": op_ms(by_op),
                    "products_share": products_share(by_op),
                }
            )
            row = rows[-1]
            print(
                f"decode at context {context}: {row['tps']:.1f} tokens/s, {row['of_stream']:.2f} of stream "
                f"({row['of_stream_with_kv']:.2f} with keys and values; attention alone "
                f"{row['attention_of_stream']:.2f}), products {row['products_share']:.1%} of a pass"
            )
        return rows

    def prefill(self) -> list[dict]:
        rows = []
        peak = "int8_macs_per_s" if self.weights.is_quantized else "float_macs_per_s"
        for n in PREFILLS:
            session = self.engine.session(replay=self.replay)
            seconds, share, by_op = [], [], []
            for _ in range(max(3, self.args.rounds * 512 // max(n, 512))):
                session.rollback(0)
                ids = self.ids(n)
                s, ops, reference = self.timed(lambda ids=ids, session=session: session.prefill(ids))
                seconds.append(s)
                share.append(n * self.weights.macs_per_token / s / reference[peak])
                by_op.append(ops)
            session.close()
            rows.append(
                {
                    "tokens": n,
                    "tps": n / median(seconds),
                    "of_peak": median(share),
                    "op_ms": op_ms(by_op),
                    "products_share": products_share(by_op),
                }
            )
            print(
                f"prefill {n}: {rows[-1]['tps']:.1f} tokens/s, {rows[-1]['of_peak']:.2f} of peak, "
                f"products {rows[-1]['products_share']:.1%} of a pass"
            )
        return rows

    def passes(self) -> list[dict]:
        """Each round runs every n with both kernels, over windows of the trace that move from round to round."""
        cells: dict[tuple[int, bool], list[dict[str, float]]] = {}
        for r in range(4 * self.args.rounds):
            session = self.engine.session(replay=self.replay)
            context = PASS_CONTEXT + 17 * r % 512
            session.prefill(self.ids(context))
            for n in PASSES:
                for per_slot in (False, True):
                    session.per_slot = per_slot
                    union = self.weights.union_bytes(self.routes(session, n))
                    tokens = self.ids(n)
                    s, ops, reference = self.timed(lambda tokens=tokens, session=session: session.verify(tokens))
                    session.rollback(context)
                    stream = reference["stream_bytes_per_s"]
                    cells.setdefault((n, per_slot), []).append(
                        {
                            "ms": 1e3 * s,
                            "experts_ms": 1e3 * ops["experts"],
                            "union_bytes": union,
                            "experts_of_stream": union / ops["experts"] / stream,
                            "over_bytes": s * stream / (self.weights.dense_bytes + union),
                            "products_share": (ops["experts"] + ops["linear"]) / sum(ops.values()),
                        }
                    )
            session.close()
        rows = []
        for (n, per_slot), runs in cells.items():
            row = {key: median(run[key] for run in runs) for key in runs[0]}
            single = median(run["experts_ms"] for run in cells[1, True])
            rows.append({"n": n, "kernel": "per-slot" if per_slot else "dedup", **row})
            if per_slot:
                rows[-1]["of_n_singles"] = row["experts_ms"] / (n * single)
            print(
                f"n={n:2} {rows[-1]['kernel']:8} pass {row['ms']:6.1f} ms, experts {row['experts_ms']:6.1f} ms, "
                f"{row['experts_of_stream']:.2f} of stream, whole pass {row['over_bytes']:.2f} over bytes, products "
                f"{row['products_share']:.1%}" + (f", t(n)/(n t(1)) {rows[-1]['of_n_singles']:.2f}" if per_slot else "")
            )
        return rows


def op_ms(by_op: list[dict[str, float]]) -> dict[str, float]:
    medians = {op: 1e3 * median(ops[op] for ops in by_op) for op in by_op[0]}
    return {op: round(ms, 3) for op, ms in medians.items() if ms >= 0.001}


def products_share(by_op: list[dict[str, float]]) -> float:
    return median((ops["experts"] + ops["linear"]) / sum(ops.values()) for ops in by_op)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--micro", required=True)
    ap.add_argument("--trace")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--only", default=",".join(TABLES))
    ap.add_argument("-o", "--output", type=Path)
    args = ap.parse_args()
    tables = args.only.split(",")
    if unknown := [name for name in tables if name not in TABLES]:
        ap.error(f"--only {unknown[0]}: expected some of {', '.join(TABLES)}")
    if "passes" in tables and not args.trace:
        ap.error("passes need --trace, or leave them out with --only")
    try:
        bench = Bench(args)
    except (HeadraceError, OSError, ValueError) as error:
        sys.exit(f"whole_model: {error}")
    results = {name: getattr(bench, name)() for name in tables}
    references = [bench.reference.measure() for _ in range(5)]
    if args.output:
        reference = {k: median(r[k] for r in references) for k in references[0] if k != "isa"}
        write_results(args, reference=reference, isa=references[0]["isa"], **results)


if __name__ == "__main__":
    main()

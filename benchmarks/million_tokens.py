"""How long `headrace simulate` takes for a trace of a million tokens, and how much memory.

    python benchmarks/million_tokens.py TRACE [--tokens 1000000] [--policies lru,lfu,belady-8] [--residency .25]
        [--jsonl] [--keep DIRECTORY] [-t 2] [SETTING...]

It makes a trace of so many tokens of TRACE's shape out of runs of 32 to 256 of its tokens drawn at random, as a
recorded trace or with --jsonl as JSONL, simulates all policies at once and each alone, and prints seconds and the peak
resident memory of the process. SETTINGs, behind --, go to `simulate` as they are (-- --window 4). With --keep the made
trace stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.experts.simulate import read_shape
from headrace.experts.trace_file import TraceWriter
from headrace.experts.traces import ModelIdentity, Trace, open_trace

RUN_TOKENS = (32, 256)
SEED = 0


def runs(trace: Trace, num_tokens: int) -> Iterator[np.ndarray]:
    """ids [tokens, layers, top_k] of runs of the trace, num_tokens together."""
    ids = np.concatenate([block.ids for block in trace.blocks(values=False)])
    rng = np.random.default_rng(SEED)
    while num_tokens:
        length = min(int(rng.integers(*RUN_TOKENS, endpoint=True)), len(ids), num_tokens)
        first = int(rng.integers(0, len(ids) - length, endpoint=True))
        yield ids[first : first + length]
        num_tokens -= length


def make(trace: Trace, num_tokens: int, jsonl: bool, path: Path) -> None:
    if jsonl:
        with open(path, "w") as file:
            for ids in runs(trace, num_tokens):
                file.writelines(json.dumps({"layers": layers}) + "\n" for layers in ids.tolist())
        return
    model = ModelIdentity("million_tokens", "made", "0")
    writer = TraceWriter(path, model, trace.num_layers, read_shape(trace).num_experts[0], trace.top_k)
    with writer:
        for ids in runs(trace, num_tokens):
            values = np.zeros((trace.num_layers, len(ids), trace.top_k), np.float32)
            writer.add([0] * len(ids), ids.transpose(1, 0, 2), values, values)


def measure(path: Path, policies: str, args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "headrace", "simulate", str(path), "--policies", policies, "--json"]
    command += ["--residency", args.residency, "-t", str(args.threads), *args.settings]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        sys.exit(f"{' '.join(command)}: failed")
    hits = ", ".join(f"{r['policy']} {r['hit_rate']:.1%}" for r in json.loads(out)["rows"])
    print(
        f"{policies}: {seconds:.1f} s ({usage.ru_utime + usage.ru_stime:.1f} s of processors), "
        f"peak {usage.ru_maxrss / 1024:.0f} MiB; hit rates {hits}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--policies", default="lru,lfu,belady-8")
    parser.add_argument("--residency", default=".25")
    parser.add_argument("--jsonl", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = (args.keep or Path(directory)) / f"{args.tokens}.{'jsonl' if args.jsonl else 'trace'}"
        if not path.exists():
            make(open_trace(args.trace), args.tokens, args.jsonl, path)
        print(f"{path}: {args.tokens} tokens, {path.stat().st_size / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        names = args.policies.split(",")
        for policies in (args.policies, *(names if len(names) > 1 else [])):
            measure(path, policies, args)


if __name__ == "__main__":
    main()

"""The README's table: headrace beside llama.cpp, on one model, alternating in one run.

    python benchmarks/compare_llama_cpp.py --llama-bench PATH MODEL.gguf [STORE]
        [--memory 1.5GiB] [--prompt 512] [--gen 32] [--threads 2] [--rounds 3] [-o results.json]

Rows: resident (headrace, llama.cpp) and, where STORE is given, inside a memory cgroup of --memory (headrace in place
and packed; llama.cpp as it comes, and with mmap and no repacking). Each round runs every row once, in turn; medians
and ratios are printed. Both decode after a prompt of --prompt tokens; --gen 0 leaves decoding out. headrace runs
three times a round in one process and reports the median, so that a resident arena is filled. llama.cpp's capped rows
begin with an empty page cache: pages that another cgroup has read would cost it nothing.

In each round the disk is measured too: O_DIRECT reads of the store's expert file by four threads, one record each at
random. The disk-bound decode rate is that bandwidth over the bytes that a token reads.

MODEL.gguf and STORE can be made by benchmarks/synth.py and `headrace pack`. Needs root, for cgroups and the cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.formats import open_checkpoint
from headrace.sizes import parse_size

HERE = Path(__file__).parent
READ_SECONDS = 1.5
DISK_THREADS = 4
LLAMA_SECONDS = 240  # capped, it may neither finish nor be killed


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model", help="GGUF")
    ap.add_argument("store", nargs="?", help="the same, packed: adds the rows in a memory cgroup")
    ap.add_argument("--llama-bench", required=True)
    ap.add_argument("--memory", default="1.5GiB")
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=32)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("-o", "--output", type=Path)
    args = ap.parse_args()
    limit_bytes = parse_size(args.memory)

    rows = {
        "headrace resident": lambda: headrace(args, args.model, None),
        "llama.cpp resident": lambda: llama(args, [], None),
    }
    capped_rows = {
        "headrace in place, capped": lambda: headrace(args, args.model, limit_bytes),
        "headrace packed, capped": lambda: headrace(args, args.store, limit_bytes),
        "llama.cpp, capped": lambda: llama(args, [], limit_bytes),
        "llama.cpp mmap, capped": lambda: llama(args, ["-lm", "mmap", "--repack", "0"], limit_bytes),
    }
    if args.store:
        rows |= capped_rows
    results: dict[str, list[dict]] = {name: [] for name in rows}
    disk_bytes_per_s = []
    for i in range(args.rounds):
        if args.store:
            disk_bytes_per_s.append(measure_disk(args.store))
            print(f"round {i}: disk {disk_bytes_per_s[-1] / 1e9:.2f} GB/s", file=sys.stderr)
        for name, run in rows.items():
            if any(r.get("failed") for r in results[name]):
                continue  # killed once is enough
            results[name].append(run())
            print(f"round {i}: {name}: {shown(results[name][-1])}", file=sys.stderr)

    table = summary(results, median(disk_bytes_per_s) if args.store else None)
    for line in table:
        print(line)
    if args.output:
        write_results(args, disk_bytes_per_s=disk_bytes_per_s, results=results)


def capped(limit_bytes: int | None) -> list[str]:
    if limit_bytes is None:
        return []
    return [sys.executable, str(HERE / "memcap.py"), str(limit_bytes)]


def headrace(args: argparse.Namespace, model: str, limit_bytes: int | None) -> dict:
    command = [sys.executable, "-m", "headrace", "bench", model, "--json", "--repeat", "3"]
    command += ["--prompt", str(args.prompt), "--gen", str(args.gen), "-t", str(args.threads)]
    if limit_bytes is not None:
        command += ["--memory", str(limit_bytes)]
    done = subprocess.run([*capped(limit_bytes), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()[-200:]}"}
    report = json.loads(done.stdout)
    report.pop("runs")
    return report


def llama(args: argparse.Namespace, options: list[str], limit_bytes: int | None) -> dict:
    tps = []
    tests = [["-p", args.prompt, "-n", 0]]
    if args.gen:
        tests.append(["-p", 0, "-n", args.gen, "-d", args.prompt])
    for test in tests:
        if limit_bytes is not None:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("1")
        command = [args.llama_bench, "-m", args.model, "-t", args.threads, "-o", "json", "-r", 1, *test, *options]
        command = ["timeout", str(LLAMA_SECONDS), *map(str, command)]
        done = subprocess.run([*capped(limit_bytes), *command], capture_output=True, text=True, check=False)
        if done.returncode == 124:
            return {"failed": f"no result in {LLAMA_SECONDS} s"}
        if done.returncode:
            return {"failed": f"exit {done.returncode}"}
        tps.append(json.loads(done.stdout)[0]["avg_ts"])
    return {"prefill_tps": tps[0], "decode_tps": tps[1] if args.gen else 0.0}


def measure_disk(store: str) -> float:
    """Bytes per second of whole-record O_DIRECT reads by four threads, each expert of the store at most once."""
    checkpoint = open_checkpoint(Path(store))
    layers = checkpoint.experts
    record_bytes = int(layers[0].offset[1] - layers[0].offset[0])
    path = checkpoint.files[int(layers[0].file[0])]
    offsets = np.concatenate([e.offset for e in layers]).astype(np.int64)
    np.random.default_rng(int(time.time())).shuffle(offsets)
    end = time.perf_counter() + READ_SECONDS
    done = [0] * DISK_THREADS

    def read(k: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, record_bytes)
        for offset in offsets[k::DISK_THREADS]:
            if time.perf_counter() >= end:
                break
            done[k] += os.preadv(fd, [buffer], int(offset))
        os.close(fd)

    start = time.perf_counter()
    threads = [threading.Thread(target=read, args=(k,)) for k in range(DISK_THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(done) / (time.perf_counter() - start)


def shown(result: dict) -> str:
    if result.get("failed"):
        return result["failed"]
    return f"prefill {result['prefill_tps']:.1f}, decode {result['decode_tps']:.2f} tokens/s"


def summary(results: dict[str, list[dict]], disk_bytes_per_s: float | None) -> list[str]:
    lines = [] if disk_bytes_per_s is None else [f"disk {disk_bytes_per_s / 1e9:.2f} GB/s (median of the rounds)"]
    lines += [
        "| row | prefill tokens/s | decode tokens/s | read a token | peak memory | of disk-bound |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        failed = next((r["failed"] for r in runs if r.get("failed")), None)
        if failed:
            lines.append(f"| {name} | failed ({failed.split(':')[0]}) | | | | |")
            continue
        prefill = median(r["prefill_tps"] for r in runs)
        decode = median(r["decode_tps"] for r in runs)
        read = peak = bound = ""
        if "decode" in runs[0]:
            token_bytes = median(r["decode"]["expert_bytes_read"] / max(1, r["generated_tokens"]) for r in runs)
            read = f"{token_bytes / 1e6:.0f} MB"
            peak = f"{max(r['peak_rss_bytes'] for r in runs) / 2**20:.0f} MiB"
            if token_bytes and disk_bytes_per_s:
                bound = f"{decode / (disk_bytes_per_s / token_bytes):.2f}"
        lines.append(f"| {name} | {prefill:.1f} | {decode:.2f} | {read} | {peak} | {bound} |")
    ours, theirs = results["headrace resident"], results["llama.cpp resident"]
    for key in ("prefill_tps", "decode_tps"):
        ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=False) if b.get(key)]
        if ratios:
            lines.append(f"resident, headrace / llama.cpp, {key.split('_')[0]}: {median(ratios):.2f}")
    return lines


def write_results(args: argparse.Namespace, **values: Any) -> None:
    """To args.output, with what they were measured from: names of files, not where they lay."""
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine(),
        "arguments": {k: Path(str(v)).name for k, v in vars(args).items() if v is not None and k != "output"},
    }
    args.output.write_text(json.dumps(header | values, indent=1) + "\n")


def git_commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text()
    model = next((x for x in info.splitlines() if x.startswith("model name")), ": unknown")
    return {
        "cpu": model.split(":", 1)[1].strip(),
        "num_cpus": str(os.cpu_count()),
        "kernel": platform.release(),
    }


if __name__ == "__main__":
    main()

"""Counts the kernels' instructions under callgrind and compares them with the recorded ones.

    python benchmarks/kernel_counts.py             # fails if a case takes over 3 % more than recorded
    python benchmarks/kernel_counts.py --record    # writes what this compiler gives into kernel_counts.json

Times mean nothing on a shared machine; counts are the same in every run. They depend on the compiler, so the table has
a part for each major version of one. The cases are in kernel_counts.cc, the instruction sets are those that valgrind
knows. Exit status: 0 within the bounds, 1 grown or failed, 77 cannot be compared here (no valgrind, a processor without
AVX2, or a compiler without a part).
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".json")
ISAS = ("avx2", "portable") if platform.machine() == "x86_64" else ("portable",)
TOLERANCE = 0.03  # what a minor version of a compiler or of the C library may change
CANNOT = 77
NO_SUCH_ISA = 2  # kernel_counts.cc

Counts = dict[str, dict[str, int]]  # instruction set -> case -> instructions


class NotHere(Exception):
    """What keeps this machine from comparing."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the counts instead of comparing them")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpp-plain", help="where to build (Release)")
    args = parser.parse_args(argv)

    try:
        return check(args.build, args.table, args.record)
    except NotHere as e:
        print(f"kernel counts: not compared: {e}")
        return CANNOT


def check(build: Path, table_path: Path, record: bool) -> int:
    if shutil.which("valgrind") is None:
        raise NotHere("this machine has no valgrind (Debian: valgrind)")
    key, counts = measure(build)
    table: dict[str, Counts] = json.loads(table_path.read_text()) if table_path.exists() else {}
    if record:
        table[key] = counts
        table_path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        print(f"kernel counts: recorded for {key} in {table_path}")
        return 0
    if key not in table:
        raise NotHere(f"this is {key}, recorded are {', '.join(table)}; --record adds it")
    return report(table[key], counts)


def measure(build: Path) -> tuple[str, Counts]:
    """Builds the program and counts. The first is the table's key: machine and compiler."""
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DHEADRACE_BENCHMARKS=ON"], **quiet)
    subprocess.run(["cmake", "--build", build, "--target", "kernel_counts"], **quiet)
    compiler, counts = "", {}
    for isa in ISAS:
        compiler, counts[isa] = count(build / "kernel_counts", isa)
    return f"{platform.machine()} {compiler}", counts


def count(program: Path, isa: str) -> tuple[str, dict[str, int]]:
    """Compiler and instructions of each case. Callgrind counts inside counted() and writes a part when it returns."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "part"
        options = ["--toggle-collect=counted", "--dump-after=counted", f"--callgrind-out-file={out}"]
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", *options, program, isa], capture_output=True, text=True, check=False
        )
        if done.returncode == NO_SUCH_ISA:
            raise NotHere(f"valgrind runs no {isa} on this processor")
        if done.returncode != 0:
            raise SystemExit(f"kernel counts: {program} {isa} under valgrind: exit {done.returncode}: {done.stderr}")
        compiler, *names = done.stdout.splitlines()
        return compiler, {name: instructions(Path(f"{out}.{i}")) for i, name in enumerate(names, 1)}


def instructions(part: Path) -> int:
    for line in part.read_text().splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise SystemExit(f"kernel counts: {part}: no totals")


def report(recorded: Counts, found: Counts) -> int:
    record = "python benchmarks/kernel_counts.py --record"
    grown = shrunk = cases = 0
    for isa in recorded.keys() | found.keys():
        was, now = recorded.get(isa, {}), found.get(isa, {})
        if was.keys() != now.keys():
            names = ", ".join(sorted(was.keys() ^ now.keys()))
            print(f"kernel counts: {isa}: recorded or counted, but not both: {names}; record them with `{record}`")
            return 1
        for name, before in was.items():
            change = now[name] / before - 1
            cases += 1
            grown += change > TOLERANCE
            shrunk += change < -TOLERANCE
            if abs(change) > TOLERANCE:
                print(f"kernel counts: {isa} {name}: {now[name]} instructions, recorded {before} ({change:+.1%})")
    if grown:
        print(f"kernel counts: {grown} of {cases} cases grew by over {TOLERANCE:.0%}; if that is meant, `{record}`")
    elif shrunk:
        print(f"kernel counts: {shrunk} of {cases} cases shrank by over {TOLERANCE:.0%}: keep that with `{record}`")
    else:
        print(f"kernel counts: {cases} cases within {TOLERANCE:.0%} of what is recorded")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a command alone in a memory cgroup of its own (v1 or v2; needs root). The page cache counts too.

    python benchmarks/memcap.py BYTES COMMAND [ARGUMENT ...]

The exit status is the command's; 3 if no cgroup can be made. The peak goes to stderr.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NO_CGROUP = 3


def make_group(limit_bytes: int) -> tuple[Path, str]:
    """The group's directory and the name of its peak file. OSError if it cannot be made."""
    v2 = ROOT / "cgroup.controllers"
    if v2.exists() and "memory" in v2.read_text().split():
        group, limits, peak = ROOT, {"memory.max": limit_bytes, "memory.swap.max": 0}, "memory.peak"
    else:
        group, limits = ROOT / "memory", {"memory.limit_in_bytes": limit_bytes}
        peak = "memory.max_usage_in_bytes"
    group = group / f"headrace-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in limits.items():
            if (group / name).exists():
                (group / name).write_text(str(value))
            elif value:
                raise FileNotFoundError(f"{group / name} does not exist")
    except OSError:
        group.rmdir()
        raise
    return group, peak


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    limit_bytes, command = int(sys.argv[1]), sys.argv[2:]
    try:
        group, peak = make_group(limit_bytes)
    except OSError as error:
        print(f"memcap: no memory cgroup can be made here: {error}", file=sys.stderr)
        return NO_CGROUP
    try:
        procs = group / "cgroup.procs"
        done = subprocess.run(command, preexec_fn=lambda: procs.write_text(str(os.getpid())), check=False)
        peak_bytes = (group / peak).read_text().strip() if (group / peak).exists() else "unknown"
        print(f"memcap: peak {peak_bytes} of {limit_bytes} bytes", file=sys.stderr)
        return done.returncode if done.returncode >= 0 else 128 - done.returncode
    finally:
        group.rmdir()


if __name__ == "__main__":
    sys.exit(main())

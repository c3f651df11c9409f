"""What the machine has and what this process holds, as Linux says it.

`root` is where /proc and /sys are looked for: "/" but in tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import HeadraceError

_ROOT = Path("/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Version 1 has no word for "no limit" and shows the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 60


def available_memory_bytes(root: Path = _ROOT) -> int:
    """What can be taken without swapping (MemAvailable)."""
    return _kib_field(root / "proc/meminfo", "MemAvailable")


def total_memory_bytes(root: Path = _ROOT) -> int:
    """The machine's memory (MemTotal)."""
    return _kib_field(root / "proc/meminfo", "MemTotal")


def rss_bytes(root: Path = _ROOT) -> int:
    """What this process holds in memory now."""
    path = root / "proc/self/statm"
    fields = (_text(path) or "").split()
    if len(fields) < 2 or not fields[1].isdigit():
        raise HeadraceError(f"{path}: expected the resident pages in field 2; is /proc mounted?")
    return int(fields[1]) * _PAGE_BYTES


def peak_rss_bytes(root: Path = _ROOT) -> int:
    """The most that this process ever held (VmHWM)."""
    return _kib_field(root / "proc/self/status", "VmHWM")


def num_cpus(root: Path = _ROOT) -> int:
    """The processors that this process may keep busy: its affinity and its cgroups' quotas.

    A quota of 1.5 counts as 1: threads that wait for each other lose more to throttling than they
    gain from the half.
    """
    cpus = len(os.sched_getaffinity(0))
    for directory in _cgroup_directories("cpu", root):
        quota = (_text(directory / "cpu.max") or "").split()  # version 2: "QUOTA PERIOD"
        if not quota:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota = [(_text(directory / name) or "").strip() for name in names]
        if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]) > 0:
            cpus = min(cpus, int(quota[0]) // int(quota[1]))
    return max(1, cpus)


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's model; the architecture where /proc/cpuinfo names none (most arm64)."""
    match = re.search(r"^model name\s*: (.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match else os.uname().machine


def filesystem_of(path: Path, root: Path = _ROOT) -> str:
    """The type and the source of the file system that holds `path`, as "ext4 /dev/nvme0n1p2"; its device number alone
    where the mounts do not list that."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, rest = line.partition(" - ")
        fields, filesystem = mount.split(), rest.split()
        if len(fields) > 2 and fields[2] == number and len(filesystem) > 1:
            return " ".join(map(_unescape, filesystem[:2]))
    return f"device {number}"


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """The least memory limit of the cgroups that this process is in; None for no limit."""
    limits = [_limit_bytes(directory) for directory in _cgroup_directories("memory", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_headroom_bytes(root: Path = _ROOT) -> int | None:
    """What the cgroups of this process can take beyond what they hold; None for no limit.

    Their page cache counts as free where the kernel would drop it first.
    """
    headrooms = []
    for directory in _cgroup_directories("memory", root):
        limit = _limit_bytes(directory)
        if limit is None:
            continue
        used = _number(directory / "memory.current")
        if used is None:
            used = _number(directory / "memory.usage_in_bytes") or 0
        headrooms.append(max(0, limit - max(0, used - _droppable_bytes(directory))))
    return min(headrooms, default=None)


def _limit_bytes(directory: Path) -> int | None:
    """The memory limit of one cgroup. Above memory.high the kernel throttles: it counts as one."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [_number(directory / name) for name in names]
    return min((n for n in limits if n is not None and n < _NO_LIMIT_BYTES), default=None)


def _droppable_bytes(directory: Path) -> int:
    stat = _text(directory / "memory.stat") or ""
    # Version 1 counts the cgroup without its children under the plain name.
    fields = {name: int(n) for name, n in re.findall(r"^(\w+) ([0-9]+)$", stat, re.MULTILINE)}
    return fields.get("total_inactive_file", fields.get("inactive_file", 0))


def _cgroup_directories(controller: str, root: Path) -> Iterator[Path]:
    """The cgroups of this process that `controller` can limit, innermost first, both versions."""
    paths = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        # ID PARENT DEVICE ROOT MOUNT_POINT OPTIONS… - TYPE SOURCE SUPER_OPTIONS
        mount, _, rest = line.partition(" - ")
        fields, filesystem = mount.split(), rest.split()
        if len(fields) < 5 or not filesystem or filesystem[0] not in paths:
            continue
        if filesystem[0] == "cgroup" and controller not in filesystem[-1].split(","):
            continue
        top = root / _unescape(fields[4]).lstrip("/")
        # In a container without a cgroup namespace, the mount shows only a part of what paths name.
        path = paths[filesystem[0]]
        inside = os.path.relpath(path or "/", _unescape(fields[3]))
        directory = top if inside.startswith("..") else top / inside
        while True:
            yield directory
            if directory == top:
                break
            directory = directory.parent


def _unescape(field: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _kib_field(path: Path, name: str) -> int:
    """The bytes of a line "NAME: N kB"."""
    match = re.search(rf"^{name}:\s*([0-9]+) kB$", _text(path) or "", re.MULTILINE)
    if match is None:
        raise HeadraceError(f"{path}: expected a line '{name}: N kB', found none")
    return int(match[1]) * 1024


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str | None:
    """A file's text; None where it cannot be read, which for a cgroup means no limit of its own."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None

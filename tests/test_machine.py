"""Readings of the machine, from made-up /proc and /sys trees and from the real one."""

import os
from pathlib import Path

import pytest

from headrace import machine
from headrace.errors import HeadraceError

GIB = 1 << 30
V2_MOUNT = "31 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_UNLIMITED = 9223372036854771712


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def v2(root, path, files, mounts=V2_MOUNT):
    """A unified hierarchy in which this process is in `path`."""
    write_tree(root, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounts + "\n"})
    write_tree(root / "sys/fs/cgroup", files)


def v1(root, path, files, mount_root="/"):
    """Memory and cpu hierarchies of version 1, beside an empty unified one."""
    mounts = [
        f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        f"34 31 0:31 {mount_root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "22 1 8:1 / / rw - ext4 /dev/root rw",
    ]
    write_tree(
        root,
        {
            "proc/self/cgroup": f"5:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": "\n".join(mounts),
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    write_tree(root / "sys/fs/cgroup", files)


def test_process_and_memory(tmp_path):
    write_tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:  100 kB\nMemFree:  9 kB\nMemAvailable:    2048 kB\n",
            "proc/self/statm": "5000 1234 300 1 0 400 0\n",
            "proc/self/status": "Name:\tx\nVmPeak:\t  99 kB\nVmHWM:\t    777 kB\nVmRSS:\t 5 kB\n",
        },
    )
    assert machine.available_memory_bytes(tmp_path) == 2 << 20
    assert machine.rss_bytes(tmp_path) == 1234 * os.sysconf("SC_PAGE_SIZE")
    assert machine.peak_rss_bytes(tmp_path) == 777 * 1024


@pytest.mark.parametrize("text", ["", "MemAvailable: x kB\n", "NotMemAvailable: 5 kB\n"])
def test_unreadable_proc_is_an_error(tmp_path, text):
    with pytest.raises(HeadraceError, match="proc/meminfo: expected a line 'MemAvailable: N kB'"):
        machine.available_memory_bytes(tmp_path)
    write_tree(tmp_path, {"proc/meminfo": text, "proc/self/statm": "17"})
    with pytest.raises(HeadraceError, match="MemAvailable"):
        machine.available_memory_bytes(tmp_path)
    with pytest.raises(HeadraceError, match="statm: expected the resident pages"):
        machine.rss_bytes(tmp_path)


def test_this_process_is_plausible():
    assert 1 << 20 < machine.rss_bytes() <= machine.peak_rss_bytes() + (1 << 20)
    before = machine.rss_bytes()
    block = bytearray(os.urandom(1)) * (64 << 20)
    assert machine.rss_bytes() - before > 48 << 20
    assert machine.peak_rss_bytes() >= len(block)
    assert machine.available_memory_bytes() > 0
    assert 1 <= machine.num_cpus() <= os.cpu_count()
    headroom, limit = machine.cgroup_headroom_bytes(), machine.cgroup_limit_bytes()
    assert (headroom is None) == (limit is None)
    assert headroom is None or 0 <= headroom <= limit


def test_v2_takes_the_least_of_the_hierarchy(tmp_path):
    v2(
        tmp_path,
        "/user/job",
        {
            "user/job/memory.max": "max\n",
            "user/job/memory.high": "max\n",
            "user/job/memory.current": GIB,
            "user/memory.max": 4 * GIB,
            "user/memory.current": 3 * GIB,
            "user/memory.stat": f"anon 5\nfile 9\ninactive_file {GIB // 2}\nactive_file 7\n",
            "memory.stat": "anon 5\n",
        },
    )
    assert machine.cgroup_limit_bytes(tmp_path) == 4 * GIB
    assert machine.cgroup_headroom_bytes(tmp_path) == GIB + GIB // 2
    write_tree(tmp_path / "sys/fs/cgroup/user/job", {"memory.max": 2 * GIB})
    assert machine.cgroup_limit_bytes(tmp_path) == 2 * GIB
    assert machine.cgroup_headroom_bytes(tmp_path) == GIB
    write_tree(tmp_path / "sys/fs/cgroup/user/job", {"memory.high": 3 * GIB // 2})
    assert machine.cgroup_limit_bytes(tmp_path) == 3 * GIB // 2
    assert machine.cgroup_headroom_bytes(tmp_path) == GIB // 2


def test_a_full_cgroup_has_no_headroom(tmp_path):
    v2(tmp_path, "/a", {"a/memory.max": GIB, "a/memory.current": GIB + 4096})
    assert machine.cgroup_headroom_bytes(tmp_path) == 0
    # Counters of one moment need not agree.
    write_tree(tmp_path / "sys/fs/cgroup/a", {"memory.stat": f"inactive_file {9 * GIB}\n"})
    assert machine.cgroup_headroom_bytes(tmp_path) == GIB


def test_no_limit_is_none(tmp_path):
    for root in (tmp_path / "nothing", tmp_path / "v2", tmp_path / "v1", tmp_path / "broken"):
        root.mkdir()
    v2(tmp_path / "v2", "/a", {"a/memory.max": "max\n", "a/memory.current": 5})
    unlimited = {"memory/memory.limit_in_bytes": V1_UNLIMITED, "memory/memory.usage_in_bytes": 5}
    v1(tmp_path / "v1", "/", unlimited)
    v2(tmp_path / "broken", "/a", {"a/memory.max": "12x\n"}, mounts="1 2\n\n - \n3 - cgroup2")
    for root in tmp_path.iterdir():
        assert machine.cgroup_limit_bytes(root) is None
        assert machine.cgroup_headroom_bytes(root) is None


def test_v1_takes_the_least_of_the_hierarchy(tmp_path):
    v1(
        tmp_path,
        "/docker/abc",
        {
            "memory/docker/abc/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/docker/abc/memory.usage_in_bytes": 1,
            "memory/docker/memory.limit_in_bytes": 3 * GIB,
            "memory/docker/memory.usage_in_bytes": 2 * GIB,
            "memory/docker/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
            "memory/memory.limit_in_bytes": V1_UNLIMITED,
        },
    )
    assert machine.cgroup_limit_bytes(tmp_path) == 3 * GIB
    assert machine.cgroup_headroom_bytes(tmp_path) == GIB + GIB // 4


def test_a_mount_that_shows_only_a_subtree(tmp_path):
    """A container without a cgroup namespace: /proc names the host's path, the mount its part."""
    files = {
        "memory/job/memory.limit_in_bytes": GIB,
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": GIB // 2,
    }
    v1(tmp_path, "/docker/abc/job", files, mount_root="/docker/abc")
    assert machine.cgroup_limit_bytes(tmp_path) == GIB
    elsewhere = tmp_path / "elsewhere"
    v1(elsewhere, "/other", files, mount_root="/docker/abc")
    assert machine.cgroup_limit_bytes(elsewhere) == 2 * GIB


def test_mount_points_with_blanks(tmp_path):
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/c\040group")
    v2(tmp_path, "/a", {}, mounts=mount)
    write_tree(tmp_path / "sys/fs/c group/a", {"memory.max": GIB})
    assert machine.cgroup_limit_bytes(tmp_path) == GIB


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 1),
        ("5000 100000", 1),
        ("9900000 100000", 8),
        ("-1 100000", 8),
        ("", 8),
        ("5 0", 8),
        ("x y", 8),
    ],
)
def test_cpu_quotas(tmp_path, monkeypatch, quota, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    v2(tmp_path / "v2", "/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": quota + "\n"})
    assert machine.num_cpus(tmp_path / "v2") == cpus
    quota_us, _, period_us = quota.partition(" ")
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": quota_us.replace("max", "-1"),
        "cpu,cpuacct/a/cpu.cfs_period_us": period_us,
    }
    v1(tmp_path / "v1", "/a/b", files)
    assert machine.num_cpus(tmp_path / "v1") == cpus


def test_affinity_without_cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.num_cpus(Path(tmp_path)) == 2

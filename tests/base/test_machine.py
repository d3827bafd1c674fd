"""Cores and memory that a process may use of its machine, against folders as the kernel
shows them to containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlathe.base import machine

HERE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, HERE),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, HERE),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(64 * MB)},
            64 * MB,
        ),
        (  # the tightest on the way up
            {
                "proc/self/cgroup": "0::/pods/one",
                "sys/fs/cgroup/pods/one/memory.max": str(96 * MB),
                "sys/fs/cgroup/pods/memory.max": str(80 * MB),
                "sys/fs/cgroup/other/memory.max": str(MB),
            },
            80 * MB,
        ),
        # version 1; without a namespace of its own a container sees the host's path and
        # only its own folder
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(48 * MB),
            },
            48 * MB,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(2**62)}, HERE),
    ],
)
def test_memory_is_what_the_tightest_control_group_allows(
    tmp_path: Path, files: dict[str, str], memory: int
) -> None:
    assert machine.memory_bytes(tree(tmp_path, files)) == memory


MEMINFO = "MemTotal: 900 kB\nMemFree: 50 kB\nMemAvailable:     800000 kB"
KIB = 1 << 10


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": MEMINFO}, 800000 * KIB),
        (  # no limit
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/memory.current": str(700 * MB),
            },
            800000 * KIB,
        ),
        (  # a group above has less left than the own one; its old files do not count
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/pods/one",
                "sys/fs/cgroup/pods/one/memory.max": str(96 * MB),
                "sys/fs/cgroup/pods/one/memory.current": str(6 * MB),
                "sys/fs/cgroup/pods/memory.max": str(100 * MB),
                "sys/fs/cgroup/pods/memory.current": str(90 * MB),
                "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {20 * MB}",
            },
            30 * MB,
        ),
        (  # version 1, where the files of groups below are counted in a sum
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/docker/abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(48 * MB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(40 * MB),
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\n"
                f"total_inactive_file {3 * MB}",
            },
            11 * MB,
        ),
        (  # over its limit
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": str(MB),
                "sys/fs/cgroup/memory.current": str(2 * MB),
            },
            0,
        ),
    ],
)
def test_free_memory_is_what_the_fullest_control_group_has_left(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    assert machine.free_bytes(tree(tmp_path, files)) == free


def test_where_the_kernel_says_nothing_all_memory_counts_as_free(
    tmp_path: Path,
) -> None:
    assert machine.free_bytes(tmp_path) == HERE


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "{quota} 100000"},
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "{quota}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        {
            "proc/self/cgroup": "3:cpuacct,cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "{quota}",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_threads_are_no_more_than_the_processor_time(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(
        machine, "_siblings", lambda cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
    )
    for quota, threads in (
        ("50000", 1),
        ("150000", 2),
        ("400000", 4),
        ("6400000", 4),
        ("max", 4),
        ("-1", 4),
    ):
        said = {name: text.format(quota=quota) for name, text in files.items()}
        assert machine.cores(tree(tmp_path, said)) == threads


def test_more_threads_than_processors_are_not_started(
    monkeypatch: pytest.MonkeyPatch, logged: list[str], tmp_path: Path
) -> None:
    """Hardware threads count: two cores of two threads run four."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(machine, "_siblings", lambda cpu: str(cpu // 2))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.threads(None, tmp_path) == 2
    assert machine.threads(4, tmp_path) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.threads(None, tmp_path) == 3
    assert machine.threads(4, tmp_path) == 4
    assert not logged
    assert machine.threads(9999, tmp_path) == 4
    assert logged == [
        "4 threads are started instead of 9999: this process may use 4 processors."
    ]

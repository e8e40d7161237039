"""How many CPUs this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cpus"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def usable_cpus(cgroup: Path = _CGROUP, own_group: Path = _OWN_GROUP) -> int:
    """Return the CPUs that affinity and the container's quota leave to this process, at least 1.

    A host with 64 cores says 64 even inside a container limited to one; runtimes that believe it
    start 64 threads for one CPU.

    Args:
        cgroup: Where control groups are mounted.
        own_group: The file that names this process's group below it.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quotas = [quota for group in _groups(cgroup, own_group) if (quota := _quota(group)) is not None]
    return max(1, min([count, *map(int, quotas)]))


def _groups(root: Path, own_group: Path) -> list[Path]:
    """Return the folders whose limits apply: the root and, with version 2, down to our own."""
    groups = [root]
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        if line.startswith("0::/"):
            for part in Path(line[4:]).parts:
                groups.append(groups[-1] / part)
    return groups


def _quota(group: Path) -> float | None:
    """Return a group's quota in CPUs, by version 2 or version 1 of control groups, or None."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota_us = int((group / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((group / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else None
    except (OSError, ValueError):
        return None

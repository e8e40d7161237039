"""How many CPUs this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cpus"]

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Return the CPUs that affinity and the container's quota leave to this process, at least 1.

    A host with 64 cores says 64 even inside a container limited to one; runtimes that believe it
    start 64 threads for one CPU.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    if quota is not None:
        count = min(count, max(1, int(quota)))
    return max(1, count)


def _cgroup_quota(root: Path) -> float | None:
    """Return the CPU quota in CPUs, from version 2 or version 1 control groups, or None."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else None
    except (OSError, ValueError):
        return None

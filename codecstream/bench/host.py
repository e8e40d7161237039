"""What machine this is, as far as it says; what it does not say is None."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from codecstream.cpus import usable_cpus

__all__ = ["describe_host"]

_CPU = Path("/sys/devices/system/cpu")
_RUNTIMES = ("onnxruntime", "executorch-numpy-runtime", "executorch", "torch", "numpy")


def describe_host(cpu: Path = _CPU, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the machine's description for the JSON.

    Args:
        cpu: Where Linux describes its CPUs.
        cpuinfo: Where it names them.
    """
    fields = _cpuinfo(cpuinfo)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "sve")
    return {
        "cpu": fields.get("model name") or fields.get("Hardware") or platform.processor() or None,
        "architecture": platform.machine(),
        "instructions": [flag for flag in wanted if flag in flags],
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "caches": _caches(cpu / "cpu0" / "cache"),
        "clock_mhz": _clocks(cpu / "cpu0" / "cpufreq"),
        "governor": _read(cpu / "cpu0" / "cpufreq" / "scaling_governor"),
        "memory_mb": _memory_mb(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": _packages(),
    }


def _cpuinfo(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _caches(folder: Path) -> list[str] | None:
    found = [
        f"L{level} {kind} {size}"
        for path in sorted(folder.glob("index*"))
        if (level := _read(path / "level"))
        and (kind := _read(path / "type"))
        and (size := _read(path / "size"))
    ]
    return found or None


def _clocks(folder: Path) -> dict[str, float] | None:
    found = {
        name: int(text) / 1000
        for name, file in (
            ("now", "scaling_cur_freq"),
            ("min", "cpuinfo_min_freq"),
            ("max", "cpuinfo_max_freq"),
        )
        if (text := _read(folder / file)) and text.isdigit()
    }
    return found or None


def _memory_mb() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    except (AttributeError, ValueError, OSError):
        return None


def _packages() -> dict[str, str]:
    found = {}
    for name in ("codecstream", *_RUNTIMES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None

"""What the figures were taken on: processor, memory, versions, and how fast the disk confirms."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path

__all__ = ["describe_machine"]

_PROBE_WRITES = 200


def describe_machine(data: Path) -> dict[str, str]:
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "file system": _file_system(data),
        "fdatasync of 4 KiB": f"{_fdatasync_us(data):.0f} us (median)",
        "load when started": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(data: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(place, kind) for place, kind in mounts if data.resolve().is_relative_to(place)]
    # The longest mount point wins, as it does for the kernel.
    return max(inside, key=lambda mount: len(mount[0]))[1]


def _fdatasync_us(data: Path) -> float:
    probe = data / "fdatasync.probe"
    took: list[float] = []
    with probe.open("wb", buffering=0) as file:
        for _ in range(_PROBE_WRITES):
            file.write(bytes(4096))
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - started) * 1e6)
    probe.unlink()
    return statistics.median(took)

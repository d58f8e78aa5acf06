"""What the figures were taken on: processor, memory, versions, and how fast the disk confirms."""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import time
from pathlib import Path

__all__ = ["describe_machine", "settle_machine"]

_PROBE_WRITES = 200
_TOUCHED_BYTES_MAX = 2 << 30  # bodies of a producer, and as much again in the page cache, with room to spare


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


def settle_machine() -> None:
    """Let nobody pay for what the one before has left behind, nor for memory that nobody has touched yet.

    A virtual machine may get its memory only when it is first touched, page by page, and give back what is free:
    measured, writing a file into such memory costs ten times the processor time, 2 ms per MB, and whether it does is a
    matter of luck.  Touched just before, the memory of bodies, brokers and page cache costs everyone the same.
    """
    os.sync()
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(_TOUCHED_BYTES_MAX, available // 2)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
        pass


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

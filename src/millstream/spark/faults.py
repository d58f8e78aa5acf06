"""Places where tests stop a write or a claim, because what happens just there decides between once and twice.

They are in processes that Spark has started; so the test names a directory in an environment variable, and puts a file
there that is called like the place.  Without that variable nothing is ever looked for.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, Literal, NoReturn

__all__ = ["VARIABLE", "Point", "reached"]

VARIABLE: Final = "MILLSTREAM_SPARK_FAULTS"
Point = Literal["before_stage", "after_stage", "before_publish", "after_publish", "after_claim", "before_ack"]


def reached(point: Point) -> None:
    """Does what the file of this place says, once: `raise`, or `kill` and the ids of processes to end with this one."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    file = Path(directory, point)
    try:
        action, *processes = file.read_text().split()
        file.unlink()  # whoever gets to it first
    except FileNotFoundError:
        return
    if action == "kill":
        _kill([*map(int, processes), os.getpid()])
    raise RuntimeError(f"a test wants to see what comes of an error at {point}")


def _kill(processes: list[int]) -> NoReturn:
    for process in processes:
        os.kill(process, signal.SIGKILL)
    raise AssertionError("killed")

"""The processes in which Spark runs tasks."""

from __future__ import annotations

import gc
import os
from typing import Final

from pyspark import TaskContext

__all__ = ["settle"]

_settled: Final[set[int]] = set()


def settle() -> None:
    """Spark collects garbage after every task, which looks at everything that was imported: more than 10 ms.

    What is there when a process has its first task stays there, so it need not be looked at any more.
    """
    if os.getpid() not in _settled and TaskContext.get() is not None:
        _settled.add(os.getpid())
        gc.freeze()

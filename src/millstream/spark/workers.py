"""The processes that Spark starts for Python: those of its tasks, and those that plan its queries."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from pyspark import TaskContext

__all__ = ["keep_quiet", "settle", "spare_imports"]

_settled: Final[set[int]] = set()
#: What malloc of the GNU C library calls its options.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_FREE_BYTES_KEPT: Final = 64 * 1024 * 1024
_HEAP_PIECE_MAX: Final = 32 * 1024 * 1024


def settle() -> None:
    """What a process that works for many tasks should not do again and again.  For tasks only, and once is enough."""
    if os.getpid() not in _settled and TaskContext.get() is not None:
        _settled.add(os.getpid())
        spare_imports()
        _keep_memory()


def spare_imports() -> None:
    """Have a worker of Spark collect no garbage where there is none.

    It does so after every task and every query that it has planned, and looks at everything that was imported: more
    than 10 ms each time.  What is there when it begins to work stays there, so it need not be looked at any more.
    """
    if _is_worker():
        gc.freeze()


def _keep_memory() -> None:
    """Every fetch takes megabytes and gives them back.  Given back to the system, each page costs a fault next time."""
    with suppress(AttributeError, OSError, TypeError):  # other libraries have nothing of the kind
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _FREE_BYTES_KEPT)
        library.mallopt(_MMAP_THRESHOLD, _HEAP_PIECE_MAX)


class _Tracebacks(ModuleType):
    """The module `traceback`, but for who talks to somebody that has hung up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def print_exc(*arguments: Any, **options: Any) -> None:
        if not isinstance(sys.exception(), (BrokenPipeError, ConnectionResetError)):
            traceback.print_exc(*arguments, **options)


def keep_quiet() -> None:
    """Have a worker of Spark say nothing about nothing.

    Spark hangs up on a worker as soon as it has what it wants.  One that is still saying goodbye then prints a
    traceback; there may be one for every query that is planned, and nothing is wrong.
    """
    program: Any = sys.modules["__main__"]
    if _is_worker() and hasattr(program, "traceback"):
        program.traceback = _Tracebacks("traceback")


def _is_worker() -> bool:
    """Whether this process was forked by Spark's daemon, and is used again and again."""
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == "pyspark.daemon"

"""Keeping from people what is said about nothing.

Spark hangs up on a Python worker as soon as it has what it wants.  A worker that is still saying goodbye then prints a
traceback; there may be one for every query that is planned, and nothing is wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["quiet", "without_noise"]

_STDERR: Final = 2
_BEGIN: Final = b"Traceback (most recent call last):"
_PLACE: Final = b"daemon.py"
_HUNG_UP: Final = (b"BrokenPipeError", b"ConnectionResetError")


@contextmanager
def quiet() -> Iterator[None]:
    """Processes that are started within it say what they have to say on stderr through us."""
    try:
        stderr = os.dup(_STDERR)
    except OSError:  # there is none
        yield
        return
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    threading.Thread(target=_pass_on, args=(reading, stderr), name="spark-stderr", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(stderr, _STDERR)


def _pass_on(reading: int, stderr: int) -> None:
    with open(reading, "rb") as lines, open(stderr, "wb", buffering=0) as said:
        for some in without_noise(lines):
            with suppress(OSError):  # if nobody listens, who speaks must not wait for that
                said.write(some)


def without_noise(lines: Iterable[bytes]) -> Iterator[bytes]:
    """All lines but those of a traceback of a worker on which Spark has hung up."""
    block: list[bytes] = []
    for line in lines:
        if not block and not line.startswith(_BEGIN):
            yield line
            continue
        block.append(line)
        if len(block) > 1 and not line.startswith(b" "):
            text = b"".join(block)
            block = []
            if not (line.startswith(_HUNG_UP) and _PLACE in text):
                yield text
    yield b"".join(block)

"""Ctrl-C and SIGTERM at the right moment: while waiting, not between printing a message and noting that it was.

One rule for the exit code.  Who reads without an end is ended by a signal and has done what was asked: 0.  Whatever
else a signal ends was cut short: 130 after SIGINT, 143 after SIGTERM.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

from millstream.cli.failure import ExitCode

__all__ = ["Insisted", "Interruption", "cut_short", "endless", "fall_silent", "listen"]

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: `timeout` sends a signal to the program and then to its group, so that it comes twice.
_ECHO_S: Final = 0.5


class Insisted(KeyboardInterrupt):
    """A second signal: whatever is going on has to stop."""


class _Heard:
    """The last signal that was not the echo of another."""

    number = 0
    at_s = 0.0

    @classmethod
    def is_echo(cls, number: int) -> bool:
        now_s = time.monotonic()
        echo = number == cls.number and now_s - cls.at_s < _ECHO_S
        if not echo:
            cls.number, cls.at_s = number, now_s
        return echo


def listen() -> None:
    """Have both signals end the program in the same way.  A shell's background jobs go on ignoring Ctrl-C."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if not _Heard.is_echo(number):
        raise KeyboardInterrupt


def cut_short() -> ExitCode:
    """The exit code of what a signal has ended."""
    return ExitCode.TERMINATED if _Heard.number == signal.SIGTERM else ExitCode.INTERRUPTED


def fall_silent() -> None:
    """The exit code stands: an echo that comes while the interpreter goes must not replace it."""
    if _Heard.number:
        signal.signal(_Heard.number, signal.SIG_IGN)


@contextmanager
def endless() -> Iterator[None]:
    """What is done here ends with a signal, from the first moment on, and that is no failure."""
    try:
        yield
    except Insisted:
        raise
    except KeyboardInterrupt:
        return


class Interruption:
    """Within its block, a signal ends `until_asked` and nothing else.

    Python would raise KeyboardInterrupt between any two instructions.  A second signal does just that: the first may be
    waiting for a write to a pipe that nobody reads.
    """

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False
        self._before: list[Any] = []

    def until_asked(self, items: Iterable[T]) -> Iterator[T]:
        """The items, up to the signal.  One that had just arrived when it came is not handed out."""
        iterator = iter(items)
        while True:
            self._waiting = True
            try:
                # A signal from here on raises; one before is seen by this look, and none can fall in between.
                if self.asked:
                    return
                item = next(iterator)
            except (StopIteration, KeyboardInterrupt):
                return
            finally:
                self._waiting = False
            yield item

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if _Heard.is_echo(number):
            return
        if self.asked:
            raise Insisted
        self.asked = True
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def __enter__(self) -> Interruption:
        self._before = [signal.signal(number, self._on_signal) for number in _SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, before)

"""Ctrl-C and SIGTERM at the right moment: while waiting, not between printing a message and noting that it was."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

__all__ = ["Interruption"]

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


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

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or self._waiting:
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

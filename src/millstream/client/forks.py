"""What a client must forget in a process that was forked off.

The child has copies of everything: of sockets, on which both would talk at once and take each other's answers, and of
the numbers of messages, by which the broker would take what one publishes for a repetition of the other's.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["belongs_to_one_process"]


class Forked(Protocol):
    def _forked(self) -> None:
        """This is the child, where no other thread is left: let go of what is the parent's, without telling anybody."""


_live: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def belongs_to_one_process(thing: Forked) -> None:
    """Have it told when it is the copy in a child."""
    _live.add(thing)


def _in_child() -> None:
    for thing in list(_live):
        thing._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

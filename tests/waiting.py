"""Waiting for what another thread, another process or the broker brings about, where no event can be awaited."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Final

__all__ = ["eventually", "eventually_async"]

#: Long, because a busy machine is no failure; nobody waits for it where things work.
PATIENCE_S: Final = 20.0
#: Most of it happens at once; what takes seconds is not asked for all the time, since each look may be a request.
FIRST_PAUSE_S: Final = 0.002
LONGEST_PAUSE_S: Final = 0.02
SLOWER: Final = 1.2


def eventually(holds: Callable[[], object], what: str = "", *, within_s: float = PATIENCE_S) -> None:
    """Look until it is so.  A failure says `what` was waited for, or else how that was asked, and the last answer."""
    __tracebackhide__ = True
    deadline_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s, _in_vain(holds, what, within_s, found)
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * SLOWER)


async def eventually_async(holds: Callable[[], object], what: str = "", *, within_s: float = PATIENCE_S) -> None:
    """The same in an event loop, by its time; the answer may have to be awaited."""
    __tracebackhide__ = True
    found, pause_s = None, FIRST_PAUSE_S
    try:
        async with asyncio.timeout(within_s) as limit:
            while True:
                found = holds()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * SLOWER)
    except TimeoutError:
        if not limit.expired():
            raise  # of what was asked
        raise AssertionError(_in_vain(holds, what, within_s, found)) from None


def _in_vain(holds: Callable[[], object], what: str, within_s: float, found: object) -> str:
    return f"not within {within_s:g} s: {what or _source(holds)}; the last answer was {found!r}"


def _source(holds: Callable[[], object]) -> str:
    try:
        return " ".join(inspect.getsource(holds).split())
    except (OSError, TypeError):  # made up at run time, or not written in Python
        return repr(holds)

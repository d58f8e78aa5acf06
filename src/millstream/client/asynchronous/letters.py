"""`client.dead_letters`, asynchronously; see the synchronous twin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeAlias, Unpack

from millstream.client.asking import AsyncAsk
from millstream.client.letters import (
    PAGE,
    POLL_S,
    LetterOptions,
    ReplayOptions,
    checked_limit,
    letter_filter,
    purge_call,
    replay_call,
)
from millstream.dead_letters import DeadLetter, LetterStatistics, ReplayInfo, ReplayPlan
from millstream.errors import RequestTimeout
from millstream.wire import letter_calls

__all__ = ["AsyncDeadLetters", "AsyncReplay"]

# Inside the class `list` is a method.
_Letters: TypeAlias = list[DeadLetter]
_Replays: TypeAlias = list[ReplayInfo]


class AsyncDeadLetters:
    """All dead letters of a namespace.  Filters are named arguments: see LetterOptions."""

    def __init__(self, call: AsyncAsk) -> None:
        self._call = call

    async def list(self, limit: int = 100, **which: Unpack[LetterOptions]) -> _Letters:
        """The first letters that match, by topic and in the order they died.  Values are cut to 256 bytes."""
        found: _Letters = []
        async for letter in self._pages(which, checked_limit(limit), letter_calls.SHOWN_BYTES):
            found.append(letter)
            if len(found) >= limit:
                break
        return found

    def iterate(self, **which: Unpack[LetterOptions]) -> AsyncIterator[DeadLetter]:
        """Iterate over all letters that match, with their whole values."""
        return self._pages(which, PAGE, letter_calls.WHOLE_VALUES)

    async def _pages(self, which: LetterOptions, limit: int, value_bytes: int) -> AsyncIterator[DeadLetter]:
        call = letter_calls.ListLetters(filter=letter_filter(which), limit=min(limit, PAGE), value_bytes=value_bytes)
        while True:
            page = await self._call(call, letter_calls.LetterPage)
            for letter in page.letters:
                yield letter
            if not page.after:
                return
            call.after = page.after

    async def show(self, letter_id: str) -> DeadLetter:
        """One letter with its value and history.  Raises MessageNotFound."""
        return await self._call(letter_calls.ShowLetter(id=letter_id), DeadLetter)

    async def stats(self, **which: Unpack[LetterOptions]) -> LetterStatistics:
        """Count the letters by reason, topic, group, error and age."""
        return await self._count(letter_calls.CountLetters(filter=letter_filter(which)))

    async def purge(
        self,
        ids: Iterable[str] = (),
        *,
        everything: bool = False,
        dry_run: bool = False,
        limit: int | None = None,
        **which: Unpack[LetterOptions],
    ) -> LetterStatistics:
        """Remove letters by id, by filter, or (`everything=True`) all of them.

        Returns statistics of what was removed, or with `dry_run` would be.
        """
        return await self._count(purge_call(ids, everything, dry_run, limit, which))

    async def _count(self, call: letter_calls.CountLetters | letter_calls.PurgeLetters) -> LetterStatistics:
        total = LetterStatistics()
        wanted = call.limit if isinstance(call, letter_calls.PurgeLetters) else 0
        while True:
            part = await self._call(call, letter_calls.LetterCount)
            total.add(part.statistics)
            if not part.after or (wanted and total.total >= wanted):
                return total
            call.after = part.after
            if isinstance(call, letter_calls.PurgeLetters) and wanted:
                call.limit = wanted - total.total

    # --- replays -------------------------------------------------------------------------------------------------

    async def plan_replay(
        self, ids: Iterable[str] = (), *, everything: bool = False, **options: Unpack[ReplayOptions]
    ) -> ReplayPlan:
        """Show what `replay` would do with the same arguments, without sending anything."""
        return (await self._call(replay_call(ids, everything, True, options), letter_calls.ReplayStarted)).plan

    async def replay(
        self, ids: Iterable[str] = (), *, everything: bool = False, **options: Unpack[ReplayOptions]
    ) -> AsyncReplay:
        """Send letters again as new messages without failures: by id, by filter, or (`everything=True`) all.

        They go to `target`, or back to the topic that each came from, in the order in which they first came in, at most
        `rate` per second.  The broker does the work, and continues with it after a restart.  Each letter is sent once.
        """
        started = await self._call(replay_call(ids, everything, False, options), letter_calls.ReplayStarted)
        assert started.replay is not None
        return AsyncReplay(self._call, started.replay, started.plan)

    async def replays(self) -> _Replays:
        """Replays that are running, and reports of those that ran; newest first."""
        return await self._call(letter_calls.ListReplays(), _Replays)

    async def replay_status(self, replay_id: str) -> AsyncReplay:
        """A replay by its id.  Raises ReplayNotFound."""
        call = letter_calls.ShowReplay(id=replay_id)
        return AsyncReplay(self._call, await self._call(call, ReplayInfo))


class AsyncReplay:
    """A replay that the broker carries out.  `info` is its state when it was last looked at."""

    def __init__(self, call: AsyncAsk, info: ReplayInfo, plan: ReplayPlan | None = None) -> None:
        self._call = call
        self.info = info
        self.plan = plan

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def is_over(self) -> bool:
        return self.info.is_over

    async def progress(self) -> ReplayInfo:
        """Ask the broker how far the replay is."""
        self.info = await self._call(letter_calls.ShowReplay(id=self.id), ReplayInfo)
        return self.info

    async def wait(self, timeout_s: float | None = None) -> ReplayInfo:
        """Wait until the replay is over, however it ends.

        Raises RequestTimeout after `timeout_s`; the replay continues then.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (await self.progress()).is_over:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise RequestTimeout(f"replay {self.id} was not over after {timeout_s} s; it goes on")
            await asyncio.sleep(POLL_S)
        return self.info

    async def abort(self) -> ReplayInfo:
        """End the replay.  What was sent stays sent, and the rest stays where it is."""
        self.info = await self._call(letter_calls.AbortReplay(id=self.id), ReplayInfo)
        return self.info

    def __repr__(self) -> str:
        info = self.info
        return f"<Replay {info.id} {info.status}: {info.replayed} of {info.total}>"

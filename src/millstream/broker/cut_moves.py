"""Finishing the moves between partitions that a crash has cut short.

They are found in the journals at the start, and all of them are finished side by side: a move whose journal cannot be
opened yet, or whose target takes nothing yet, does not hold up the others.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.errors import MillstreamError

__all__ = ["CutMoves"]

_log = structlog.get_logger("millstream.transfer")

_LOOK_AGAIN_S: Final = 5.0


class CutMoves:
    """`hidden`: some may not have been found yet.  If the broker stops meanwhile, its next start has to look again."""

    def __init__(self, topics: Topics, *, hidden: bool) -> None:
        self.hidden = hidden
        self._topics = topics
        self._found: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._refused: set[tuple[str, int]] = set()

    async def finish_before(self, stopping: asyncio.Event) -> None:
        """Finish what can be finished until the broker stops; the rest is recorded, for the next start."""
        moving = asyncio.ensure_future(self.finish())
        leaving = asyncio.ensure_future(stopping.wait())
        await asyncio.wait((moving, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (moving, leaving):
            task.cancel()
        await asyncio.wait((moving, leaving))
        if not moving.cancelled() and (problem := moving.exception()) is not None:
            _log.error("moves between partitions could not be finished", reason=str(problem))

    async def finish(self) -> None:
        """Returns when all of them are done; those that still wait are given up when this is cancelled."""
        try:
            while not await self._look():  # noqa: ASYNC110 - it is a disk that is waited for
                await asyncio.sleep(_LOOK_AGAIN_S)
            self.hidden = False
            for problem in await asyncio.gather(*self._found.values(), return_exceptions=True):
                if problem is not None:
                    _log.error("moves between partitions could not be finished", reason=repr(problem))
        finally:
            for task in self._found.values():
                task.cancel()

    async def _look(self) -> bool:
        """Begin with the moves of every journal that can be opened.  False if some journal could not be."""
        refused = False
        try:
            for topic, number in self._topics.stored_beside("state"):
                await asyncio.sleep(0)
                if (topic.key, number) not in self._found and not topic.deleting:
                    refused |= not self._begin(topic, number)
        except OSError as error:
            _log.error("moves between partitions cannot be found", reason=str(error))
            return False
        return not refused

    def _begin(self, topic: Topic, number: int) -> bool:
        try:
            transfer = self._topics.transfer(topic, number)
        except (OSError, MillstreamError) as error:
            if (topic.key, number) not in self._refused:
                self._refused.add((topic.key, number))
                _log.error("moves wait for their journal", topic=topic.name, partition=number, reason=str(error))
            return False
        self._found[topic.key, number] = asyncio.ensure_future(transfer.recover())
        return True

"""Where a round of syncs is carried out: in threads, so that the event loop never waits for a disk.

A round of a few plain files, which is nearly every one, goes to a thread that does not need the interpreter, where that
is compiled (`_syncer.c`): in Python the thread and the loop would have to pass the interpreter's lock back and forth,
for more than the sync itself costs.  Everything else, and everything where it is not compiled, is done in Python.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.committer import Commit, Rounds, Syncable
from millstream.log.storage import DiskFile

if TYPE_CHECKING:
    from millstream.broker._syncer import Syncer

__all__ = ["CompiledRounds", "ThreadRounds", "open_rounds"]

_log = structlog.get_logger("millstream.commit")

#: So many files are worth the hand-over to several threads: the file system joins syncs that are in flight together.
_PARALLEL_FILES_MIN: Final = 4
_PARALLEL_THREADS: Final = 8


def open_rounds(loop: asyncio.AbstractEventLoop) -> Rounds:
    """The best that there is."""
    rounds = ThreadRounds(loop)
    try:
        from millstream.broker._syncer import Syncer
    except ImportError:  # there was no compiler when it was installed, or this is not Linux
        _log.info("syncs run in Python, because the compiled module is not there; many small publishes cost more")
        return rounds
    return CompiledRounds(loop, Syncer(), rounds)


class ThreadRounds:
    """Carries out rounds in a thread of its own, in Python."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Commit, Callable[[Commit], None]] | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="millstream-commit", daemon=True)
        self._thread.start()

    def submit(self, commit: Commit, done: Callable[[Commit], None]) -> None:
        self._jobs.put((commit, done))

    async def close(self) -> None:
        self._jobs.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        for _ in self._helpers:
            self._shares.put(None)
        for helper in self._helpers:
            await self._loop.run_in_executor(None, helper.join)

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One round, in a frame of its own: this thread must not refer to it, and so to its broker, while it waits."""
        job = self._jobs.get()
        if job is None:
            return False
        commit, done = job
        started = time.perf_counter()
        try:
            self._sync(commit)
        except Exception as error:  # nobody knows what is on disk, so nothing of it may be confirmed; and all are told
            for place in range(len(commit.parts)):
                commit.errors[place] = error
        commit.seconds = time.perf_counter() - started
        try:
            self._loop.call_soon_threadsafe(done, commit)
        except RuntimeError:  # the loop was closed under us: the process is ending
            return False
        return True

    def _sync(self, commit: Commit) -> None:
        files = commit.files()
        if len(files) < _PARALLEL_FILES_MIN:
            for file in files:
                commit.sync(file)
            return
        share = _Share(commit, files)
        for _ in range(self._find_helpers(min(len(files), _PARALLEL_THREADS) - 1)):
            self._shares.put(share)
        share.sync()
        share.wait()

    def _find_helpers(self, wanted: int) -> int:
        """How many there are for this round.  Where no thread can be started, those that run have more to do."""
        while len(self._helpers) < wanted:
            helper = threading.Thread(target=self._help, name="millstream-sync", daemon=True)
            try:
                helper.start()
            except (RuntimeError, MemoryError):  # the next round tries again
                break
            self._helpers.append(helper)
        return min(wanted, len(self._helpers))

    def _help(self) -> None:
        while self._help_once():
            pass

    def _help_once(self) -> bool:
        share = self._shares.get()
        if share is not None:
            share.sync()
        return share is not None


class _Share:
    """The files of a round, for all threads that help to take from."""

    def __init__(self, commit: Commit, files: list[tuple[int, Syncable]]) -> None:
        self._commit = commit
        self._left = deque(files)
        self._count = len(files)
        self._synced: queue.SimpleQueue[None] = queue.SimpleQueue()

    def sync(self) -> None:
        """Until nothing is left to take."""
        with suppress(IndexError):
            while True:
                self._commit.sync(self._left.popleft())
                self._synced.put(None)

    def wait(self) -> None:
        """Until everything that was taken is synced, by whoever took it."""
        for _ in range(self._count):
            self._synced.get()


class CompiledRounds:
    """Carries out rounds of a few plain files in a thread without the interpreter, and leaves the others to `others`.

    The committer has one round under way at a time, so there is one to remember.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, syncer: Syncer, others: Rounds) -> None:
        self._loop = loop
        self._syncer = syncer
        self._others = others
        self._places: list[int] = []
        self._round: tuple[Commit, Callable[[Commit], None]] | None = None
        loop.add_reader(syncer.fileno(), self._ended)

    def submit(self, commit: Commit, done: Callable[[Commit], None]) -> None:
        files = commit.files()
        descriptors = [file.fileno() for _, file in files if type(file) is DiskFile]
        if len(descriptors) < len(files) or len(files) >= _PARALLEL_FILES_MIN:
            self._others.submit(commit, done)
            return
        self._places = [place for place, _ in files]
        self._round = (commit, done)
        self._syncer.submit(descriptors)

    def _ended(self) -> None:
        assert self._round is not None, "a round ends once"
        (commit, done), self._round = self._round, None
        commit.seconds, errors = self._syncer.take()
        for place, number in zip(self._places, errors, strict=True):
            if number:
                commit.errors.setdefault(place, OSError(number, os.strerror(number)))
        done(commit)

    async def close(self) -> None:
        await self._others.close()
        self._loop.remove_reader(self._syncer.fileno())
        self._syncer.close()

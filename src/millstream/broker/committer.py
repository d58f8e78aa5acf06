"""Group commit: one round of fdatasync at a time, shared by everything that was written while the last one ran.

The event loop never waits for a disk.  Partitions that wrote something ask for a commit; a thread (rounds.py) syncs
their files and the loop is told what is durable.  Under load the rounds grow by themselves: the slower the disk, the
more publishes share a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import structlog

from millstream.broker.logs import details
from millstream.log.sealing import Seals
from millstream.log.storage import NotOpened

__all__ = ["Commit", "Committable", "Committer", "Rounds", "Syncable"]

_log = structlog.get_logger("millstream.commit")

#: Peers that were just answered will write again within a round trip; waiting this part of a round for them makes the
#: next round larger (measured: 16 producers gain a third on a disk of 2 ms).
_GATHER_SHARE: Final = 0.1
_GATHER_S_MAX: Final = 0.002
#: On a disk that is faster than this it takes longer to answer a round than to sync one: the next round is better under
#: way while this one is answered (measured: 16 producers gain a sixth on a disk of 0.1 ms).
_GATHER_FROM_S: Final = 0.0005
#: Notes are written on the loop, so there are not many at a time; the others have their turn when the next interval is
#: over.
_NOTES_MAX: Final = 100
#: When a round is tried once more that found too many files open.
_AGAIN_S: Final = 0.2


class Syncable(Protocol):
    def sync(self) -> None: ...


class Committable(Protocol):
    """What can be committed: a partition."""

    @property
    def unsynced(self) -> bool:
        """Whether it has something that was to be committed later, and was not committed since."""

    def begin_commit(self) -> tuple[Sequence[Syncable], int]:
        """Hand over the files to sync and the offset up to which a successful sync makes the log durable."""

    def end_commit(self, durable_to: int, error: Exception | None) -> int:
        """The sync is done or has failed; returns how many publishes this answered."""

    def note_durable(self) -> None:
        """Write down for a recovery how much is on disk; cheap, and nobody waits for it."""


@dataclass(slots=True)
class Commit:
    """One round."""

    parts: list[tuple[Committable, Sequence[Syncable], int]]
    errors: dict[int, Exception]
    seconds: float = 0.0

    def files(self) -> list[tuple[int, Syncable]]:
        """What is to be synced, each with the place of its partition."""
        return [(place, file) for place, (_, files, _) in enumerate(self.parts) for file in files]

    def sync(self, item: tuple[int, Syncable]) -> None:
        place, file = item
        try:
            file.sync()
        except NotOpened as error:
            self.errors.setdefault(place, error)  # which can be tried again, and must hide nothing that cannot
        except Exception as error:  # whatever went wrong, this partition must not be confirmed
            self.errors[place] = error


class Rounds(Protocol):
    """Where a round is carried out: in a thread, or in a simulation that has only one."""

    def submit(self, commit: Commit, done: Callable[[Commit], None]) -> None:
        """Sync the files, one round after the other, and have `done` called on the loop."""

    async def close(self) -> None: ...


class Committer:
    """Decides what is synced when.  All methods are called on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        rounds: Rounds,
        on_round: Callable[[float, int], None] | None = None,
    ) -> None:
        self._loop = loop
        self._on_round = on_round
        self._rounds = rounds
        self._dirty: dict[Committable, None] = {}
        #: Those that nobody waits for: their turn comes with `request_waiting`.
        self._later: dict[Committable, None] = {}
        #: Those that have more on disk than they have written down.
        self._unnoted: dict[Committable, None] = {}
        self._running = False
        self._round_s = 0.0001
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def request(self, partition: Committable) -> None:
        """Commit this partition with the next round."""
        self._dirty[partition] = None
        if not self._running:
            self._running = True
            self._idle.clear()
            # At the end of this turn of the loop: everything that is ready now shares the round.
            self._loop.call_soon(self._start)

    def request_later(self, partition: Committable) -> None:
        """Commit this partition when the interval is over, unless that happens sooner by itself."""
        self._later[partition] = None

    def request_again(self, partition: Committable) -> None:
        """Commit this partition once more in a moment, if nobody does before: it could not be done now."""
        self._loop.call_later(_AGAIN_S, self._again, partition)

    def _again(self, partition: Committable) -> None:
        if partition.unsynced and not self._closed:
            self.request(partition)

    def request_waiting(self) -> None:
        """The interval is over."""
        later, self._later = self._later, {}
        for partition in later:
            if partition.unsynced:
                self.request(partition)
        for partition in list(islice(self._unnoted, _NOTES_MAX)):
            del self._unnoted[partition]
            partition.note_durable()

    async def drain(self) -> None:
        """Wait until nothing is being committed."""
        await self._idle.wait()

    async def close(self) -> None:
        await self.drain()
        self._closed = True
        await self._rounds.close()

    def _start(self) -> None:
        dirty, self._dirty = self._dirty, {}
        if not dirty:
            self._running = False
            self._idle.set()
            return
        self._rounds.submit(Commit([(partition, *partition.begin_commit()) for partition in dirty], {}), self._done)

    def _done(self, commit: Commit) -> None:
        self._round_s += (commit.seconds - self._round_s) * 0.1
        answered = 0
        if details.on:
            self._note_seals(commit)
        for place, (partition, _, durable_to) in enumerate(commit.parts):
            try:
                answered += partition.end_commit(durable_to, commit.errors.get(place))
                self._unnoted[partition] = None
            except Exception:  # one partition's trouble must not stop the commits of all the others
                _log.exception("a commit could not be answered")
        if self._on_round is not None:
            self._on_round(commit.seconds, sum(len(files) for _, files, _ in commit.parts))
        if answered > 1 and self._round_s >= _GATHER_FROM_S:
            self._loop.call_later(min(_GATHER_S_MAX, self._round_s * _GATHER_SHARE), self._start)
        else:
            self._start()

    @staticmethod
    def _note_seals(commit: Commit) -> None:
        for place, file in commit.files():
            if isinstance(file, Seals) and place not in commit.errors:
                sealed = [seal for seal in file.seals if seal.stored]
                if sealed:
                    end = sealed[-1].segment.next_offset
                    _log.debug("segments sealed", directory=sealed[0].directory, segments=len(sealed), end=end)

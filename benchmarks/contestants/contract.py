"""What a broker must offer to take part: how to start it, and what its client does.

A `Contestant` is a small value that travels to the client processes by pickling; it opens no connection
itself.  `start` is called in the main process, `connect` in a client process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from benchmarks.bodies import Schedule
from benchmarks.servers import Server

__all__ = ["Client", "ConcurrentClient", "Contestant", "Level", "QueueClient", "Sink"]


class Level(StrEnum):
    """How careful the broker is told to be before it confirms."""

    NORMAL = "normal"  # the setting people run it with; `promise` says what that is worth
    FSYNC = "fsync"  # nothing is confirmed before an fsync that covers it


class Sink(Protocol):
    """Takes what a consumer received; says how much it wants at once."""

    chunk: int  # hand over at least this many at a time if the client iterates one by one

    def __call__(self, bodies: Sequence[bytes]) -> bool:
        """Take the next bodies in order; False means that it has enough."""


class Client(Protocol):
    """One connection of the contestant's best Python client, bound to one queue, topic or stream."""

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        """Publish as fast as the client can; returns when every one is confirmed."""

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        """Publish one at a time: the next is drawn from `bodies` only when the last is confirmed."""

    def publish_paced(self, schedule: Schedule) -> None:
        """Publish each body as it falls due, at once and without waiting for confirmations if the
        client can; returns when every one is confirmed."""

    def consume(self, sink: Sink) -> None:
        """Feed `sink` from the oldest message on, acknowledging durably, until it has enough."""

    def close(self) -> None: ...


@runtime_checkable
class QueueClient(Client, Protocol):
    """A client that can also work off a queue."""

    def work(self, sink: Sink) -> None:
        """Feed `sink` as a worker does: each message is leased to it and acknowledged by itself, not along with
        those before it.  Asking ahead, and sending many acknowledgements together, are welcome."""


@runtime_checkable
class ConcurrentClient(Client, Protocol):
    """A client for a program that does many things at once."""

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        """Publish from so many producers side by side, each one at a time: tasks, callbacks or threads, on one
        connection or on several, whatever is fastest with this client.  Producers know nothing of each other."""


class Contestant(Protocol):
    """A broker together with its client library."""

    @property
    def name(self) -> str: ...

    @property
    def client(self) -> str:
        """The client library, as its distribution is called."""

    @property
    def leases(self) -> bool:
        """Whether messages can be shared out among workers, so that its client is a `QueueClient`."""

    def missing(self) -> str | None:
        """Why this contestant cannot run here and how to install it; None if it can."""

    def version(self) -> str: ...

    def promise(self, level: Level, /) -> str | None:
        """What a confirmation is worth at this level; None if the broker has no such setting."""

    def start(self, directory: Path, level: Level, /) -> Server:
        """Start the broker with its data under `directory`; returns when it accepts connections."""

    def declare(self, port: int, queue: str) -> None:
        """Create `queue`, so that everything published from now on is kept for its consumer."""

    def connect(self, port: int, queue: str) -> Client: ...

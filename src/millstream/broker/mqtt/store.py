"""What is remembered of sessions: facts in one journal, an entity for each session.

Most facts ride along: losing the last few costs a message that is sent again.  What a client relies on (its
subscriptions, packet ids of QoS 2) is awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

from millstream.broker.journal import Fact, Facts, Journal
from millstream.broker.transfer import Transfer

__all__ = ["SessionStore"]

_PREFIX = "session/"


class SessionStore:
    """The journal of sessions, and the moves of messages whose packet ids it holds."""

    def __init__(self, journal: Journal, transfer: Transfer) -> None:
        self.journal = journal
        self.transfer = transfer

    def known(self) -> Iterator[tuple[str, str]]:
        """Namespace and client id of every session that an earlier run has left."""
        for entity in self.journal.entities:
            if entity.startswith(_PREFIX):
                namespace, _, client_id = entity.removeprefix(_PREFIX).partition("/")
                yield namespace, client_id

    def claim(self, namespace: str, client_id: str, facts: Callable[[], Iterable[Fact]]) -> Facts:
        return self.journal.claim(entity_of(namespace, client_id), facts)

    def forget(self, namespace: str, client_id: str) -> None:
        self.journal.forget(entity_of(namespace, client_id))

    def record(self, entity: str, fact: Fact) -> None:
        self.journal.record(entity, fact)

    def record_durably(self, entity: str, *facts: Fact) -> Awaitable[None]:
        return self.journal.record_durably(*((entity, fact) for fact in facts))


def entity_of(namespace: str, client_id: str) -> str:
    return f"{_PREFIX}{namespace}/{client_id}"

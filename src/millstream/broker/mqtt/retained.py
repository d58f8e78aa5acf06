"""Retained messages: the newest of each topic that was published to be kept, for whoever subscribes later.

They are a log of their own, compacted by key (`namespace`, a slash, the MQTT topic).  A confirmed one is on disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, NamedTuple

from millstream.broker.metrics import Metrics
from millstream.broker.state import StateLog, all_batches
from millstream.clock import Clock
from millstream.config import MqttSettings
from millstream.entries import encode_entries
from millstream.errors import QuotaExceeded
from millstream.headers import readable_headers
from millstream.mqtt.messages import Message, size_of
from millstream.mqtt.retained import RetainedTrie
from millstream.mqtt.stored import entry_of, message_of
from millstream.records import Batch, encode_batch

__all__ = ["Kept", "Retained"]

_CLEARED_AT_A_TIME: Final = 1_000
_NEVER_US: Final = 2**63


class Kept(NamedTuple):
    """A retained message, and where it stands in the log of retained messages."""

    message: Message
    offset: int
    #: 0: it is none that is kept.
    stored_us: int = 0


class _Line:
    """Messages for one topic whose publishers have no answer yet, and what was kept before them."""

    __slots__ = ("before", "messages")

    def __init__(self, before: Message | None) -> None:
        self.before = before
        self.messages: list[Message] = []


class Retained:
    """All retained messages of a broker, by namespace."""

    def __init__(
        self,
        log: StateLog,
        settings: MqttSettings,
        *,
        clock: Clock,
        metrics: Metrics,
        most_of: Callable[[int], int] = lambda all_in_all: all_in_all,
    ) -> None:
        """`most_of` says what one namespace may have."""
        self.log = log
        self._settings = settings
        self._most_of = most_of
        self._clock = clock
        self._metrics = metrics
        self._tries: dict[str, RetainedTrie[Kept]] = {}
        self.count = 0
        self.bytes = 0
        #: By namespace.
        self._sizes: dict[str, int] = {}
        #: When those expire that do so, by namespace and topic; and the first of them.
        self._mortal: dict[tuple[str, str], int] = {}
        self._expires_us = _NEVER_US
        #: By namespace and topic.
        self._unsettled: dict[tuple[str, str], _Line] = {}
        for batch in all_batches(log.partition.log):
            self._replay(batch)

    def _replay(self, batch: Batch) -> None:
        keys, headers, expiry = batch.keys() or (), batch.raw_headers(), batch.expiry_us()
        for at, (offset, key, value) in enumerate(zip(batch.offsets(), keys, batch.values(), strict=True)):
            assert key is not None
            namespace, _, topic = key.decode().partition("/")
            if value is None:
                self._forget(namespace, topic)
                continue
            told = readable_headers(headers[at] if headers else None)
            message = message_of(topic, value, told, expiry[at] if expiry else 0)
            message.retain = True
            self._keep(namespace, Kept(message, offset, batch.append_time_us))

    def put(self, namespace: str, message: Message) -> Awaitable[None]:
        """Keep a message instead of the one before; an empty payload keeps none.

        Whoever subscribes from now on gets it; what is returned ends when it is on disk too, or raises StorageFailed.
        """
        topic, payload = message.topic, message.payload
        key = f"{namespace}/{topic}".encode()
        now_us = self._clock.now_us()
        if payload:
            self._keep(namespace, Kept(message, -1, now_us))
            head, tail = encode_entries([entry_of(message, key=key, now_us=now_us)], base_timestamp_us=now_us)
            return self._store(namespace, message, bytearray(head + tail))
        self._forget(namespace, topic)
        return self._store(namespace, message, encode_batch([None], keys=[key], base_timestamp_us=now_us))

    def propose(self, namespace: str, message: Message) -> Awaitable[None]:
        """As `put`, for a message that may be refused elsewhere; `settle` is due when that is known."""
        key = namespace, message.topic
        line = self._unsettled.get(key)
        if line is None:
            held = self._held(*key)
            line = self._unsettled[key] = _Line(None if held is None else held.message)
        line.messages.append(message)
        return self.put(namespace, message)

    def settle(self, namespace: str, message: Message, *, refused: bool) -> Awaitable[None] | None:
        """A message was taken, or refused: then the one before it is kept again, unless there is a newer one.

        What is returned, if anything, ends when that is on disk too, or raises StorageFailed.
        """
        key = namespace, message.topic
        line = self._unsettled.get(key)
        at = -1 if line is None else next((at for at, one in enumerate(line.messages) if one is message), -1)
        if line is None or at < 0:
            return None
        was_last = at == len(line.messages) - 1
        if refused:
            del line.messages[at]
        else:
            line.before = message
            del line.messages[: at + 1]
        if not line.messages:
            del self._unsettled[key]
        if not (refused and was_last):
            return None
        last = line.messages[-1] if line.messages else line.before
        return self.put(namespace, last if last is not None else Message(message.topic, b"", message.qos, True))

    async def _store(self, namespace: str, message: Message, batch: bytearray) -> None:
        offset = await self.log.partition.append_durably(batch)
        current = self._held(namespace, message.topic)
        if current is not None and current.message is message:
            self._keep(namespace, current._replace(offset=offset))

    def admit(self, namespace: str, message: Message) -> None:
        """Raises QuotaExceeded when there is no room for a message."""
        if not message.payload:
            return
        settings, held = self._settings, self._held(namespace, message.topic)
        if held is None and self.count >= settings.retained_max:
            raise QuotaExceeded(f"the broker keeps {settings.retained_max} retained messages at most")
        more = size_of(message) - (size_of(held.message) if held is not None else 0)
        if more > 0 and self.bytes + more > settings.retained_bytes_max:
            raise QuotaExceeded(f"retained messages may take {settings.retained_bytes_max} bytes in all")
        kept, size = self.kept_in(namespace)
        if held is None and kept >= (most := self._most_of(settings.retained_max)):
            raise QuotaExceeded(f"one namespace has {most} retained messages at most, as there are others")
        if more > 0 and size + more > (most := self._most_of(settings.retained_bytes_max)):
            raise QuotaExceeded(f"the retained messages of one namespace may take {most} bytes, as there are others")

    async def clear(self, namespace: str, topics: Sequence[str]) -> None:
        """Keep nothing any more for these topics.  Raises StorageFailed."""
        for topic in topics:
            self._unsettled.pop((namespace, topic), None)
        await self._clear(namespace, topics)

    async def _clear(self, namespace: str, topics: Sequence[str]) -> None:
        for topic in topics:
            self._forget(namespace, topic)
        keys = [f"{namespace}/{topic}".encode() for topic in topics]
        batch = encode_batch([None] * len(keys), keys=keys, base_timestamp_us=self._clock.now_us())
        await self.log.partition.append_durably(batch)

    async def forget_namespace(self, namespace: str) -> None:
        """Keep nothing of a namespace any more.  Raises StorageFailed."""
        for key in [key for key in self._unsettled if key[0] == namespace]:
            del self._unsettled[key]
        topics = [kept.message.topic for kept in self._tries.get(namespace, ())]
        for at in range(0, len(topics), _CLEARED_AT_A_TIME):
            await self.clear(namespace, topics[at : at + _CLEARED_AT_A_TIME])

    def matching(self, namespace: str, topic_filter: str, after: str = "") -> Iterator[Kept | None]:
        """What is kept under the topics that a filter names (those after a topic), and has not expired.

        With a None now and then: see `RetainedTrie.match`.
        """
        trie = self._tries.get(namespace)
        if trie is None:
            return
        now_us = self._clock.now_us()
        for kept in trie.match(topic_filter, after):
            if kept is None or not 0 < kept.message.expiry_us <= now_us:
                yield kept

    def kept_in(self, namespace: str) -> tuple[int, int]:
        """How many of a namespace there are, and their bytes."""
        trie = self._tries.get(namespace)
        return (0, 0) if trie is None else (len(trie), self._sizes.get(namespace, 0))

    def read(self, offset: int) -> Message | None:
        """One by its place in the log; None when a newer one has taken its place."""
        log = self.log.partition.log
        if not log.start_offset <= offset < log.next_offset:
            return None
        for buffer in log.read(offset, 1, before=offset + 1).buffers:
            batch = Batch.parse(buffer, verify=False)
            for at, found in enumerate(batch.offsets()):
                value = batch.values()[at]
                if found == offset and value is not None:
                    headers, expiry = batch.raw_headers(), batch.expiry_us()
                    key = (batch.keys() or [b""])[at] or b""
                    told = readable_headers(headers[at] if headers else None)
                    return message_of(key.decode().partition("/")[2], value, told, expiry[at] if expiry else 0)
        return None

    async def expire(self, now_us: int) -> None:
        """Take out what nobody may get any more."""
        if now_us < self._expires_us:
            return
        due = [key for key, expiry_us in self._mortal.items() if expiry_us <= now_us]
        for at in range(0, len(due), _CLEARED_AT_A_TIME):
            topics: dict[str, list[str]] = {}
            for namespace, topic in due[at : at + _CLEARED_AT_A_TIME]:
                if self._mortal.get((namespace, topic), now_us + 1) <= now_us:  # nobody has put another one there
                    topics.setdefault(namespace, []).append(topic)
            for namespace, gone in topics.items():
                await self._clear(namespace, gone)  # the one before it comes back if it is refused all the same
        self._expires_us = min(self._mortal.values(), default=_NEVER_US)

    # --- memory --------------------------------------------------------------------------------------------------

    def _held(self, namespace: str, topic: str) -> Kept | None:
        trie = self._tries.get(namespace)
        return None if trie is None else trie.get(topic)

    def _keep(self, namespace: str, kept: Kept) -> None:
        self._uncount(namespace, self._held(namespace, kept.message.topic))
        trie = self._tries.get(namespace)
        if trie is None:
            trie = self._tries[namespace] = RetainedTrie()
        trie.put(kept.message.topic, kept)
        self._count(namespace, 1, size_of(kept.message))
        expiry_us = kept.message.expiry_us
        if expiry_us:
            self._mortal[namespace, kept.message.topic] = expiry_us
            self._expires_us = min(self._expires_us, expiry_us)

    def _forget(self, namespace: str, topic: str) -> None:
        held = self._held(namespace, topic)
        if held is not None:
            self._uncount(namespace, held)
            self._tries[namespace].remove(topic)

    def _uncount(self, namespace: str, held: Kept | None) -> None:
        if held is not None:
            self._count(namespace, -1, -size_of(held.message))
            self._mortal.pop((namespace, held.message.topic), None)

    def _count(self, namespace: str, number: int, size: int) -> None:
        self.count += number
        self.bytes += size
        self._sizes[namespace] = self._sizes.get(namespace, 0) + size

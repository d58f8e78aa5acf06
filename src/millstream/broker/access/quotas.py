"""Quotas of namespaces at run time: what is used, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from millstream.access.quotas import Meter, Quota
from millstream.broker.metrics import Metrics
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.errors import MillstreamError
from millstream.names import AUDIT_TOPIC
from millstream.records import BatchHeader
from millstream.wire.access_calls import QuotaInfo, SetQuota, ShowQuota

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.stages.stages import Stages

__all__ = ["MEASURE_S", "Quotas"]

_QUOTA: Final = "quota/"
MEASURE_S: Final = 10.0


class _Host(Protocol):
    metrics: Metrics
    topics: Topics
    stages: Stages

    def connections_in(self, namespace: str, /) -> int: ...


class Quotas:
    """The limits of all namespaces."""

    def __init__(self, host: _Host, log: StateLog, *, clock: Clock) -> None:
        self._host = host
        self._log = log
        self._clock = clock
        #: Namespaces with a limit; empty, and nobody else is asked, in most brokers.
        self.meters: dict[str, Meter] = {}
        self._changing = asyncio.Lock()
        self._measuring = asyncio.Lock()

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {SetQuota: lambda _, call: self.set(call), ShowQuota: self._show}

    def replay(self, documents: Mapping[str, Any]) -> None:
        for name, document in documents.items():
            if name.startswith(_QUOTA):
                namespace = name.removeprefix(_QUOTA)
                self.meters[namespace] = Meter(namespace, msgspec.convert(document, Quota), self._now_ms())

    # --- enforcing -----------------------------------------------------------------------------------------------

    def publish(self, namespace: str, batch: memoryview) -> None:
        """Raises Throttled or QuotaExceeded when a batch is too much for its namespace."""
        meter = self.meters.get(namespace)
        if meter is not None:
            self._ask(meter.publish, BatchHeader(batch).count, len(batch))

    def check(self, namespace: str, size: int) -> None:
        """Raises what `publish` would for a message, and lets nothing in."""
        meter = self.meters.get(namespace)
        if meter is not None:
            self._ask(meter.check, size)

    def pass_on(self, namespace: str, messages: int, size: int) -> None:
        """Raises Throttled when messages that are not stored are too much for their namespace."""
        meter = self.meters.get(namespace)
        if meter is not None:
            self._ask(meter.pass_on, messages, size)

    def _ask(self, question: Callable[..., None], *amounts: int) -> None:
        try:
            question(*amounts, self._now_ms())
        except MillstreamError:
            self._host.metrics.quota_refusals += 1
            raise

    def admit_partitions(self, namespace: str, partitions: int, *, new_topic: bool) -> None:
        """For a topic that is made, or gets more of them.  Raises QuotaExceeded."""
        meter = self.meters.get(namespace)
        if meter is not None:
            if new_topic:
                meter.check_topics(self._topics_in(namespace))
            meter.check_partitions(self._partitions_in(namespace), partitions)

    def admit_connection(self, namespace: str, *, leaving: int = 0) -> None:
        """Raises QuotaExceeded.  `leaving`: connections that end when this one is there."""
        meter = self.meters.get(namespace)
        if meter is not None:
            meter.check_connections(self._host.connections_in(namespace) - leaving)

    async def measure(self) -> None:
        """Look at the disk; called every MEASURE_S.  What comes in between is added up as it comes."""
        async with self._measuring:  # or what one has found would be something that came in between for the other
            for meter in list(self.meters.values()):
                if meter.quota.storage_bytes:
                    before = meter.stored_bytes
                    stored = await self._stored_bytes(meter.namespace)
                    meter.stored_bytes = stored + meter.stored_bytes - before

    # --- calls ---------------------------------------------------------------------------------------------------

    async def set(self, call: SetQuota) -> QuotaInfo:
        quota = Quota(**{name: getattr(call, name) for name in Quota.__struct_fields__})
        unlimited = quota == Quota()
        facts = {_QUOTA + call.namespace: None if unlimited else quota}
        async with self._changing:
            self._host.topics.registry.topics(call.namespace)  # or say that there is none
            await self._log.record(facts, now_us=self._clock.now_us())
            self.meters.pop(call.namespace, None)
            if not unlimited:
                self.meters[call.namespace] = Meter(call.namespace, quota, self._now_ms())
        await self.measure()
        return await self._info(call.namespace)

    async def _show(self, _: Session, call: ShowQuota) -> QuotaInfo:
        self._host.topics.registry.topics(call.namespace)
        return await self._info(call.namespace)

    async def forget(self, namespace: str) -> None:
        """A namespace is gone."""
        async with self._changing:
            if namespace in self.meters:
                await self._log.record({_QUOTA + namespace: None}, now_us=self._clock.now_us())
                del self.meters[namespace]

    async def _info(self, namespace: str) -> QuotaInfo:
        meter = self.meters.get(namespace)
        return QuotaInfo(
            namespace=namespace,
            **(msgspec.to_builtins(meter.quota) if meter is not None else {}),
            topics_used=self._topics_in(namespace),
            partitions_used=self._partitions_in(namespace),
            storage_bytes_used=await self._stored_bytes(namespace),
            connections_used=self._host.connections_in(namespace),
            refused=meter.refused if meter is not None else 0,
        )

    def _topics_in(self, namespace: str) -> int:
        topics = self._host.topics.registry.namespaces.get(namespace, {})
        return sum(name != AUDIT_TOPIC for name in topics)  # that one is nobody's doing

    def _partitions_in(self, namespace: str) -> int:
        topics = self._host.topics.registry.namespaces.get(namespace, {})
        return sum(len(topic.partitions) for name, topic in topics.items() if name != AUDIT_TOPIC)

    async def _stored_bytes(self, namespace: str) -> int:
        total = self._host.stages.bytes_in(namespace)
        for topic in list(self._host.topics.registry.namespaces.get(namespace, {}).values()):
            if not topic.deleting:  # a thread is removing its files
                total += self._host.topics.stored_bytes(topic)
            await asyncio.sleep(0)  # there may be thousands, each a few looks at the disk
        return total

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()

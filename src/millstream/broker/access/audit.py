"""The audit log: what administrators did or tried, as messages of the topic `_audit` in the namespace `default`.

The topic is made when there is something to write.  Entries are on disk before the caller hears that it is done; an
entry that cannot be written is an error in the broker's own log and does not undo what was done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog

from millstream.access.rates import Bucket
from millstream.broker.access.permissions import names_of
from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import InvalidArgument, MillstreamError
from millstream.names import AUDIT_TOPIC, DEFAULT_NAMESPACE
from millstream.records import Batch, encode_batch
from millstream.wire.access_calls import AuditEntry, AuditPage, ListAudit
from millstream.wire.calls import CreateTopic

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Audit"]

_log = structlog.get_logger("millstream.audit")

_LIMIT_MAX: Final = 1_000
#: Entries read at a time, and looked at by one call before it answers with what it has.
_WINDOW: Final = 500
_LOOKED_AT_MAX: Final = 20_000
_READ_BYTES: Final = 1024 * 1024
#: Refused attempts that are written down per second; who hammers at the door must not fill the disk.
_REFUSALS_PER_S: Final = 10


class _Host(Protocol):
    settings: Settings
    metrics: Metrics
    topics: Topics


class Audit:
    """Writes entries, and finds them again."""

    def __init__(self, host: _Host, *, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self.is_on = host.settings.keeps_audit
        self._refusals = Bucket(_REFUSALS_PER_S, _REFUSALS_PER_S, 0)

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {ListAudit: lambda _, call: self.page(call)}

    # --- writing -------------------------------------------------------------------------------------------------

    async def refused(self, session: Session, call: object, refusal: MillstreamError) -> None:
        """Somebody tried what it may not."""
        if not self._refusals.wait_ms(self._clock.monotonic_ms()):
            self._refusals.take(1)
            await self.record(session, call, refusal.code)

    async def record(self, session: Session, call: object, outcome: str) -> None:
        if not self.is_on:
            return
        now_us = self._clock.now_us()
        entry = AuditEntry(
            time_ms=now_us // 1000,
            key=session.access.key_id,
            client_id=session.client_id,
            address=session.address,
            door=session.door,
            call=type(call).__struct_config__.tag,  # type: ignore[attr-defined]
            namespace=session.namespace,
            names=names_of(call),
            outcome=outcome,
        )
        try:
            batch = encode_batch([msgspec.json.encode(entry)], keys=[entry.key.encode()], base_timestamp_us=now_us)
            await (await self._partition()).append_durably(batch)
            self._host.metrics.audit_entries += 1
        except MillstreamError as error:
            _log.error("an audit entry could not be written", code=error.code, reason=str(error), entry=repr(entry))

    async def _partition(self) -> Partition:
        topics = self._host.topics
        topic = topics.registry.find(DEFAULT_NAMESPACE, AUDIT_TOPIC)
        if topic is None:
            config = {"retention_ms": self._host.settings.access.audit_retention_ms}
            call = CreateTopic(name=AUDIT_TOPIC, config=config, if_missing=True)
            await topics.create(DEFAULT_NAMESPACE, call, own=True)
            topic = topics.registry.get(DEFAULT_NAMESPACE, AUDIT_TOPIC)
        return topics.partition_of(topic, 0)

    # --- reading -------------------------------------------------------------------------------------------------

    async def page(self, call: ListAudit) -> AuditPage:
        if not 1 <= call.limit <= _LIMIT_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIMIT_MAX}, not {call.limit}")
        if call.after and not (call.after.isascii() and call.after.isdecimal() and len(call.after) < 16):
            raise InvalidArgument(f"after={call.after[:80]!r} is not what a call of this kind has answered")
        topic = self._host.topics.registry.find(DEFAULT_NAMESPACE, AUDIT_TOPIC)
        if topic is None:
            return AuditPage(entries=[])
        partition = self._host.topics.partition_of(topic, 0)
        upto = partition.high_watermark
        if call.after:
            upto = min(upto, int(call.after))
        lowest = max(partition.log.start_offset, upto - _LOOKED_AT_MAX)
        entries: list[AuditEntry] = []
        while upto > lowest:
            first = max(lowest, upto - _WINDOW)
            for offset, entry in reversed(await _read(partition, first, upto)):
                if call.from_ms and entry.time_ms < call.from_ms:
                    return AuditPage(entries=entries)  # they are in the order of time
                if _fits(entry, call):
                    entries.append(entry)
                    if len(entries) == call.limit:
                        return AuditPage(
                            entries=entries, after=str(offset) if offset > partition.log.start_offset else ""
                        )
            upto = first
        return AuditPage(entries=entries, after=str(lowest) if lowest > partition.log.start_offset else "")


def _fits(entry: AuditEntry, call: ListAudit) -> bool:
    return (
        call.key in ("", entry.key)
        and call.call in ("", entry.call)
        and (not call.until_ms or entry.time_ms < call.until_ms)
    )


async def _read(partition: Partition, first: int, upto: int) -> list[tuple[int, AuditEntry]]:
    found: list[tuple[int, AuditEntry]] = []
    while first < upto:
        await partition.warm(first)
        chunk = partition.log.read(first, _READ_BYTES, before=upto)
        data = b"".join(chunk.buffers)
        at = 0
        while at < len(data):
            batch = Batch.parse(data, at)
            at += batch.header.length
            for offset, value in zip(batch.offsets(), batch.values(), strict=True):
                if value is not None and first <= offset < upto:
                    with contextlib.suppress(msgspec.DecodeError):  # not the broker's own: from before it kept a log
                        found.append((offset, msgspec.json.decode(value, type=AuditEntry)))
        first = max(chunk.next_offset, first + 1)
    return found

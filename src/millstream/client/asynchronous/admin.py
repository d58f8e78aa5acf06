"""Looking at the broker and changing what is on it, asynchronously; see the synchronous twin for each method."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, Unpack

from millstream.client.arguments import as_dict, as_list
from millstream.client.asking import T
from millstream.client.asynchronous.access import AsyncKeys
from millstream.client.asynchronous.administration import AsyncAdministration
from millstream.client.asynchronous.letters import AsyncDeadLetters
from millstream.client.asynchronous.mqtt import AsyncMqtt
from millstream.client.asynchronous.pipelines import AsyncPipelines
from millstream.client.asynchronous.schedules import AsyncSchedules
from millstream.client.asynchronous.webhooks import AsyncWebhooks
from millstream.client.browsing import BrowseOptions, browse_call, next_call
from millstream.client.messages import TopicPartition
from millstream.client.metadata import commit_call, offsets_call, reset_call
from millstream.client.stats import history_call
from millstream.client.tracing import TraceOptions, next_traces, traces_call
from millstream.errors import InvalidArgument
from millstream.names import DEFAULT_NAMESPACE
from millstream.wire import calls
from millstream.wire.access_calls import AuditPage, ListAudit, QuotaInfo, SetQuota, ShowQuota
from millstream.wire.message_calls import BrowseMessages, FindMessage, MessageInfo, MessagePage
from millstream.wire.stats_calls import DescribeOverview, History, Metrics, MetricsText, Overview
from millstream.wire.subscription_calls import DescribeFlow, FlowInfo, ModeInfo, SetMode
from millstream.wire.trace_calls import FindTraces, PassportInfo, ShowPassport, TraceEvent, TracePage

__all__ = ["AsyncAdmin"]

_PAGE = 1000


class AsyncAdmin:
    """The part of a client that is not about messages."""

    async def _call(self, call: calls.Call, kind: type[T]) -> T:
        raise NotImplementedError

    # --- broker and namespaces -----------------------------------------------------------------------------------

    async def ping(self) -> float:
        """Return the seconds that the broker takes to answer."""
        before_s = time.perf_counter()
        await self._call(calls.DescribeBroker(), object)
        return time.perf_counter() - before_s

    async def broker(self) -> dict[str, Any]:
        """What the broker says about itself."""
        return await self._call(calls.DescribeBroker(), dict[str, Any])

    async def namespaces(self) -> list[str]:
        return await self._call(calls.ListNamespaces(), list[str])

    async def create_namespace(self, name: str) -> None:
        await self._call(calls.CreateNamespace(name=name), object)

    async def delete_namespace(self, name: str, force: bool = False) -> None:
        """Delete a namespace; with `force`, also the topics in it."""
        await self._call(calls.DeleteNamespace(name=name, force=force), object)

    # --- topics --------------------------------------------------------------------------------------------------

    async def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, Any] | None = None, if_missing: bool = False
    ) -> calls.TopicInfo:
        """Create a topic.  Raises TopicExists unless `if_missing`."""
        call = calls.CreateTopic(
            name=name, partitions=partitions, config=as_dict("config", config), if_missing=if_missing
        )
        return await self._call(call, calls.TopicInfo)

    async def topic(self, name: str) -> calls.TopicInfo:
        """A topic with its settings and partitions."""
        return await self._call(calls.DescribeTopic(name=name), calls.TopicInfo)

    async def topics(self, pattern: str | None = None) -> list[calls.TopicInfo]:
        """All topics, or those that match `pattern` (`orders.*`, `orders.#`), by name, without their partitions."""
        found: list[calls.TopicInfo] = []
        while True:
            after = found[-1].name if found else ""
            call = calls.ListTopics(pattern=pattern, after=after, limit=_PAGE)
            page = await self._call(call, list[calls.TopicInfo])
            found += page
            if len(page) < _PAGE:
                return found

    async def alter_topic(
        self, name: str, config: Mapping[str, Any] | None = None, partitions: int | None = None
    ) -> calls.TopicInfo:
        """Change settings of a topic, or add partitions to it.  What is not named stays as it is."""
        call = calls.AlterTopic(name=name, config=as_dict("config", config), partitions=partitions)
        return await self._call(call, calls.TopicInfo)

    async def delete_topic(self, name: str, force: bool = False) -> None:
        """Delete a topic and its messages; with `force`, even while groups read it."""
        await self._call(calls.DeleteTopic(name=name, force=force), object)

    async def offsets(
        self,
        topic: str,
        at: Literal["earliest", "latest", "durable"] | datetime = "latest",
        partitions: Iterable[int] | None = None,
    ) -> dict[int, int]:
        """One offset per partition: the first, the one after the last, or that of the first message at or after a time.

        `durable` is also the offset after the last message, but after a sync: no power cut takes what lies before it.
        """
        call = offsets_call(topic, at, None if partitions is None else as_list("partitions", partitions))
        entries = await self._call(call, list[calls.OffsetEntry])
        return {entry.partition: entry.offset for entry in entries}

    # --- messages ------------------------------------------------------------------------------------------------

    async def browse(self, topic: str, *, limit: int = 100, **which: Unpack[BrowseOptions]) -> list[MessageInfo]:
        """Look at messages without consuming them, oldest first.  BrowseOptions has the conditions."""
        found: list[MessageInfo] = []
        call: BrowseMessages | None = browse_call(topic, limit, which)
        while call is not None:
            page = await self._call(call, MessagePage)
            found += page.messages
            call = next_call(call, page.after, limit - len(found))
        return found

    async def find(self, message_id: str) -> MessageInfo:
        """Find a message by its id, even one that is scheduled and not due yet.  Raises MessageNotFound."""
        return await self._call(FindMessage(id=message_id), MessageInfo)

    async def passport(self, message_id: str) -> PassportInfo:
        """Everything that is known to have happened to a message.  Raises MessageNotFound if nothing is known."""
        return await self._call(ShowPassport(id=message_id), PassportInfo)

    async def traces(self, *, limit: int = 100, **which: Unpack[TraceOptions]) -> list[TraceEvent]:
        """What was recorded about messages, newest first.

        TraceOptions has the conditions; without any, everything that was recorded is included.
        """
        found: list[TraceEvent] = []
        call: FindTraces | None = traces_call(limit, which)
        while call is not None:
            page = await self._call(call, TracePage)
            found += page.events
            call = next_traces(call, page.after, limit - len(found))
        return found

    # --- groups --------------------------------------------------------------------------------------------------

    async def groups(self) -> list[calls.GroupSummary]:
        return await self._call(calls.ListGroups(), list[calls.GroupSummary])

    async def group(self, name: str) -> calls.GroupInfo:
        """A group with its members and how far behind it is."""
        return await self._call(calls.DescribeGroup(name=name), calls.GroupInfo)

    async def reset_group(
        self,
        name: str,
        topic: str,
        to: str,
        value: int | datetime | None = None,
        partitions: Iterable[int] | None = None,
        dry_run: bool = False,
    ) -> list[calls.OffsetEntry]:
        """Move a group that has no members: `to` is earliest, latest, timestamp, offset or shift (by `value`)."""
        return await self._call(reset_call(name, topic, to, value, partitions, dry_run), list[calls.OffsetEntry])

    async def delete_group(self, name: str) -> None:
        """Delete a group and its progress."""
        await self._call(calls.DeleteGroup(name=name), object)

    async def evict_member(self, group: str, member_id: str) -> None:
        await self._call(calls.EvictMember(group=group, member_id=member_id), object)

    async def rebalance_group(self, name: str) -> calls.GroupSummary:
        """Assign the partitions of a group anew, whoever has them now."""
        return await self._call(calls.RebalanceGroup(name=name), calls.GroupSummary)

    async def pause_group(self, name: str) -> calls.GroupSummary:
        """Stop a group from reading: its members give their partitions back, and stay."""
        return await self._call(calls.PauseGroup(name=name), calls.GroupSummary)

    async def resume_group(self, name: str) -> calls.GroupSummary:
        """Let a paused group continue."""
        return await self._call(calls.PauseGroup(name=name, paused=False), calls.GroupSummary)

    async def committed(self, group: str, topics: Iterable[str] | None = None) -> list[calls.OffsetEntry]:
        """The progress of a group: the next offset that it will read, per partition."""
        call = calls.CommittedOffsets(group=group, topics=None if topics is None else as_list("topics", topics))
        return await self._call(call, list[calls.OffsetEntry])

    async def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]
    ) -> None:
        """Set the progress of a group that has no members."""
        await self._call(commit_call(group, offsets), object)

    # --- schedules -----------------------------------------------------------------------------------------------

    @property
    def schedules(self) -> AsyncSchedules:
        """Messages that are delivered later, and messages that are published again and again."""
        return AsyncSchedules(self._call)

    # --- how it is doing -----------------------------------------------------------------------------------------

    async def overview(self, limit: int = 10, everywhere: bool = False) -> Overview:
        """Rates, depth, the oldest message, memory, disk: of this namespace, or with `everywhere` of all."""
        return await self._call(DescribeOverview(limit=limit, everywhere=everywhere), Overview)

    async def history(
        self,
        metric: str,
        topic: str = "",
        group: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        points: int = 300,
    ) -> History:
        """How a metric of the broker, a topic or a group developed; by default over the last hour."""
        return await self._call(history_call(metric, topic, group, start, end, points), History)

    async def metrics(self) -> str:
        """All metrics in Prometheus' text format, as at `/metrics`."""
        metrics = await self._call(Metrics(), MetricsText)
        return metrics.text

    # --- flow and modes ------------------------------------------------------------------------------------------

    async def flow(self, topic: str) -> FlowInfo:
        """How far the consumers of a topic are behind, and what that means for its publishers."""
        return await self._call(DescribeFlow(topic=topic), FlowInfo)

    async def set_mode(self, mode: Literal["normal", "maintenance"], reason: str = "") -> ModeInfo:
        """Begin or end maintenance, during which the broker serves administrators only."""
        return await self._call(SetMode(mode=mode, reason=reason), ModeInfo)

    # --- access --------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> AsyncKeys:
        """API keys: who may use the broker."""
        return AsyncKeys(self._call)

    async def quota(self, namespace: str = DEFAULT_NAMESPACE) -> QuotaInfo:
        """The limits of a namespace, and how much of them is used."""
        return await self._call(ShowQuota(namespace=namespace), QuotaInfo)

    async def set_quota(self, namespace: str = DEFAULT_NAMESPACE, **limits: int) -> QuotaInfo:
        """Set the limits of a namespace.

        They are topics, partitions, storage_bytes, publish_messages_per_s, publish_bytes_per_s and connections.  What
        is not given has no limit.
        """
        unknown = limits.keys() - set(SetQuota.__struct_fields__)
        if unknown:
            raise InvalidArgument(f"a quota has no limit {', '.join(sorted(unknown))}")
        return await self._call(SetQuota(namespace=namespace, **limits), QuotaInfo)

    async def audit(
        self, limit: int = 100, *, key: str = "", call: str = "", since_ms: int = 0, until_ms: int = 0, after: str = ""
    ) -> AuditPage:
        """What administrators did, newest first.

        To continue where an answer ended, pass its `after`, which is empty at the end.  A call looks at a limited
        number of entries, so a page may be short, or empty, before the last one.
        """
        wanted = ListAudit(key=key, call=call, from_ms=since_ms, until_ms=until_ms, limit=limit, after=after)
        return await self._call(wanted, AuditPage)

    # --- the broker as a whole -----------------------------------------------------------------------------------

    @property
    def admin(self) -> AsyncAdministration:
        """Health, settings, files and connections, for whoever runs the broker."""
        return AsyncAdministration(self._call)

    # --- dead letters --------------------------------------------------------------------------------------------

    @property
    def dead_letters(self) -> AsyncDeadLetters:
        """Messages that queues have given up on."""
        return AsyncDeadLetters(self._call)

    # --- webhooks ------------------------------------------------------------------------------------------------

    @property
    def webhooks(self) -> AsyncWebhooks:
        """Messages of queues, delivered by HTTP."""
        return AsyncWebhooks(self._call)

    # --- MQTT ----------------------------------------------------------------------------------------------------

    @property
    def mqtt(self) -> AsyncMqtt:
        """Sessions of MQTT clients, and retained messages."""
        return AsyncMqtt(self._call)

    # --- pipelines -----------------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> AsyncPipelines:
        """Pipelines that run outside the broker and report to it."""
        return AsyncPipelines(self._call)

"""Looking at the broker and changing what is on it: one method per call of the control protocol."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, Unpack

from millstream.client.arguments import as_dict, as_list
from millstream.client.asking import T
from millstream.client.blocking.access import Keys
from millstream.client.blocking.administration import Administration
from millstream.client.blocking.letters import DeadLetters
from millstream.client.blocking.mqtt import Mqtt
from millstream.client.blocking.pipelines import Pipelines
from millstream.client.blocking.schedules import Schedules
from millstream.client.blocking.webhooks import Webhooks
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

__all__ = ["Admin"]

_PAGE = 1000


class Admin:
    """The part of a client that is not about messages."""

    def _call(self, call: calls.Call, kind: type[T]) -> T:
        raise NotImplementedError

    # --- broker and namespaces -----------------------------------------------------------------------------------

    def ping(self) -> float:
        """Return the seconds that the broker takes to answer."""
        before_s = time.perf_counter()
        self._call(calls.DescribeBroker(), object)
        return time.perf_counter() - before_s

    def broker(self) -> dict[str, Any]:
        """What the broker says about itself."""
        return self._call(calls.DescribeBroker(), dict[str, Any])

    def namespaces(self) -> list[str]:
        return self._call(calls.ListNamespaces(), list[str])

    def create_namespace(self, name: str) -> None:
        self._call(calls.CreateNamespace(name=name), object)

    def delete_namespace(self, name: str, force: bool = False) -> None:
        """Delete a namespace; with `force`, also the topics in it."""
        self._call(calls.DeleteNamespace(name=name, force=force), object)

    # --- topics --------------------------------------------------------------------------------------------------

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, Any] | None = None, if_missing: bool = False
    ) -> calls.TopicInfo:
        """Create a topic.  Raises TopicExists unless `if_missing`."""
        call = calls.CreateTopic(
            name=name, partitions=partitions, config=as_dict("config", config), if_missing=if_missing
        )
        return self._call(call, calls.TopicInfo)

    def topic(self, name: str) -> calls.TopicInfo:
        """A topic with its settings and partitions."""
        return self._call(calls.DescribeTopic(name=name), calls.TopicInfo)

    def topics(self, pattern: str | None = None) -> list[calls.TopicInfo]:
        """All topics, or those that match `pattern` (`orders.*`, `orders.#`), by name, without their partitions."""
        found: list[calls.TopicInfo] = []
        while True:
            after = found[-1].name if found else ""
            call = calls.ListTopics(pattern=pattern, after=after, limit=_PAGE)
            page = self._call(call, list[calls.TopicInfo])
            found += page
            if len(page) < _PAGE:
                return found

    def alter_topic(
        self, name: str, config: Mapping[str, Any] | None = None, partitions: int | None = None
    ) -> calls.TopicInfo:
        """Change settings of a topic, or add partitions to it.  What is not named stays as it is."""
        call = calls.AlterTopic(name=name, config=as_dict("config", config), partitions=partitions)
        return self._call(call, calls.TopicInfo)

    def delete_topic(self, name: str, force: bool = False) -> None:
        """Delete a topic and its messages; with `force`, even while groups read it."""
        self._call(calls.DeleteTopic(name=name, force=force), object)

    def offsets(
        self,
        topic: str,
        at: Literal["earliest", "latest", "durable"] | datetime = "latest",
        partitions: Iterable[int] | None = None,
    ) -> dict[int, int]:
        """One offset per partition: the first, the one after the last, or that of the first message at or after a time.

        `durable` is also the offset after the last message, but after a sync: no power cut takes what lies before it.
        """
        call = offsets_call(topic, at, None if partitions is None else as_list("partitions", partitions))
        entries = self._call(call, list[calls.OffsetEntry])
        return {entry.partition: entry.offset for entry in entries}

    # --- messages ------------------------------------------------------------------------------------------------

    def browse(self, topic: str, *, limit: int = 100, **which: Unpack[BrowseOptions]) -> list[MessageInfo]:
        """Look at messages without consuming them, oldest first.  BrowseOptions has the conditions."""
        found: list[MessageInfo] = []
        call: BrowseMessages | None = browse_call(topic, limit, which)
        while call is not None:
            page = self._call(call, MessagePage)
            found += page.messages
            call = next_call(call, page.after, limit - len(found))
        return found

    def find(self, message_id: str) -> MessageInfo:
        """Find a message by its id, even one that is scheduled and not due yet.  Raises MessageNotFound."""
        return self._call(FindMessage(id=message_id), MessageInfo)

    def passport(self, message_id: str) -> PassportInfo:
        """Everything that is known to have happened to a message.  Raises MessageNotFound if nothing is known."""
        return self._call(ShowPassport(id=message_id), PassportInfo)

    def traces(self, *, limit: int = 100, **which: Unpack[TraceOptions]) -> list[TraceEvent]:
        """What was recorded about messages, newest first.

        TraceOptions has the conditions; without any, everything that was recorded is included.
        """
        found: list[TraceEvent] = []
        call: FindTraces | None = traces_call(limit, which)
        while call is not None:
            page = self._call(call, TracePage)
            found += page.events
            call = next_traces(call, page.after, limit - len(found))
        return found

    # --- groups --------------------------------------------------------------------------------------------------

    def groups(self) -> list[calls.GroupSummary]:
        return self._call(calls.ListGroups(), list[calls.GroupSummary])

    def group(self, name: str) -> calls.GroupInfo:
        """A group with its members and how far behind it is."""
        return self._call(calls.DescribeGroup(name=name), calls.GroupInfo)

    def reset_group(
        self,
        name: str,
        topic: str,
        to: str,
        value: int | datetime | None = None,
        partitions: Iterable[int] | None = None,
        dry_run: bool = False,
    ) -> list[calls.OffsetEntry]:
        """Move a group that has no members: `to` is earliest, latest, timestamp, offset or shift (by `value`)."""
        return self._call(reset_call(name, topic, to, value, partitions, dry_run), list[calls.OffsetEntry])

    def delete_group(self, name: str) -> None:
        """Delete a group and its progress."""
        self._call(calls.DeleteGroup(name=name), object)

    def evict_member(self, group: str, member_id: str) -> None:
        self._call(calls.EvictMember(group=group, member_id=member_id), object)

    def rebalance_group(self, name: str) -> calls.GroupSummary:
        """Assign the partitions of a group anew, whoever has them now."""
        return self._call(calls.RebalanceGroup(name=name), calls.GroupSummary)

    def pause_group(self, name: str) -> calls.GroupSummary:
        """Stop a group from reading: its members give their partitions back, and stay."""
        return self._call(calls.PauseGroup(name=name), calls.GroupSummary)

    def resume_group(self, name: str) -> calls.GroupSummary:
        """Let a paused group continue."""
        return self._call(calls.PauseGroup(name=name, paused=False), calls.GroupSummary)

    def committed(self, group: str, topics: Iterable[str] | None = None) -> list[calls.OffsetEntry]:
        """The progress of a group: the next offset that it will read, per partition."""
        call = calls.CommittedOffsets(group=group, topics=None if topics is None else as_list("topics", topics))
        return self._call(call, list[calls.OffsetEntry])

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]) -> None:
        """Set the progress of a group that has no members."""
        self._call(commit_call(group, offsets), object)

    # --- schedules -----------------------------------------------------------------------------------------------

    @property
    def schedules(self) -> Schedules:
        """Messages that are delivered later, and messages that are published again and again."""
        return Schedules(self._call)

    # --- how it is doing -----------------------------------------------------------------------------------------

    def overview(self, limit: int = 10, everywhere: bool = False) -> Overview:
        """Rates, depth, the oldest message, memory, disk: of this namespace, or with `everywhere` of all."""
        return self._call(DescribeOverview(limit=limit, everywhere=everywhere), Overview)

    def history(
        self,
        metric: str,
        topic: str = "",
        group: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        points: int = 300,
    ) -> History:
        """How a metric of the broker, a topic or a group developed; by default over the last hour."""
        return self._call(history_call(metric, topic, group, start, end, points), History)

    def metrics(self) -> str:
        """All metrics in Prometheus' text format, as at `/metrics`."""
        metrics = self._call(Metrics(), MetricsText)
        return metrics.text

    # --- flow and modes ------------------------------------------------------------------------------------------

    def flow(self, topic: str) -> FlowInfo:
        """How far the consumers of a topic are behind, and what that means for its publishers."""
        return self._call(DescribeFlow(topic=topic), FlowInfo)

    def set_mode(self, mode: Literal["normal", "maintenance"], reason: str = "") -> ModeInfo:
        """Begin or end maintenance, during which the broker serves administrators only."""
        return self._call(SetMode(mode=mode, reason=reason), ModeInfo)

    # --- access --------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Keys:
        """API keys: who may use the broker."""
        return Keys(self._call)

    def quota(self, namespace: str = DEFAULT_NAMESPACE) -> QuotaInfo:
        """The limits of a namespace, and how much of them is used."""
        return self._call(ShowQuota(namespace=namespace), QuotaInfo)

    def set_quota(self, namespace: str = DEFAULT_NAMESPACE, **limits: int) -> QuotaInfo:
        """Set the limits of a namespace.

        They are topics, partitions, storage_bytes, publish_messages_per_s, publish_bytes_per_s and connections.  What
        is not given has no limit.
        """
        unknown = limits.keys() - set(SetQuota.__struct_fields__)
        if unknown:
            raise InvalidArgument(f"a quota has no limit {', '.join(sorted(unknown))}")
        return self._call(SetQuota(namespace=namespace, **limits), QuotaInfo)

    def audit(
        self, limit: int = 100, *, key: str = "", call: str = "", since_ms: int = 0, until_ms: int = 0, after: str = ""
    ) -> AuditPage:
        """What administrators did, newest first.

        To continue where an answer ended, pass its `after`, which is empty at the end.  A call looks at a limited
        number of entries, so a page may be short, or empty, before the last one.
        """
        wanted = ListAudit(key=key, call=call, from_ms=since_ms, until_ms=until_ms, limit=limit, after=after)
        return self._call(wanted, AuditPage)

    # --- the broker as a whole -----------------------------------------------------------------------------------

    @property
    def admin(self) -> Administration:
        """Health, settings, files and connections, for whoever runs the broker."""
        return Administration(self._call)

    # --- dead letters --------------------------------------------------------------------------------------------

    @property
    def dead_letters(self) -> DeadLetters:
        """Messages that queues have given up on."""
        return DeadLetters(self._call)

    # --- webhooks ------------------------------------------------------------------------------------------------

    @property
    def webhooks(self) -> Webhooks:
        """Messages of queues, delivered by HTTP."""
        return Webhooks(self._call)

    # --- MQTT ----------------------------------------------------------------------------------------------------

    @property
    def mqtt(self) -> Mqtt:
        """Sessions of MQTT clients, and retained messages."""
        return Mqtt(self._call)

    # --- pipelines -----------------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> Pipelines:
        """Pipelines that run outside the broker and report to it."""
        return Pipelines(self._call)

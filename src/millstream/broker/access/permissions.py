"""What a key must allow for each call: the table that every door obeys.

A rule says which permission a call needs and on what.  Names are those of the caller's namespace: topics, patterns,
ids of messages (which lead to a topic) and groups (which lead to the topics they read).  A call that is not in the
table needs an administrator of the whole broker, and a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from millstream.access.rights import ANYWHERE, EVERY_NAMESPACE, EVERY_TOPIC
from millstream.errors import InvalidArgument
from millstream.mqtt.topics import to_pattern
from millstream.receipts import ReceiptHandle
from millstream.wire import (
    access_calls,
    admin_calls,
    calls,
    letter_calls,
    message_calls,
    mqtt_calls,
    pipeline_calls,
    queue_calls,
    schedule_calls,
    stage_calls,
    stats_calls,
    subscription_calls,
    trace_calls,
    webhook_calls,
)

__all__ = ["PERMISSIONS", "UNKNOWN", "Need", "Rule", "looks_inside", "names_of"]


class Need(NamedTuple):
    """A permission, and on what: a topic or pattern unless `kind` says otherwise."""

    permission: str
    name: str = ANYWHERE
    #: topic, message (an id), group, repeating (the name of a recurring schedule), namespace (all of it), or within
    #: (anything in that namespace).
    kind: str = "topic"


#: Whether a topic may be shown: takes its name.
Sees = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one call needs."""

    permission: str
    needs: Callable[[Any], Iterable[Need]]
    #: Whether it is written down who called it.
    audited: bool
    #: What is left of a list for somebody who does not see everything.
    shown: Callable[[Any, Sees], Any] | None = None


def _rule(
    permission: str,
    needs: Callable[[Any], Iterable[Need]],
    *,
    audited: bool | None = None,
    shown: Callable[[Any, Sees], Any] | None = None,
) -> Rule:
    return Rule(permission, needs, permission == "admin" if audited is None else audited, shown)


def _anywhere(permission: str, **options: Any) -> Rule:
    """Somewhere in the namespace; what the call touches is the caller's own, or is filtered."""
    return _rule(permission, lambda _: (Need(permission),), **options)


def _topic(permission: str, field: str = "topic", **options: Any) -> Rule:
    return _rule(permission, lambda call: (Need(permission, getattr(call, field) or EVERY_TOPIC),), **options)


def _topics(permission: str, field: str) -> Rule:
    return _rule(
        permission, lambda call: [Need(permission, name) for name in getattr(call, field)] or (Need(permission),)
    )


def _all_topics(permission: str, **options: Any) -> Rule:
    """All topics of the namespace."""
    return _rule(permission, lambda _: (Need(permission, EVERY_TOPIC),), **options)


def _message(permission: str, field: str = "id", **options: Any) -> Rule:
    return _rule(permission, lambda call: (Need(permission, getattr(call, field), "message"),), **options)


def _group(permission: str, field: str, **options: Any) -> Rule:
    return _rule(permission, lambda call: (Need(permission, getattr(call, field), "group"),), **options)


def _repeating(permission: str, **options: Any) -> Rule:
    return _rule(permission, lambda call: (Need(permission, call.name, "repeating"),), **options)


def _namespace(permission: str, field: str, **options: Any) -> Rule:
    return _rule(permission, lambda call: (Need(permission, getattr(call, field), "namespace"),), **options)


def _broker(permission: str = "admin", **options: Any) -> Rule:
    """The whole broker."""
    return _rule(permission, lambda _: (Need(permission, EVERY_NAMESPACE, "namespace"),), **options)


# --- calls that need more than one thing -------------------------------------------------------------------------


def _new_topic(call: calls.CreateTopic | calls.AlterTopic) -> Iterable[Need]:
    yield Need("admin", call.name)
    letters = call.config.get("dead_letter_topic")
    if isinstance(letters, str) and letters:  # the broker will write there on this topic's behalf
        yield Need("produce", letters)


def _metadata(call: calls.Metadata) -> Iterable[Need]:
    return [Need("produce" if call.create else "any", name) for name in call.topics]


def _health(call: admin_calls.CheckHealth) -> Iterable[Need]:
    """Anybody may ask how it is; having it write and read for that takes a key."""
    return (Need("read"),) if call.deep else ()


def _compact(call: admin_calls.Compact) -> Iterable[Need]:
    yield Need("admin", call.topic) if call.topic else Need("admin", EVERY_NAMESPACE, "namespace")


def _commit(call: calls.CommitOffsets) -> Iterable[Need]:
    yield Need("consume")
    for entry in call.offsets:
        yield Need("consume", entry.topic)


def _lease(call: queue_calls.LeaseMessages) -> Iterable[Need]:
    # Of a consumer on which topics was asked when it was opened, by the same connection.
    yield Need("consume") if call.consumer else Need("consume", call.topic or EVERY_TOPIC)


def _settle(call: queue_calls.SettleMessages) -> Iterable[Need]:
    yield Need("consume")
    for item in call.items:
        with suppress(InvalidArgument):  # refused later, like every receipt that is not known
            yield Need("consume", ReceiptHandle.parse(item.receipt).topic)


def _explain(call: queue_calls.Explain) -> Iterable[Need]:
    yield Need("read", call.id, "message") if call.id else Need("read", call.topic)


def _cancel(call: schedule_calls.CancelSchedules) -> Iterable[Need]:
    if call.topic or not call.ids:
        yield Need("produce", call.topic)
    for message in call.ids:
        yield Need("produce", message, "message")


def _repeat(call: schedule_calls.Repeat) -> Iterable[Need]:
    yield Need("produce", call.topic)
    yield Need("produce", call.name, "repeating")  # it may replace one that publishes elsewhere


def _letters(permission: str) -> Callable[[Any], Iterable[Need]]:
    def needs(call: Any) -> Iterable[Need]:
        for letter in getattr(call, "ids", ()):
            yield Need(permission, letter, "message")
        if not getattr(call, "ids", ()):
            yield Need(permission, call.filter.topic or EVERY_TOPIC)
        if getattr(call, "target", ""):
            yield Need("produce", call.target)

    return needs


def _overview(call: stats_calls.DescribeOverview | mqtt_calls.DescribeMqtt) -> Iterable[Need]:
    yield Need("read", EVERY_NAMESPACE, "namespace") if call.everywhere else Need("read")


def _retained(permission: str, field: str) -> Rule:
    """The topics of an MQTT filter; what is no topic needs the right in all of them."""
    return _rule(permission, lambda call: (Need(permission, to_pattern(getattr(call, field)) or EVERY_TOPIC),))


def _pipeline(call: pipeline_calls.ReportPipeline) -> Iterable[Need]:
    """Whoever reports reads and writes these topics itself."""
    yield Need("any")
    for topic in (*call.sources, *call.sinks):
        yield Need("any", topic)


def _history(call: stats_calls.ReadHistory) -> Iterable[Need]:
    yield Need("read", call.topic) if call.topic else Need("read")


# --- what lists show ---------------------------------------------------------------------------------------------


def _by_topic(rows: list[Any], sees: Sees) -> list[Any]:
    return [row for row in rows if sees(row.topic)]


def _by_topics(rows: list[Any], sees: Sees) -> list[Any]:
    return [row for row in rows if not row.topics or any(map(sees, row.topics))]


def _by_pipeline(rows: list[Any], sees: Sees) -> list[Any]:
    return [row for row in rows if all(map(sees, (*row.sources, *row.sinks)))]


def _seen(overview: stats_calls.Overview, sees: Sees) -> stats_calls.Overview:
    """The sums stay: they name nothing."""
    overview.busiest = _by_topic(overview.busiest, sees)
    overview.furthest_behind = _by_topic(overview.furthest_behind, sees)
    return overview


PERMISSIONS: Final[dict[type, Rule]] = {
    calls.DescribeBroker: _anywhere("any"),
    calls.CreateNamespace: _namespace("admin", "name"),
    calls.DeleteNamespace: _namespace("admin", "name"),
    calls.ListNamespaces: _rule("any", lambda _: ()),
    calls.CreateTopic: _rule("admin", _new_topic),
    calls.DescribeTopic: _topic("read", "name"),
    calls.ListTopics: _anywhere("any"),
    calls.AlterTopic: _rule("admin", _new_topic),
    calls.DeleteTopic: _topic("admin", "name"),
    calls.Metadata: _rule("any", _metadata),
    calls.ListOffsets: _topic("read"),
    calls.NewProducer: _anywhere("produce"),
    calls.JoinGroup: _topics("consume", "topics"),
    calls.HeartbeatGroup: _anywhere("consume"),
    calls.LeaveGroup: _anywhere("consume"),
    calls.CommitOffsets: _rule("consume", _commit),
    calls.CommittedOffsets: _group("read", "group"),
    calls.ListGroups: _anywhere("read", shown=_by_topics),
    calls.DescribeGroup: _group("read", "name"),
    calls.ResetOffsets: _topic("admin"),
    calls.DeleteGroup: _group("admin", "name"),
    calls.EvictMember: _group("admin", "group"),
    calls.RebalanceGroup: _group("admin", "name"),
    calls.PauseGroup: _group("admin", "name"),
    queue_calls.OpenQueue: _topic("consume"),
    queue_calls.CloseQueue: _anywhere("consume"),
    queue_calls.ConfigureQueue: _topic("admin"),
    queue_calls.DeleteQueue: _topic("admin"),
    queue_calls.PurgeQueue: _topic("admin"),
    queue_calls.ListQueues: _anywhere("read", shown=_by_topic),
    queue_calls.DescribeQueue: _topic("read"),
    queue_calls.LeaseMessages: _rule("consume", _lease),
    queue_calls.SettleMessages: _rule("consume", _settle),
    queue_calls.ClaimMessages: _topic("consume"),
    queue_calls.SettleClaim: _anywhere("consume"),
    queue_calls.ExtendClaim: _anywhere("consume"),
    queue_calls.PeekQueue: _topic("read"),
    queue_calls.DescribeMessage: _message("read"),
    queue_calls.Explain: _rule("read", _explain),
    schedule_calls.ListSchedules: _topic("read"),
    schedule_calls.DescribeSchedule: _message("read"),
    schedule_calls.CancelSchedules: _rule("produce", _cancel, audited=True),
    schedule_calls.MoveSchedule: _message("produce"),
    schedule_calls.ScheduleStats: _anywhere("read", shown=_by_topic),
    schedule_calls.Repeat: _rule("produce", _repeat, audited=True),
    schedule_calls.ListRepeating: _anywhere("read", shown=_by_topic),
    schedule_calls.DescribeRepeating: _repeating("read"),
    schedule_calls.PauseRepeating: _repeating("produce", audited=True),
    schedule_calls.DeleteRepeating: _repeating("produce", audited=True),
    subscription_calls.OpenSubscription: _topics("consume", "patterns"),
    subscription_calls.CloseSubscription: _anywhere("any"),
    subscription_calls.OpenInbox: _anywhere("any"),
    subscription_calls.DescribeFlow: _topic("any"),
    subscription_calls.SetMode: _broker(),
    letter_calls.ListLetters: _rule("read", _letters("read")),
    letter_calls.ShowLetter: _message("read"),
    letter_calls.CountLetters: _rule("read", _letters("read")),
    letter_calls.PurgeLetters: _rule("admin", _letters("admin")),
    letter_calls.ReplayLetters: _rule("admin", _letters("admin")),
    letter_calls.ListReplays: _all_topics("read"),
    letter_calls.ShowReplay: _all_topics("read"),
    letter_calls.AbortReplay: _all_topics("admin"),
    stats_calls.DescribeOverview: _rule("read", _overview, shown=_seen),
    stats_calls.ReadHistory: _rule("read", _history),
    stats_calls.Metrics: _broker("read"),
    webhook_calls.CreateWebhook: _topic("admin"),
    webhook_calls.ListWebhooks: _anywhere("read", shown=_by_topic),
    webhook_calls.DescribeWebhook: _all_topics("read"),
    webhook_calls.UpdateWebhook: _all_topics("admin"),
    webhook_calls.PauseWebhook: _all_topics("admin"),
    webhook_calls.RotateSecret: _all_topics("admin"),
    webhook_calls.DeleteWebhook: _all_topics("admin"),
    webhook_calls.TestWebhook: _all_topics("admin"),
    message_calls.BrowseMessages: _topic("read"),
    message_calls.FindMessage: _message("read"),
    message_calls.SummarizeTopics: _anywhere("read"),
    mqtt_calls.DescribeMqtt: _rule("read", _overview),
    mqtt_calls.ListSessions: _all_topics("read"),
    mqtt_calls.ShowSession: _all_topics("read"),
    mqtt_calls.DisconnectSession: _all_topics("admin"),
    mqtt_calls.ForgetSession: _all_topics("admin"),
    mqtt_calls.ListRetained: _retained("read", "filter"),
    mqtt_calls.ShowRetained: _retained("read", "topic"),
    mqtt_calls.ClearRetained: _retained("admin", "filter"),
    stage_calls.OpenStage: _anywhere("produce"),
    # On which topics is known when messages are put and published; the stages ask for each of them.
    stage_calls.PublishStages: _anywhere("produce"),
    stage_calls.AbortStages: _anywhere("produce"),
    stage_calls.ListStages: _all_topics("read"),
    pipeline_calls.ReportPipeline: _rule("any", _pipeline),
    pipeline_calls.ListPipelines: _anywhere("read", shown=_by_pipeline),
    pipeline_calls.ShowPipeline: _all_topics("read"),
    pipeline_calls.StopPipeline: _all_topics("admin"),
    pipeline_calls.ForgetPipeline: _all_topics("admin"),
    trace_calls.ShowPassport: _message("read"),
    trace_calls.FindTraces: _topic("read"),
    admin_calls.CheckHealth: _rule("open", _health),
    admin_calls.ShowConfig: _broker(audited=False),
    admin_calls.SetLogLevel: _broker(),
    admin_calls.Checkpoint: _broker(),
    admin_calls.Compact: _rule("admin", _compact),
    admin_calls.HoldFiles: _broker(),
    admin_calls.ReleaseFiles: _broker(audited=False),
    admin_calls.ListConnections: _broker(audited=False),
    admin_calls.Disconnect: _broker(),
    access_calls.CreateKey: _broker(),
    access_calls.ListKeys: _broker(audited=False),
    access_calls.RotateKey: _broker(),
    access_calls.RevokeKey: _broker(),
    access_calls.SetQuota: _broker(),
    access_calls.ShowQuota: _rule("read", lambda call: (Need("read", call.namespace, "within"),)),
    access_calls.ListAudit: _broker(audited=False),
}

#: For a call that somebody forgot: not an open door.
UNKNOWN: Final = _broker()


def looks_inside(call: object) -> bool:
    """Whether a call is about what is in the caller's namespace already, so that there must be one.

    Who publishes, or makes a topic, makes the namespace with it.  Streams may wait for it.  The history of no topic
    is the broker's.
    """
    rule = PERMISSIONS.get(type(call), UNKNOWN)
    if isinstance(call, calls.CreateTopic | stats_calls.ReadHistory):
        return False
    if rule.permission not in ("read", "admin") and not isinstance(call, subscription_calls.OpenSubscription):
        return False
    return all(need.kind not in ("namespace", "within") for need in rule.needs(call))


#: Fields that name things, in the order in which an audit entry shows them; values and secrets are not among them.
_NAMING: Final = (
    "namespace",
    "name",
    "topic",
    "topics",
    "filter",
    "group",
    "client_id",
    "member_id",
    "id",
    "ids",
    "target",
    "mode",
    "roles",
)


def names_of(call: object) -> list[str]:
    """What a call names, for people; at most a hundred, each cut at a length."""
    found: list[str] = []
    for field in _NAMING:
        value = getattr(call, field, None)
        values = value if isinstance(value, list) else [value]
        found += [one[:255] for one in values[:100] if one and isinstance(one, str)]
    return found[:100]

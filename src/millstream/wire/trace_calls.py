"""The control calls about what has happened to messages.

Failures are always recorded, successes are sampled.  A call that looks through the records works for about a second and
then answers with what it has and with `after`: where the next call goes on.  Empty = done.  Keys are base64 in JSON.
"""

from __future__ import annotations

from millstream.wire.forms import AnswerForm, CallForm

__all__ = ["FindTraces", "PassportEvent", "PassportInfo", "ShowPassport", "TraceEvent", "TracePage"]


class ShowPassport(CallForm, tag="trace.passport"):
    """Answers with PassportInfo: everything that is known to have happened to one message."""

    id: str


class PassportEvent(AnswerForm):
    #: published, stored, scheduled, moved, fired, cancelled, leased, acked, nacked, timeout, returned, rejected,
    #: dead_lettered, expired, evicted, purged, replayed or waiting.
    kind: str
    time_ms: int
    group: str = ""
    consumer: str = ""
    error: str = ""
    note: str = ""
    #: The id of another message: the dead letter, what was replayed, what was scheduled.
    link: str = ""


class PassportInfo(AnswerForm):
    """`events` are in the order in which they happened."""

    id: str
    topic: str
    partition: int
    offset: int
    #: From the header `traceparent`; without one, the message has a trace of its own.
    trace_id: str
    key: bytes | None
    events: list[PassportEvent]
    #: False when there are more records than could be looked through.
    complete: bool = True


class FindTraces(CallForm, tag="trace.find"):
    """Answers with TracePage: what was recorded, the newest first.  All conditions that are set must hold; without
    any, that is what happened last in the namespace.

    With a topic, and a key or a trace id, the topic itself is looked through as well, after the records: what is stored
    there and was never recorded, because all went well, is shown as `stored`.
    """

    trace_id: str = ""
    #: Empty = all topics.
    topic: str = ""
    #: Goes with a topic.
    key: bytes | None = None
    #: When it happened: from `from_ms` on and before `until_ms`; 0 = no limit.
    from_ms: int = 0
    until_ms: int = 0
    failures_only: bool = False
    after: str = ""
    limit: int = 100


class TraceEvent(AnswerForm):
    """Something that happened to a message, or to `messages` messages that were too many to name."""

    #: Empty if it is about many messages.
    id: str
    topic: str
    partition: int
    offset: int
    kind: str
    time_ms: int
    trace_id: str = ""
    key: bytes | None = None
    group: str = ""
    consumer: str = ""
    error: str = ""
    note: str = ""
    link: str = ""
    messages: int = 1


class TracePage(AnswerForm):
    events: list[TraceEvent]
    after: str = ""

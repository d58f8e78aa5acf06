"""The control calls about MQTT and their answers: sessions of clients, and retained messages.

Sessions and retained messages belong to a namespace, as topics do.  Topics are named as MQTT names them: `a/b`.
"""

from __future__ import annotations

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "ClearRetained",
    "DescribeMqtt",
    "DisconnectSession",
    "Disconnected",
    "ForgetSession",
    "ListRetained",
    "ListSessions",
    "MqttOverview",
    "RetainedCleared",
    "RetainedInfo",
    "RetainedMessage",
    "RetainedPage",
    "SessionInfo",
    "SessionPage",
    "SessionPlace",
    "SessionSubscription",
    "SessionSummary",
    "ShowRetained",
    "ShowSession",
]


class DescribeMqtt(CallForm, tag="mqtt.overview"):
    """Answers with MqttOverview: of the namespace, or of all of them with `everywhere`."""

    everywhere: bool = False


class MqttOverview(AnswerForm):
    #: Empty when it is about all of them.
    namespace: str
    connected: int
    #: Connected or remembered; those that outlive their connection; and those among them whose client is away.
    sessions: int
    durable: int
    away: int
    subscriptions: int
    retained: int
    retained_bytes: int
    #: Messages through MQTT in all namespaces, since the broker started.
    received: int
    sent: int
    dropped: int
    #: What the whole broker may have of them.
    sessions_max: int
    retained_max: int
    retained_bytes_max: int


# --- sessions ----------------------------------------------------------------------------------------------------


class ListSessions(CallForm, tag="mqtt.sessions"):
    """Answers with SessionPage, in the order of client ids."""

    #: How client ids begin.
    prefix: str = ""
    #: None: whether its client is there or not.
    connected: bool | None = None
    limit: int = 100
    #: The last client id of the page before.
    after: str = ""


class SessionSummary(AnswerForm):
    client_id: str
    connected: bool
    #: Of the client that is there: 4 is MQTT 3.1.1, 5 is 5.0; 0 while there is none.
    version: int
    address: str
    #: Since when its client is connected; 0 while there is none.
    connected_ms: int
    #: How long it outlives its connection; 0: it does not.
    expiry_s: int
    #: When it ends if its client does not come back; 0 while there is one.
    ends_ms: int
    subscriptions: int
    #: Sent with QoS 1 or 2 and not confirmed.
    in_flight: int
    #: Not in the log, and waiting until the client reads.
    queued: int
    #: In the log, of topics it has subscribed to, and not handed out.  A list leaves out partitions that nobody has
    #: used since the broker started.
    waiting: int
    #: Messages it has missed because of a limit, since it connected for the first time or the broker started.
    dropped: int


class SessionPage(AnswerForm):
    sessions: list[SessionSummary]
    #: For the next call; empty = that was all.
    after: str = ""


class ShowSession(CallForm, tag="mqtt.session"):
    """Answers with SessionInfo."""

    client_id: str


class SessionSubscription(AnswerForm):
    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    #: 0 = none.
    identifier: int = 0
    #: The queue group that messages are leased from; empty = they are those of topics.
    group: str = ""


class SessionPlace(AnswerForm):
    """A partition that has messages for a session."""

    topic: str
    partition: int
    #: The next offset to hand out, and the end.
    offset: int
    end: int


class SessionInfo(SessionSummary):
    created_ms: int
    #: 0 = none, or no client is there.
    keep_alive_s: int
    subscribed: list[SessionSubscription]
    #: Where `waiting` comes from, the most first; a hundred at most.
    behind: list[SessionPlace]
    #: Published by the client with QoS 2 and not released.
    receiving: int
    #: What is published when it is lost; empty = nothing.
    will_topic: str


class DisconnectSession(CallForm, tag="mqtt.disconnect"):
    """Ends the connection of a client, which may come back.  Its will is published.  Answers with Disconnected."""

    client_id: str
    #: For the client, if it speaks version 5.
    reason: str = ""


class Disconnected(AnswerForm):
    #: Whether there was a connection.
    disconnected: bool


class ForgetSession(CallForm, tag="mqtt.forget"):
    """Ends a session, and the connection of its client: subscriptions, and what it has not received, are gone."""

    client_id: str


# --- retained messages -------------------------------------------------------------------------------------------


class ListRetained(CallForm, tag="mqtt.retained"):
    """Answers with RetainedPage, in the order of topics, level by level."""

    filter: str = "#"
    limit: int = 100
    #: The last topic of the page before.
    after: str = ""


class RetainedInfo(AnswerForm):
    topic: str
    #: Bytes of the payload.
    size: int
    qos: int
    #: 0: the broker publishes it itself.
    stored_ms: int
    #: When it is taken out; 0 = never.
    expiry_ms: int
    #: Who published it; empty if it came through another door.
    client_id: str
    content_type: str


class RetainedPage(AnswerForm):
    messages: list[RetainedInfo]
    #: For the next call; empty = that was all.
    after: str = ""


class ShowRetained(CallForm, tag="mqtt.retained_message"):
    """Answers with RetainedMessage."""

    topic: str


class RetainedMessage(RetainedInfo):
    payload: bytes
    user_properties: list[tuple[str, str]]


class ClearRetained(CallForm, tag="mqtt.clear_retained"):
    """Takes out the retained messages whose topics match.  Subscribers are not told.  Answers with RetainedCleared."""

    #: A topic, or a filter with wildcards.
    filter: str
    #: Only count.
    dry_run: bool = False


class RetainedCleared(AnswerForm):
    cleared: int

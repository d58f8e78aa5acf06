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
    #: Empty if the figures are about all namespaces.
    namespace: str
    connected: int
    #: Sessions that are connected or remembered.
    sessions: int
    #: Sessions that outlive their connection.
    durable: int
    #: Sessions that outlive their connection and whose client is away.
    away: int
    subscriptions: int
    retained: int
    retained_bytes: int
    #: Messages received through MQTT, in all namespaces, since the broker started.
    received: int
    #: Messages sent through MQTT, in all namespaces, since the broker started.
    sent: int
    #: Messages of MQTT that were dropped, in all namespaces, since the broker started.
    dropped: int
    #: How many sessions the whole broker may have.
    sessions_max: int
    #: How many retained messages the whole broker may have.
    retained_max: int
    #: How many bytes of retained messages the whole broker may have.
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
    #: The version of its connected client: 4 is MQTT 3.1.1, 5 is 5.0; 0 while none is connected.
    version: int
    address: str
    #: Since when its client is connected; 0 while none is.
    connected_ms: int
    #: How long the session outlives its connection; 0 = it does not.
    expiry_s: int
    #: When the session ends if its client does not come back; 0 while the client is connected.
    ends_ms: int
    subscriptions: int
    #: Messages sent with QoS 1 or 2 and not confirmed.
    in_flight: int
    #: Messages that are not in the log, and wait until the client reads.
    queued: int
    #: Messages in the log, of topics that the session has subscribed to, and not handed out.  A list leaves out
    #: partitions that nobody has used since the broker started.
    waiting: int
    #: Messages that the session missed because of a limit, since it first connected or the broker started.
    dropped: int


class SessionPage(AnswerForm):
    sessions: list[SessionSummary]
    #: Pass it to the next call; empty = that was all.
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
    #: The queue group that messages are leased from; empty = the messages are those of topics.
    group: str = ""


class SessionPlace(AnswerForm):
    """A partition that has messages for a session."""

    topic: str
    partition: int
    #: The next offset to hand out.
    offset: int
    #: The end of the partition.
    end: int


class SessionInfo(SessionSummary):
    created_ms: int
    #: 0 = none, or no client is connected.
    keep_alive_s: int
    subscribed: list[SessionSubscription]
    #: The partitions that `waiting` comes from, those with the most messages first; a hundred at most.
    behind: list[SessionPlace]
    #: Messages published by the client with QoS 2 and not released.
    receiving: int
    #: The topic of what is published when the client is lost; empty = nothing is.
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
    #: When the message was stored; 0 = the broker publishes it itself.
    stored_ms: int
    #: When the message is removed; 0 = never.
    expiry_ms: int
    #: The client that published it; empty if it came through another door.
    client_id: str
    content_type: str


class RetainedPage(AnswerForm):
    messages: list[RetainedInfo]
    #: Pass it to the next call; empty = that was all.
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

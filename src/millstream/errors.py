"""Everything Millstream raises on purpose, and the numbers these errors have on the wire.

An error is a situation with a name.  `code` (the name) and `number` are protocol: they are never reused and never
change meaning.  The text is for people and may be improved at any time.  `retriable` says whether the same request can
succeed later without being changed.  Any other exception that escapes the public API is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from millstream.foreign import visible

__all__ = [
    "BatchDamaged",
    "ConfigInvalid",
    "ConnectionLost",
    "ConnectionNotFound",
    "DataDamaged",
    "DataDirLocked",
    "FilesHeld",
    "Forbidden",
    "GroupNotEmpty",
    "GroupNotFound",
    "HoldLost",
    "InternalError",
    "InvalidArgument",
    "InvalidName",
    "KeyNotFound",
    "MemberFenced",
    "MessageGone",
    "MessageNotFound",
    "MethodNotAllowed",
    "MillstreamError",
    "NamespaceNotEmpty",
    "NamespaceNotFound",
    "NewerData",
    "NoReplyAddress",
    "NotLeader",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionNotFound",
    "PathNotFound",
    "PayloadTooLarge",
    "PipelineNotFound",
    "ProducerFenced",
    "ProtocolViolation",
    "QueueFull",
    "QuotaExceeded",
    "ReadOnly",
    "Rebalancing",
    "ReceiptInvalid",
    "ReplayNotFound",
    "RequestError",
    "RequestTimeout",
    "ScheduleFired",
    "ScheduleNotFound",
    "SessionNotFound",
    "ShuttingDown",
    "StageLost",
    "StaleGeneration",
    "StartFailed",
    "StorageFailed",
    "SubscriptionNotFound",
    "Throttled",
    "TopicExists",
    "TopicNotFound",
    "Unauthorized",
    "UnavailableError",
    "UnknownMember",
    "UnsupportedMediaType",
    "UnsupportedVersion",
    "WebhookNotFound",
    "catalogue",
    "error_from_wire",
]


class MillstreamError(Exception):
    """Base of everything this package raises on purpose."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 255
    retriable: ClassVar[bool] = False
    #: What to do about it, in one sentence; shown by `millstream errors explain`.
    remedy: ClassVar[str] = "Look into the broker's log for the matching entry and report it."
    #: From `publish_many`: the receipts of the messages that are stored nevertheless, by their place in what was given
    #: (0, 1, ...).  A message that is not here was refused, or is in doubt if the connection was lost.
    confirmed: Mapping[int, Any] = MappingProxyType({})

    def __str__(self) -> str:
        """The sentence, in which what others have named does nothing to the terminal that shows it."""
        return visible(super().__str__())

    @property
    def message(self) -> str:
        return str(self)


class RequestError(MillstreamError):
    """The request cannot succeed as sent; repeating it will not help."""


class UnavailableError(MillstreamError):
    """The request was fine, but it cannot be served now.  Try again."""

    retriable = True


class InternalError(MillstreamError):
    """The broker failed in a way it did not foresee."""


class TopicNotFound(RequestError):
    """The topic does not exist and may not be created by this request."""

    code, number = "TOPIC_NOT_FOUND", 1
    remedy = "Look for it with `millstream topic list`, or create it with `millstream topic create NAME`."


class QuotaExceeded(RequestError):
    """A limit of the broker, topic or namespace is reached."""

    code, number = "QUOTA_EXCEEDED", 2
    remedy = "Raise the limit that the message names, or remove what is no longer needed."


class ProtocolViolation(RequestError):
    """The peer sent bytes that the protocol does not allow; the connection is closed."""

    code, number = "INVALID_FORMAT", 3
    remedy = "Check that the client speaks the native protocol of docs/protocol.md on this port."


class Unauthorized(RequestError):
    """A key is needed, and there was none, or it is not valid or no longer valid."""

    code, number = "UNAUTHORIZED", 4
    remedy = "Give a key: MILLSTREAM_KEY, --api-key, connect(key=...) or the header Authorization: Bearer KEY."


class PayloadTooLarge(RequestError):
    """A message, batch or frame is larger than the limit."""

    code, number = "PAYLOAD_TOO_LARGE", 5
    remedy = "Send smaller messages, or allow larger ones: `millstream topic alter TOPIC -c max_message_bytes=8MiB`."


class Throttled(UnavailableError):
    """The client is sending faster than it may."""

    code, number = "THROTTLED", 6
    remedy = "Slow down and try again."
    #: How long to wait, where that is known.
    retry_after_ms: int = 0


class StaleGeneration(RequestError):
    """A group member used an assignment that is no longer its own."""

    code, number = "STALE_GENERATION", 7
    remedy = "Nothing: the SDK drops the partition and takes up its new assignment."


class NotLeader(UnavailableError):
    """Another node leads this partition."""

    code, number = "NOT_LEADER", 8
    remedy = "Refresh the metadata and send the request to the leader."


class ReadOnly(UnavailableError):
    """The broker is delivering but not accepting messages."""

    code, number = "READ_ONLY", 9
    remedy = "Free disk space or end the maintenance mode; publishing resumes by itself."


class UnsupportedVersion(RequestError):
    """The peer asked for a version of the protocol, of a frame or of a batch that this side does not know."""

    code, number = "UNSUPPORTED_VERSION", 10
    remedy = "Use a client and a broker that share a protocol version."


class InvalidName(RequestError):
    """A namespace, topic or group name breaks the naming rules."""

    code, number = "INVALID_NAME", 12
    remedy = "Use another name, as the message says."


class Rebalancing(UnavailableError):
    """The group is handing partitions over; the operation must wait."""

    code, number = "REBALANCING", 13
    remedy = "Try again in a moment."


class TopicExists(RequestError):
    """A topic of this name already exists."""

    code, number = "TOPIC_EXISTS", 20
    remedy = "Use another name, or change the existing topic with `millstream topic alter`."


class PartitionNotFound(RequestError):
    """The topic has no partition of this number."""

    code, number = "PARTITION_NOT_FOUND", 21
    remedy = "Look up the partition count with `millstream topic show NAME`."


class OffsetOutOfRange(RequestError):
    """The offset lies before the first or after the last message of the partition."""

    code, number = "OFFSET_OUT_OF_RANGE", 22
    remedy = "Read from 'earliest', 'latest' or an offset inside the range that the message names."


class OutOfSequence(RequestError):
    """A batch of a producer does not follow the previous one; a batch in between is missing."""

    code, number = "OUT_OF_SEQUENCE", 23
    remedy = "Nothing: the SDK sends the missing batch again, in order."


class ProducerFenced(RequestError):
    """A newer producer has taken over this producer id."""

    code, number = "PRODUCER_FENCED", 24
    remedy = "Stop the older of the two producers that share an identity."


class GroupNotFound(RequestError):
    """The group does not exist."""

    code, number = "GROUP_NOT_FOUND", 25
    remedy = "List them with `millstream group list`, those of queues with `millstream queue list`."


class UnknownMember(RequestError):
    """The member is not part of its group, or no longer is."""

    code, number = "UNKNOWN_MEMBER", 26
    remedy = "Consumers join again by themselves; `millstream group show GROUP` lists the members."


class MemberFenced(RequestError):
    """Another process has joined the group under this member's instance id and has taken its place."""

    code, number = "MEMBER_FENCED", 36
    remedy = "Give each process an instance id of its own, or stop the older of the two."


class NamespaceNotFound(RequestError):
    """The namespace does not exist."""

    code, number = "NAMESPACE_NOT_FOUND", 27
    remedy = "Look for it with `millstream namespace list`, or create it with `millstream namespace create NAME`."


class NamespaceNotEmpty(RequestError):
    """The namespace still holds topics."""

    code, number = "NAMESPACE_NOT_EMPTY", 28
    remedy = "Delete its topics first, or use --force."


class ConfigInvalid(RequestError):
    """A configuration key is unknown or its value is not allowed."""

    code, number = "CONFIG_INVALID", 29
    remedy = (
        "Fix what the message names; `millstream config show` lists the settings of a broker, `millstream topic show` "
        "those of a topic."
    )


class BatchDamaged(UnavailableError):
    """A batch does not match its checksum or its own structure."""

    code, number = "BATCH_DAMAGED", 30
    remedy = "Nothing: the SDK sends the batch again.  If it persists, check memory and network hardware."


class StorageFailed(UnavailableError):
    """The disk refused to store data; nothing was confirmed."""

    code, number = "STORAGE_FAILED", 31
    remedy = "Check the disk and free space, then restart the broker; it recovers what is provably stored."


class NewerData(StorageFailed):
    """The stored data was written by a newer version of Millstream; nothing was changed."""

    code, number = "NEWER_DATA", 58
    retriable = False
    remedy = "Use the version that wrote it or a newer one; to go back, restore a backup from before the upgrade."


class ShuttingDown(UnavailableError):
    """The broker is shutting down and takes no new work."""

    code, number = "SHUTTING_DOWN", 32
    remedy = "Nothing: the SDK connects again."


class DataDamaged(RequestError):
    """Stored messages failed their checksum and are not served; the rest of the log is readable."""

    code, number = "DATA_DAMAGED", 33
    remedy = "Inspect with `millstream log verify`; read past it by continuing the iteration or on_damage='skip'."


class InvalidArgument(RequestError):
    """An argument of the request is not allowed."""

    code, number = "INVALID_ARGUMENT", 34
    remedy = "Change the argument that the message names."


class GroupNotEmpty(RequestError):
    """The group has live members, so its offsets cannot be changed from outside."""

    code, number = "GROUP_NOT_EMPTY", 35
    remedy = "Stop the group's members first."


class ReceiptInvalid(RequestError):
    """The lease of a receipt has ended, belongs to somebody else or never existed; nothing was changed."""

    code, number = "RECEIPT_INVALID", 40
    remedy = "Nothing: if it was not settled before, it is delivered again.  If that happens often, use a longer lease."


class MessageGone(ReceiptInvalid):
    """The message of a receipt is no longer in the log and is not delivered again; nothing was changed."""

    code, number = "MESSAGE_GONE", 57
    remedy = (
        "If it was not settled before: set cleanup=settled on the topic, so that retention waits, or retain longer."
    )


class QueueFull(UnavailableError):
    """The topic holds as many unsettled messages as it may."""

    code, number = "QUEUE_FULL", 41
    remedy = "Wait for consumers to catch up, add some, or raise max_depth of the topic."


class MessageNotFound(RequestError):
    """No message has this id, or it is no longer stored."""

    code, number = "MESSAGE_NOT_FOUND", 42
    remedy = "Check the id; retention may have removed the message."


class ScheduleNotFound(RequestError):
    """Nothing is scheduled under this id, key or name."""

    code, number = "SCHEDULE_NOT_FOUND", 43
    remedy = "See what is pending, `millstream schedule list TOPIC`, and what repeats, `millstream schedule repeating`."


class ScheduleFired(RequestError):
    """The scheduled message was already delivered and can be neither moved nor cancelled."""

    code, number = "SCHEDULE_FIRED", 44
    remedy = "Nothing can be done; the message is in the topic."


class ReplayNotFound(RequestError):
    """No replay has this id."""

    code, number = "REPLAY_NOT_FOUND", 45
    remedy = "List the replays with `millstream dlq replays`."


class NoReplyAddress(RequestError):
    """The message does not say where a reply should go."""

    code, number = "NO_REPLY_ADDRESS", 46
    remedy = "Reply only to messages that were sent with `request`."


class SubscriptionNotFound(RequestError):
    """The connection has no subscription or queue consumer of this number."""

    code, number = "SUBSCRIPTION_NOT_FOUND", 47
    remedy = "Nothing: the SDK opens it again."


class Forbidden(RequestError):
    """The key is valid, but its roles and scopes do not allow this."""

    code, number = "FORBIDDEN", 48
    remedy = (
        "Use a key whose role and scope cover it (see `millstream key create`), unless the message says that none does."
    )


class KeyNotFound(RequestError):
    """No key has this id."""

    code, number = "KEY_NOT_FOUND", 49
    remedy = "List them with `millstream key list`."


class WebhookNotFound(RequestError):
    """No webhook has this id."""

    code, number = "WEBHOOK_NOT_FOUND", 50
    remedy = "List them with `millstream webhook list`."


class SessionNotFound(RequestError):
    """No MQTT client has a session under this client id."""

    code, number = "SESSION_NOT_FOUND", 53
    remedy = "List the sessions of the namespace: `millstream mqtt sessions`."


class StageLost(RequestError):
    """A stage no longer exists, or no longer has everything that was put into it."""

    code, number = "STAGE_LOST", 54
    remedy = "Run the task again: it opens a stage of its own.  Raise stages.ttl_ms if stages expire too early."


class PipelineNotFound(RequestError):
    """No pipeline of this name has reported."""

    code, number = "PIPELINE_NOT_FOUND", 55
    remedy = "List them with `millstream pipeline list`."


class HoldLost(RequestError):
    """The broker's files are no longer held: the time was up, or the connection that held them is gone."""

    code, number = "HOLD_LOST", 51
    remedy = "Begin the backup again; what was copied so far is not a backup."


class FilesHeld(UnavailableError):
    """Somebody else already holds the broker's files."""

    code, number = "FILES_HELD", 52
    remedy = "Wait until the other backup is done; a hold whose owner is gone ends by itself."


class ConnectionNotFound(RequestError):
    """No client is connected under this id: it has gone, or has come back under another one."""

    code, number = "CONNECTION_NOT_FOUND", 56
    remedy = "List the connections: `millstream admin connections`."


class ConnectionLost(UnavailableError):
    """The connection to the broker ended before the answer came."""

    code, number = "CONNECTION_LOST", 60
    remedy = "Check that the broker runs and the address is right; the SDK connects again by itself."


class RequestTimeout(UnavailableError):
    """No answer came within the time the caller allowed."""

    code, number = "TIMEOUT", 61
    remedy = "Allow more time, or look at the broker's load."


class PathNotFound(RequestError):
    """The path does not exist in the HTTP API."""

    code, number = "PATH_NOT_FOUND", 70
    remedy = "See /api/v1/docs for everything that exists."


class MethodNotAllowed(RequestError):
    """The path exists in the HTTP API, but not with this method."""

    code, number = "METHOD_NOT_ALLOWED", 71
    remedy = "Use one of the methods that the header Allow names."
    allowed: tuple[str, ...] = ()


class UnsupportedMediaType(RequestError):
    """The content type of an HTTP request says nothing about what is in the body."""

    code, number = "UNSUPPORTED_MEDIA_TYPE", 72
    remedy = "Say with the header Content-Type what the body is, application/json for messages as JSON."


class DataDirLocked(MillstreamError):
    """Another process uses this data directory."""

    code, number = "DATA_DIR_LOCKED", 62
    remedy = "Stop the other broker, or start this one with another --data directory."


class StartFailed(MillstreamError):
    """The broker cannot start with this configuration on this machine."""

    code, number = "START_FAILED", 63
    remedy = "Change what the message names: data directory, port, address, permissions, limits or packages."


def catalogue() -> dict[int, type[MillstreamError]]:
    """Every error with a number, by number.  A number used twice is a programming error."""
    found: dict[int, type[MillstreamError]] = {}

    def visit(error: type[MillstreamError]) -> None:
        if "number" in vars(error):
            assert found.setdefault(error.number, error) is error, f"error number {error.number} is used twice"
        for child in error.__subclasses__():
            visit(child)

    visit(MillstreamError)
    return found


_CATALOGUE: Final = catalogue()


def error_from_wire(number: int, text: str) -> MillstreamError:
    """The exception for an error answer; a number from a newer broker becomes an InternalError that names it."""
    error = _CATALOGUE.get(number)
    if error is None or error is MillstreamError:
        return InternalError(f"{text} (error {number})" if number != InternalError.number else text)
    return error(text)

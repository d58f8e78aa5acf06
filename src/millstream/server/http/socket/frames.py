"""What is said over a WebSocket: JSON documents, told apart by `type`.

Whatever a client sends, `decode` answers with a frame or with what is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Meta

from millstream.errors import InvalidArgument, MillstreamError
from millstream.server.http.endpoints import decode_with
from millstream.server.http.families.queues import LeasedView, LeaseMs, Policy, Reason, Receipts
from millstream.server.http.incoming import ShownMessage
from millstream.server.http.outgoing import Fsync, NewMessage
from millstream.server.http.parameters import DurationMs
from millstream.server.http.problems import Problem
from millstream.values import Encoding
from millstream.wire.queue_calls import Action, SettleItem

__all__ = [
    "CREDIT_MAX",
    "Ack",
    "Auth",
    "Bye",
    "ClientFrame",
    "Consume",
    "Credit",
    "DeliveredMessages",
    "ErrorFrame",
    "Extend",
    "Flow",
    "FrameId",
    "LeasedMessages",
    "Nack",
    "Ping",
    "Pong",
    "Publish",
    "Reject",
    "Release",
    "Result",
    "SettleFrame",
    "Subscribe",
    "Unreadable",
    "Unsubscribe",
    "Welcome",
    "decode",
    "encode",
]

#: Messages that a consumer may hold, or that may be on their way to a subscription.
CREDIT_MAX: Final = 10_000

#: What a client calls its request; its answer has the same.
FrameId: TypeAlias = Annotated[str, Meta(max_length=100)] | int | None
CreditCount: TypeAlias = Annotated[int, Meta(ge=0, le=CREDIT_MAX)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]


# --- from the client ---------------------------------------------------------------------------------------------


class _Frame(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    id: FrameId = None


class Auth(_Frame, tag="auth"):
    """The first frame of a client that could not send its key with the request."""

    key: Annotated[str, Meta(max_length=1000)]


class Subscribe(_Frame, tag="subscribe"):
    """Messages of matching topics from now on, without a lease."""

    patterns: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    #: Messages that may come before the client says that it has read some; null = as fast as it reads.
    credit: CreditCount | None = None
    encoding: Encoding = "auto"


class Consume(_Frame, tag="consume"):
    """Leased messages of a queue group, which is made if there is none."""

    topic: str
    group: str = "default"
    #: Messages that may be unsettled at a time.
    credit: CreditCount = 10
    lease_ms: LeaseMs = 0
    policy: Policy | None = None
    #: Messages are acked when they are sent, as fast as they are read; what does not arrive is lost.
    auto_ack: bool = False
    #: A name for people.
    name: Annotated[str, Meta(max_length=200)] = ""
    encoding: Encoding = "auto"


class Unsubscribe(_Frame, tag="unsubscribe"):
    """The end of a subscription, or of a consumer: what that holds goes back at once."""

    subscription: Number | None = None
    consumer: Number | None = None


class Credit(_Frame, tag="credit"):
    """Room for more messages: of a subscription, that were read; of a consumer, at a time."""

    more: Annotated[int, Meta(ge=1, le=CREDIT_MAX)]
    subscription: Number | None = None
    consumer: Number | None = None


class _Settle(_Frame):
    action: ClassVar[Action]
    receipts: Receipts

    def items(self) -> list[SettleItem]:
        """What the broker is told, one for each receipt."""
        reason, delay_ms = getattr(self, "reason", ""), getattr(self, "delay_ms", None)
        return [
            SettleItem(receipt=receipt, action=self.action, reason=reason, delay_ms=delay_ms)
            for receipt in self.receipts
        ]


class Ack(_Settle, tag="ack"):
    action = "ack"


class Nack(_Settle, tag="nack"):
    action = "nack"
    reason: Reason = ""
    #: Until the next try; by the retry policy if left out.
    delay_ms: DurationMs | None = None


class Reject(_Settle, tag="reject"):
    action = "reject"
    reason: Reason = ""


class Extend(_Settle, tag="extend"):
    action = "extend"
    #: From now; as long as the lease was if left out.
    delay_ms: DurationMs | None = None


class Release(_Settle, tag="release"):
    """Give back what was not worked on; it does not count as a failure."""

    action = "release"


class Publish(_Frame, tag="publish"):
    topic: str
    #: One, or a list.
    messages: NewMessage | list[NewMessage]
    fsync: Fsync = ""


class Ping(_Frame, tag="ping"):
    pass


SettleFrame: TypeAlias = Ack | Nack | Reject | Extend | Release
ClientFrame: TypeAlias = Auth | Subscribe | Consume | Unsubscribe | Credit | SettleFrame | Publish | Ping

_decoder: Final = msgspec.json.Decoder(ClientFrame)


class _Named(msgspec.Struct):
    id: FrameId = None


_named: Final = msgspec.json.Decoder(_Named)


class Unreadable(msgspec.Struct):
    """Something that is no frame."""

    id: FrameId
    error: MillstreamError


def decode(data: str | bytes) -> ClientFrame | Unreadable:
    """What a client said."""
    try:
        frame: ClientFrame = decode_with(_decoder.decode, data, what="frame", kind=ClientFrame)  # type: ignore[arg-type]
        return frame
    except InvalidArgument as error:
        return Unreadable(_id_in(data), error)


def _id_in(data: str | bytes) -> FrameId:
    """What a frame calls itself although it is wrong, so that its sender knows which it was."""
    try:
        return decode_with(_named.decode, data).id  # type: ignore[arg-type]
    except InvalidArgument:
        return None


# --- to the client -----------------------------------------------------------------------------------------------


class _Told(msgspec.Struct, kw_only=True, tag_field="type"):
    pass


class Welcome(_Told, tag="welcome"):
    """The first frame: everything is well, and these are the limits."""

    node_id: str
    software: str
    namespace: str
    frame_bytes_max: int
    credit_max: int
    #: How often the broker looks whether the client is there, by a ping of the WebSocket protocol.
    ping_ms: int


class Result(_Told, tag="result"):
    id: FrameId
    result: Any = None


class Pong(_Told, tag="pong"):
    id: FrameId
    time_ms: int


class ErrorFrame(_Told, tag="error", kw_only=True, omit_defaults=True):
    """What is wrong: with the frame of this `id`, with a consumer or a subscription, or with the connection."""

    id: FrameId = None
    consumer: int | None = None
    error: Problem


class LeasedMessages(_Told, tag="messages"):
    consumer: int
    messages: list[LeasedView]


class DeliveredMessages(_Told, tag="messages"):
    subscription: int
    #: Messages that did not come because the client was slow to read, or had given no credit.
    missed: int
    messages: list[ShownMessage]


class Flow(_Told, tag="flow"):
    """Publishers of a topic (of all topics when none is named) should wait this long before each publish."""

    topic: str
    level: str
    delay_ms: int
    reason: str


class Bye(_Told, tag="bye"):
    """The last frame before the broker closes the connection."""

    reason: str


_encoder: Final = msgspec.json.Encoder()


def encode(frame: _Told) -> str:
    return _encoder.encode(frame).decode()

"""Calls about subscriptions, inboxes, flow and the broker's mode."""

from __future__ import annotations

from typing import Literal

import msgspec

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "CloseSubscription",
    "DescribeFlow",
    "FlowInfo",
    "FlowNotice",
    "ModeInfo",
    "OpenInbox",
    "OpenSubscription",
    "SetMode",
    "Subscribed",
]


class OpenSubscription(CallForm, tag="sub.open"):
    """From now on messages of every matching topic, present or future, come as DELIVERY frames.  Ends with the
    connection at the latest.  Answers with Subscribed."""

    patterns: list[str]


class OpenInbox(CallForm, tag="inbox.open"):
    """An address for replies: what is published there is not stored, only delivered to this connection.

    `address` takes up again, after a reconnect, the one this client had before.  Answers with Subscribed.
    """

    address: str = ""


class Subscribed(AnswerForm):
    subscription: int
    #: The topic that stands for an inbox.
    address: str = ""


class CloseSubscription(CallForm, tag="sub.close"):
    subscription: int


# --- flow and modes ----------------------------------------------------------------------------------------------


class FlowNotice(msgspec.Struct, kw_only=True):
    """What a FLOW frame says: publishers of a topic (of all topics when none is named) should slow down, or need not
    any more."""

    topic: str
    level: Literal["normal", "warning", "critical", "overloaded"]
    #: Wait this long before each publish.
    delay_ms: int
    reason: str = ""


class DescribeFlow(CallForm, tag="topic.flow"):
    """Answers with FlowInfo."""

    topic: str


class FlowInfo(AnswerForm):
    topic: str
    level: Literal["normal", "warning", "critical", "overloaded"]
    #: Age of the oldest message that a queue group has not settled.
    lag_ms: int
    depth: int
    #: 1 = at the limit; 0 if the topic has no limit.
    pressure: float
    trend: Literal["increasing", "stable", "decreasing"]
    delay_ms: int
    #: How long until nothing waits any more if this goes on; None if it does not get less.
    catch_up_ms: int | None
    advice: Literal["none", "light", "moderate", "heavy"]
    throttle_lag_ms: int
    throttle_depth: int
    #: Whether level, trend, delay and the rest come from measurements: a topic with limits is measured while somebody
    #: publishes to it.  How much waits, and for how long, is always looked up.
    measured: bool = True


class SetMode(CallForm, tag="broker.mode"):
    """An operator begins maintenance (`maintenance`) or ends it (`normal`).  Answers with ModeInfo."""

    mode: Literal["normal", "maintenance"]
    reason: str = ""


class ModeInfo(AnswerForm):
    mode: str
    reason: str

"""Whatever a client sends over a WebSocket is a frame or one sentence; what it is sent keeps to its credit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.entries import encode_entries
from millstream.errors import InvalidArgument
from millstream.server.http.incoming import ShownMessage, shown_messages
from millstream.server.http.socket import frames
from millstream.server.http.socket.mailbox import Mailbox
from millstream.wire.deliveries import Delivery

KINDS = ["auth", "subscribe", "consume", "unsubscribe", "credit", "ack", "nack", "extend", "publish", "ping", "x", 1]
FIELDS = ["id", "key", "patterns", "credit", "topic", "receipts", "messages", "more", "delay_ms", "policy", "encoding"]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800")
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
frame_like = st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, values))


def check(data: str | bytes) -> None:
    found = frames.decode(data)
    if isinstance(found, frames.Unreadable):
        assert isinstance(found.error, InvalidArgument)
        assert str(found.error)
    else:
        assert isinstance(found.id, str | int | None)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_a_frame_or_an_error(data: str | bytes) -> None:
    check(data)


@given(frame_like)
def test_anything_like_a_frame_is_one_or_an_error(frame: dict[str, Any]) -> None:
    check(json.dumps(frame))
    check(json.dumps(frame, ensure_ascii=False).encode(errors="surrogatepass"))


@given(st.integers(0, 10_000), st.text(max_size=100))
def test_a_wrong_frame_is_known_by_its_id(credit: int, name: str) -> None:
    found = frames.decode(json.dumps({"id": name, "type": "consume", "credit": credit, "topic": 7}))
    assert isinstance(found, frames.Unreadable)
    assert found.id == name


def delivery(first: int, count: int, missed: int = 0) -> Delivery:
    head, tail = encode_entries([str(number).encode() for number in range(first, first + count)], base_timestamp_us=1)
    return Delivery(1, missed, "orders", 0, 7, [bytes(head) + bytes(tail)])


@given(
    st.integers(0, 50) | st.none(),
    st.lists(st.tuples(st.sampled_from(["offer", "give", "read"]), st.integers(1, 30)), max_size=40),
)
def test_a_subscription_gets_messages_in_order_and_never_beyond_its_credit(
    credit: int | None, steps: list[tuple[str, int]]
) -> None:
    mailbox = Mailbox(bytes_max=2_000)
    mailbox.open(1, credit, "auto")
    given_credit, offered, taken = credit, 0, []
    got: list[int] = []
    for what, number in steps:
        if what == "offer":
            if mailbox.offer(delivery(offered, number)):
                taken += range(offered, offered + number)
            else:
                assert mailbox.refused
            offered += number
        elif what == "give":
            assert mailbox.give(1, number)
            given_credit = None if given_credit is None else given_credit + number
        else:
            got += [int(message.value) for frame in mailbox.frames() for message in frame.messages]
            expected = len(taken) if given_credit is None else min(len(taken), given_credit)
            assert got == taken[:expected]


def test_what_waits_for_a_slow_subscriber_is_bounded() -> None:
    mailbox = Mailbox(bytes_max=10_000)
    mailbox.open(1, 0, "auto")
    mailbox.open(2, None, "auto")
    taken = 0
    while mailbox.offer(delivery(0, 20)):
        taken += 1
    assert 5 < taken < 60
    assert mailbox.offer(delivery(0, 20)._replace(subscription=2)), "who reads is not held up by who does not"
    assert not mailbox.offer(delivery(0, 1)._replace(subscription=3)), "nobody has subscribed"
    mailbox.close(1)
    mailbox.open(1, 1_000_000, "auto")
    assert mailbox.offer(delivery(0, 3, missed=17))
    [frame] = [frame for frame in mailbox.frames() if frame.subscription == 1]
    assert (frame.missed, len(frame.messages)) == (17, 3)


def test_large_deliveries_are_bounded_for_all_subscriptions_together() -> None:
    mailbox = Mailbox(bytes_max=1_000_000)
    for number in range(1, 33):
        mailbox.open(number, 1, "auto")
    head, tail = encode_entries([bytes(1000)] * 800, base_timestamp_us=1)
    large = bytes(head) + bytes(tail)
    taken = [number for number in range(1, 33) if mailbox.offer(Delivery(number, 0, "t", 0, 1, (large,)))]
    assert taken == [1]
    assert mailbox.owes_word, "for the others nothing waits that would bring up what they missed"
    assert mailbox.offer(Delivery(2, 800, "t", 0, 1, ())), "which they can be told"
    assert [frame.missed for frame in mailbox.frames()] == [0, 800]
    assert not mailbox.offer(Delivery(2, 0, "t", 0, 1, (large,))), "the first one is open, and not read to its end"
    mailbox.give(1, 1_000)
    for _ in mailbox.frames():
        pass
    assert mailbox.offer(Delivery(2, 0, "t", 0, 1, (large,)))


def test_what_is_said_about_missed_messages_is_bounded_and_adds_up() -> None:
    mailbox = Mailbox(bytes_max=10_000)
    mailbox.open(1, 0, "auto")
    while mailbox.offer(delivery(0, 20)):
        pass
    told = sum(mailbox.offer(Delivery(1, 1, "", 0, 0, ())) for _ in range(10_000))
    assert told < 100, "each would be kept until there is credit"
    mailbox.give(1, 1_000_000)
    assert sum(frame.missed for frame in mailbox.frames()) == told


def test_a_batch_is_opened_as_far_as_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = 0

    def counted(*arguments: Any) -> Iterator[ShownMessage]:
        nonlocal shown
        for message in shown_messages(*arguments):
            shown += 1
            yield message

    monkeypatch.setattr("millstream.server.http.socket.mailbox.shown_messages", counted)
    mailbox = Mailbox(bytes_max=10_000_000)
    mailbox.open(1, 10, "auto")
    mailbox.offer(delivery(0, 5_000))
    assert [len(frame.messages) for frame in mailbox.frames()] == [10]
    assert shown < 20, "a batch may hold a million messages"
    mailbox.give(1, 4_990)
    assert sum(len(frame.messages) for frame in mailbox.frames()) == 4_990


def test_a_large_delivery_comes_in_several_frames() -> None:
    mailbox = Mailbox(bytes_max=10_000_000)
    mailbox.open(1, None, "auto")
    mailbox.offer(delivery(0, 1_200))
    assert [len(frame.messages) for frame in mailbox.frames()] == [500, 500, 200]

"""Ways around: what a key may not do by one call it may not do by another, and nothing is done unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import millstream
from millstream.access.rights import Access, Scope
from millstream.errors import BatchDamaged, Forbidden, InvalidName, QuotaExceeded
from millstream.testing.broker import BrokerForTests
from millstream.wire import access_calls, letter_calls
from millstream.wire.messages import decode_publish_result, encode_publish_head
from millstream.wire.queue_calls import CloseQueue, OpenQueue, QueueOpened
from millstream.wire.subscription_calls import OpenInbox, OpenSubscription
from tests.e2e.access_world import guarded, key_for
from tests.native import NativeClient
from tests.waiting import eventually


@pytest.fixture
def broker() -> Iterator[BrokerForTests]:
    with guarded() as broker:
        yield broker


@pytest.fixture
def admin(broker: BrokerForTests) -> millstream.Client:
    return broker.connect(key=key_for(broker, "admin"))


# --- dead letters ------------------------------------------------------------------------------------------------


def _forged(client: millstream.Client, topic: str) -> letter_calls.ReplayLetters:
    """A replay of a letter that says it came from another topic: headers are anybody's to write."""
    letter = client.publish("orders.dlq", b"forged", headers={"millstream-dead-topic": topic})
    return letter_calls.ReplayLetters(ids=[letter.id])


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_letter_that_names_a_topic_outside_the_scope_is_not_replayed_there(
    broker: BrokerForTests, admin: millstream.Client, dry_run: bool
) -> None:
    for topic in ("orders.new", "orders.dlq", "payments"):
        admin.create_topic(topic)
    limited = broker.connect(key=key_for(broker, "admin", scopes=["orders.*"]))
    call = msgspec.structs.replace(_forged(limited, "payments"), dry_run=dry_run)
    with pytest.raises(Forbidden, match="payments"):
        limited.call(call, Any)
    assert admin.topic("payments").partitions[0].high_watermark == 0
    allowed = _forged(limited, "orders.new")
    limited.call(allowed, Any)
    eventually(lambda: admin.topic("orders.new").partitions[0].high_watermark == 1)


def test_not_even_an_administrator_writes_to_the_audit_log_by_a_replay(admin: millstream.Client) -> None:
    admin.create_topic("orders.dlq")
    with pytest.raises(Forbidden, match="_audit"):
        admin.call(_forged(admin, "_audit"), Any)
    newest = admin.call(access_calls.ListAudit(limit=1), access_calls.AuditPage).entries[0]
    assert (newest.call, newest.outcome) == ("dlq.replay", "FORBIDDEN")


# --- the audit log -----------------------------------------------------------------------------------------------


def test_who_goes_away_in_the_middle_is_written_down_all_the_same(
    broker: BrokerForTests, admin: millstream.Client
) -> None:
    admin.create_topic("orders.dlq")
    for _ in range(3):
        admin.publish("orders.dlq", b"died")

    async def begin_and_go_away() -> None:
        session = broker.broker.open_session(
            namespace="default",
            client_id="hasty",
            address="",
            push=lambda _: None,
            access=Access("hasty", ("admin",), (Scope(),)),
        )
        call = letter_calls.PurgeLetters(everything=True)
        purging = asyncio.ensure_future(broker.broker.call(session, call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        purging.cancel()
        await asyncio.wait([purging])
        broker.broker.session_closed(session)

    broker.run(begin_and_go_away())
    page = admin.call(access_calls.ListAudit(key="hasty"), access_calls.AuditPage)
    assert [entry.call for entry in page.entries] == ["dlq.purge"]
    assert page.entries[0].outcome != "done"


# --- quotas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["orders.dlq", "_mine"])
def test_a_topic_counts_whatever_it_is_called(admin: millstream.Client, name: str) -> None:
    admin.set_quota("default", topics=1)
    admin.create_topic("orders")
    for attempt in (lambda: admin.create_topic(name), lambda: admin.publish(name, b"")):
        with pytest.raises(QuotaExceeded, match="1 topics"):
            attempt()


def test_names_alone_do_not_make_room(admin: millstream.Client) -> None:
    admin.set_quota("default", topics=2)
    admin.create_topic("_one")
    admin.create_topic("_two")
    with pytest.raises(QuotaExceeded):
        admin.create_topic("_three")


def test_a_quota_does_not_keep_a_message_from_dying(admin: millstream.Client) -> None:
    admin.create_topic("orders")
    admin.set_quota("default", topics=1)
    admin.publish("orders", b"bad")
    with admin.queue("orders") as queue:
        queue.reject(queue.lease(1, wait="10s"), "bad")
    eventually(lambda: any(topic.name == "orders.dlq" for topic in admin.topics()))


@pytest.mark.parametrize("size", [0, 1, 63])
def test_a_batch_that_is_too_short_is_refused_with_a_quota_as_without(
    broker: BrokerForTests, admin: millstream.Client, size: int
) -> None:
    admin.create_topic("orders")
    admin.set_quota("default", publish_bytes_per_s=1000)
    with NativeClient(broker.address, hello=False) as client:
        client.hello(token=key_for(broker, "produce"))
        head = encode_publish_head(b"orders", 0, acks=1, fsync=0, batch_size=size, correlation=7)
        client.socket.sendall(head + b"x" * size)
        with pytest.raises(BatchDamaged):
            decode_publish_result(client.answer(7))


# --- memory ------------------------------------------------------------------------------------------------------


def test_what_is_remembered_about_a_key_does_not_grow_with_the_names_it_asks_for(broker: BrokerForTests) -> None:
    key = key_for(broker, "read")
    client = broker.connect(key=key)
    for number in range(5):
        with pytest.raises(InvalidName):
            client.topic(f"{'x' * 100_000}{number}")
    access = broker.broker.access.authenticate(key, "")
    assert sum(len(topic) for _, _, topic in access._known) < 10_000


# --- who goes away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["orders", "*"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_goes_while_it_opens_something_leaves_nothing_behind(
    broker: BrokerForTests, admin: millstream.Client, turns: int, known: bool, topic: str
) -> None:
    admin.create_topic("orders")
    if known:
        opened = admin.call(OpenQueue(topic=topic), QueueOpened)
        admin.call(CloseQueue(consumer=opened.consumer), None)

    async def come_and_go() -> None:
        session = broker.broker.open_session(
            namespace="default",
            client_id="hasty",
            address="",
            push=lambda _: None,
            access=Access("hasty", ("admin",), (Scope(),)),
        )
        calls = [
            asyncio.ensure_future(broker.broker.call(session, call))
            for call in (OpenQueue(topic=topic), OpenSubscription(patterns=["#"]), OpenInbox())
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        broker.broker.session_closed(session)
        await asyncio.wait(calls)

    broker.run(come_and_go())
    assert admin.queues.describe("orders").consumers == []
    assert broker.broker.metrics.subscriptions == 0
    admin.delete_topic("orders")

"""Queues: what is handed out, what is said about it, and what happens when the connection or a lease is lost."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest
from fake_queues import FakeQueues

import millstream
from millstream.client.blocking import queue as blocking_queue
from millstream.client.blocking.queue import Queue
from millstream.client.settling import is_lost
from millstream.errors import InvalidArgument, ReceiptInvalid, ShuttingDown, TopicNotFound
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.leases import Scope, Settled
from tests.waiting import eventually


@pytest.fixture
def fake() -> Iterator[FakeQueues]:
    with FakeQueues() as broker:
        yield broker


def fill(client: millstream.Client, count: int, topic: str = "t") -> list[bytes]:
    values = [b"%05d" % number for number in range(count)]
    for at in range(0, count, 100):
        client.publish_many(topic, values[at : at + 100])
    return values


def leased(fake: FakeQueues) -> int:
    return sum(held.left.bit_count() for held in list(fake.leases.values()))


def test_the_thread_that_extends_leases_outlives_what_it_does_not_know(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended, and leases ran out in the hands of those who worked on."""
    looks: list[float] = []
    look_after = Queue._look_after

    def look(queue: Queue) -> float:
        looks.append(0.0)
        if len(looks) == 1:
            raise RuntimeError("what nobody thought of")
        return look_after(queue)

    monkeypatch.setattr(Queue, "_look_after", look)
    with client.queue("t") as queue:
        queue._wake.knock()
        eventually(lambda: looks)
        queue._wake.knock()
        eventually(lambda: len(looks) > 1)
    assert "what nobody thought of" in caplog.text


# --- handing out -----------------------------------------------------------------------------------------------------


def test_every_message_is_handed_out_once_and_acked(fake: FakeQueues, client: millstream.Client) -> None:
    values = fill(client, 1000)
    with client.queue("t", prefetch=100, timeout_s=10) as queue:
        seen = []
        for message in islice(queue, 1000):
            seen.append(message.value)
            message.ack()
    assert seen == values
    assert len(fake.acked) == 1000
    assert queue.stats.acked == queue.stats.delivered == 1000
    assert fake.closed_consumers == [1]


def test_acks_travel_together(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1000)
    with client.queue("t", prefetch=200, timeout_s=10) as queue:
        for message in islice(queue, 1000):
            message.ack()
    assert all(entry.scope != Scope.ONE for entry in fake.settles)
    assert len(fake.settles) < 50


def test_no_more_is_leased_than_prefetch_allows(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 100)
    with client.queue("t", prefetch=10) as queue:
        held = [queue.next(5) for _ in range(10)]
        assert queue.next(0.05) is None
        assert leased(fake) == 10
        held[3].ack()  # type: ignore[union-attr]
        eventually(lambda: queue.next(0.1) is not None)


def test_what_a_message_says_about_its_delivery(fake: FakeQueues, client: millstream.Client) -> None:
    receipt = client.publish("t", b"x", key=b"k", headers={"a": "b"})
    with client.queue("t", group="billing", lease="30s") as queue:
        message = queue.next(5)
        assert message is not None
        assert (message.id, message.value, message.key, message.headers) == (receipt.id, b"x", b"k", {"a": "b"})
        assert (message.group, message.delivery_count, message.failures, message.redelivered) == (
            "billing",
            1,
            0,
            False,
        )
        assert 25 < message.lease_deadline.timestamp() - time.time() < 35
        assert message.receipt == "t:0:0:1:0000000000000001"
        message.nack("later", wait=True)
        again = queue.next(5)
        assert again is not None
        assert (again.delivery_count, again.failures, again.redelivered) == (2, 1, True)


def test_leaving_the_loop_gives_back_what_was_not_handed_out(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 100)
    with client.queue("t", prefetch=50) as queue:
        taken = []
        for message in queue:
            taken.append(message)
            if len(taken) == 3:
                eventually(lambda: leased(fake) == 50)
                break
        eventually(lambda: leased(fake) == 3)
        taken[2].ack()  # what is in hand is still ours
        eventually(lambda: fake.acked == [("t", 0, 2)])
    assert set(fake.released) >= set(range(3, 50))


def test_a_queue_that_is_dropped_gives_everything_back(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 20)
    for message in client.queue("t", prefetch=10):
        message.ack()
        break
    gc.collect()
    eventually(lambda: fake.acked == [("t", 0, 0)])
    with client.queue("t", timeout_s=10) as other:
        assert len({message.offset for message in islice(other, 19) if message.ack() is None}) == 19


def test_dropping_a_queue_does_not_wait_for_a_broker_that_takes_nothing(
    fake: FakeQueues, client: millstream.Client
) -> None:
    """Whoever drops the last reference waits meanwhile, whatever he does: it was half a minute, and then a fifth of a
    second for each."""
    fill(client, 100)
    queues = [client.queue("t", prefetch=5) for _ in range(10)]
    taken = [queue.next(5) for queue in queues]
    eventually(lambda: leased(fake) == 50)
    waited_s = 0.0
    with fake._state:  # it reads nothing that comes behind the next ack
        while queues:
            queue, message = queues.pop(), taken.pop()
            transport = queue._transport
            assert message is not None
            assert transport is not None
            message.ack()
            queue.flush()
            with contextlib.suppress(BlockingIOError), socket.socket(fileno=os.dup(transport.fileno())) as link:
                while True:  # until the link is full
                    link.send(encode_frame(FrameType.HEARTBEAT, b"") * 1000, socket.MSG_DONTWAIT)
            before_s = time.monotonic()
            del queue, message
            waited_s += time.monotonic() - before_s
            assert transport.lost is not None
    assert waited_s < 1


def test_the_end_of_a_program_waits_for_all_of_its_queues_together(fake: FakeQueues) -> None:
    """Each had a second of its own to hear from a broker that says nothing."""
    client = millstream.connect(fake.address)
    client.publish("t", b"x")
    queues = [client.queue("t") for _ in range(8)]
    with fake._state:
        begun_s = time.monotonic()
        blocking_queue._close_all()
        assert time.monotonic() - begun_s < 4
    assert all(queue._closed for queue in queues)
    client.close()


def test_a_queue_that_is_closed_while_it_connects_again_keeps_no_connection(
    fake: FakeQueues, client: millstream.Client
) -> None:
    queue = client.queue("t")
    asked, go_on = threading.Event(), threading.Event()

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    fake.before["OpenQueue"] = answer_late
    waiting = threading.Thread(target=queue.next, daemon=True)
    waiting.start()
    fake.drop_all()
    assert asked.wait(20)
    queue.close()
    go_on.set()
    waiting.join(20)
    assert not waiting.is_alive()
    eventually(lambda: fake.consumer_is_gone(2))


def test_messages_that_come_after_the_loop_ended_go_back(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish("t", b"first")
    with client.queue("t", prefetch=4) as queue:
        for message in queue:
            message.ack()
            break
        fill(client, 4)  # answers the requests that are still waiting
        eventually(lambda: fake.released and not leased(fake))
        with client.queue("t", timeout_s=10) as other:
            assert {message.offset for message in islice(other, 4)} == {1, 2, 3, 4}


def test_pulling_a_few_at_a_time(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 12)
    with client.queue("t") as queue:
        messages = queue.lease(max=10)
        assert [message.offset for message in messages] == list(range(10))
        assert queue.ack(messages) == [Settled.DONE] * 10
        assert len(queue.lease(max=10)) == 2
        assert queue.lease(max=10, wait="20ms") == []
        late = threading.Timer(0.05, lambda: client.publish("t", b"late"))
        late.start()
        assert [message.value for message in queue.lease(wait="5s")] == [b"late"]
        late.join()


def test_drain_ends_the_loop_and_keeps_what_is_in_hand(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 100)
    with client.queue("t", prefetch=50) as queue:
        held = []
        for message in queue:
            held.append(message)
            if len(held) == 5:
                queue.drain()
        assert len(held) == 5
        assert queue.ack(held) == [Settled.DONE] * 5


def test_several_threads_take_from_one_queue(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 500)
    seen: list[int] = []
    with client.queue("t", prefetch=20) as queue:

        def work() -> None:
            while len(seen) < 500:
                if (message := queue.next(0.1)) is not None:
                    seen.append(message.offset)
                    message.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(seen) == list(range(500))
    assert len(set(fake.acked)) == 500


# --- settling --------------------------------------------------------------------------------------------------------


def test_an_ack_is_said_while_the_handler_sleeps(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 10)
    with client.queue("t", ack_linger="10ms") as queue:
        message = queue.next(5)
        assert message is not None
        message.ack()
        eventually(lambda: fake.acked == [("t", 0, 0)])  # nobody asks the queue for anything meanwhile


def test_settles_with_a_reason_and_a_time(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 3)
    with client.queue("t") as queue:
        first, second, third = queue.lease(max=3)
        first.nack("db down", retry_after="10s")
        second.reject("bad payload")
        third.extend("2m")
    assert fake.nacked[0] == (0, "db down", 10_000)
    assert fake.rejected == [(1, "bad payload")]
    assert [(entry.offset, entry.value) for entry in fake.extended] == [(2, 120_000)]


def test_a_reason_that_is_not_text_is_refused_where_it_is_given(fake: FakeQueues, client: millstream.Client) -> None:
    """It ended the thread that keeps leases, and the connection with everything that was leased over it."""
    fill(client, 30)
    with client.queue("t", prefetch=30) as queue:
        message = queue.next(10)
        assert message is not None
        with pytest.raises(InvalidArgument, match="a reason is text, not ValueError"):
            message.nack(ValueError("no"))  # type: ignore[arg-type]
        message.nack("no")
        eventually(lambda: [at for at, _, _ in fake.nacked] == [0])
        assert queue.stats.connections == 1


@pytest.mark.parametrize("wrong", [5, "text", None, "message of another queue"])
def test_what_is_no_message_of_the_queue_costs_nothing_but_the_call(
    fake: FakeQueues, client: millstream.Client, wrong: object
) -> None:
    """It ended the connection, and with it all leases; or what stood before it in the list was settled."""
    fill(client, 5)
    fill(client, 1, "other")
    with client.queue("t") as queue, client.queue("other") as other:
        messages = queue.lease(max=5)
        if wrong == "message of another queue":
            (wrong,) = other.lease()
        with pytest.raises(InvalidArgument, match="delivered"):
            queue.reject([messages[0], wrong], "no")  # type: ignore[list-item]
        with pytest.raises(InvalidArgument, match="a queue settles messages that are given as a list"):
            queue.ack(messages[0])  # type: ignore[arg-type]
        assert queue.ack(messages) == [Settled.DONE] * 5
        assert queue.stats.connections == 1
    assert fake.rejected == []


def test_many_at_once_have_a_result_each(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 4)
    with client.queue("t") as queue:
        messages = queue.lease(max=4)
        assert queue.nack(messages[:1], "no") == [Settled.RETRIED]
        assert queue.reject(messages[1:2]) == [Settled.DEAD]
        fake.expire()
        assert queue.ack(messages[2:]) == [Settled.INVALID] * 2
        assert queue.ack([]) == []


def test_waiting_for_an_ack_tells_when_it_was_too_late(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t") as queue:
        (message,) = queue.lease()
        fake.expire()
        with pytest.raises(ReceiptInvalid):
            message.ack(wait=True)


def test_late_acks_are_counted_and_reported_once(
    fake: FakeQueues, client: millstream.Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 6)
    with client.queue("t") as queue, caplog.at_level(logging.WARNING, "millstream"):
        messages = queue.lease(max=6)
        fake.expire()
        for message in messages[:3]:
            message.ack()
        queue.flush()
        queue.lease()  # its answer comes behind the others
        assert queue.stats.refused == 3
        messages[3].ack()
        queue.flush()
        queue.lease()
        assert queue.stats.refused == 4
    assert len([record for record in caplog.records if "lease had ended" in record.message]) == 1


def test_a_message_of_a_closed_queue_cannot_be_acked(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t") as queue:
        (message,) = queue.lease()
    with pytest.raises(ReceiptInvalid):
        message.ack()
    with pytest.raises(ReceiptInvalid):
        message.nack()


def test_a_message_is_settled_by_its_own_queue(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t") as one, client.queue("t") as other:
        (message,) = one.lease()
        with pytest.raises(InvalidArgument):
            other.ack([message])


def test_the_first_word_counts(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t", timeout_s=10) as queue:
        for message in islice(queue, 1):
            message.reject("no")
            message.ack()
    assert (fake.rejected, fake.acked) == ([(0, "no")], [])


def test_a_second_word_is_called_what_it_is(
    fake: FakeQueues, client: millstream.Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 4)
    with client.queue("t") as queue, caplog.at_level(logging.WARNING, "millstream"):
        messages = queue.lease(max=4)
        messages[0].ack(wait=True)
        with pytest.raises(ReceiptInvalid, match="settled before"):
            messages[0].nack("too late", wait=True)
        messages[1].ack()
        assert queue.reject(messages[1:2]) == [Settled.INVALID]
        fake.expire()
        with pytest.raises(ReceiptInvalid, match="had ended"):
            messages[2].nack(wait=True)
        assert queue.stats.refused == 1, "only this one is delivered again"
    said = [record.message for record in caplog.records]
    assert len([one for one in said if "settled twice" in one]) == 1
    assert len([one for one in said if "lease had ended" in one]) == 1


def test_a_second_word_after_the_lease_has_ended_is_not_taken_for_a_late_one(
    fake: FakeQueues, client: millstream.Client
) -> None:
    fill(client, 2)
    with client.queue("t", prefetch=2, lease="200ms", auto_extend=False) as queue:
        first, second = queue.lease(max=2)
        first.ack(wait=True)
        eventually(lambda: is_lost(second.source.lease))
        first.ack()
        with pytest.raises(ReceiptInvalid, match="settled before"):
            first.nack(wait=True)
        assert queue.stats.refused == 0
        second.ack()
        assert queue.stats.refused == 1


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_handler_that_blocks_keeps_its_lease_and_what_was_leased_ahead(
    fake: FakeQueues, client: millstream.Client
) -> None:
    fill(client, 8)
    with client.queue("t", prefetch=8, lease="600ms", timeout_s=10) as queue:
        for message in islice(queue, 8):
            if message.offset == 0:
                time.sleep(1.8)  # three leases, in the thread that would read
            message.ack()
    assert [at for _, _, at in fake.acked] == list(range(8))
    assert queue.stats.refused == 0
    assert max(fake.deliveries.values()) == 1
    assert queue.stats.extensions >= 2


def test_without_auto_extend_the_lease_ends(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t", prefetch=1, lease="100ms", auto_extend=False) as queue:
        message = queue.next(5)
        assert message is not None
        time.sleep(0.2)
        with pytest.raises(ReceiptInvalid):
            message.ack(wait=True)
    assert fake.extended == []


def test_a_message_that_is_never_settled_does_not_stop_the_queue(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t", prefetch=1, lease="150ms", auto_extend=False, ack_linger="30s") as queue:
        first, again = queue.next(5), queue.next(5)
        assert first is not None
        assert again is not None
        assert again.redelivered
        first.ack()
        assert queue.stats.refused == 1
        again.ack(wait=True)


def test_what_was_not_begun_goes_back_before_the_lease_ends(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 5)
    with client.queue("t", prefetch=10, lease="3s", auto_extend=False) as queue:
        first = queue.next(5)
        assert first is not None
        eventually(lambda: set(fake.released) == {1, 2, 3, 4})
        second = queue.next(5)
        assert second is not None
        assert second.source.lease is not first.source.lease


def test_nothing_is_handed_out_of_a_lease_that_is_nearly_over(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nobody had the time to look after it."""
    monkeypatch.setattr("millstream.client.blocking.queue.Queue._look_after", lambda _: 60.0)
    fill(client, 5)
    with client.queue("t", prefetch=10, lease="300ms", auto_extend=False) as queue:
        messages = iter(queue)
        first = next(messages)
        time.sleep(0.28)
        assert next(messages).source.lease is not first.source.lease


def test_a_lease_is_kept_however_long_settles_linger(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t", prefetch=1, lease="500ms", ack_linger="30s") as queue:
        message = queue.next(5)
        assert message is not None
        time.sleep(1.2)
        message.ack(wait=True)


# --- connection ------------------------------------------------------------------------------------------------------


def test_after_a_lost_connection_the_queue_goes_on(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 300)
    done: set[int] = set()
    with client.queue("t", prefetch=100, timeout_s=2) as queue:
        for number, message in enumerate(queue):
            if number in (50, 120):
                fake.drop_all()
            message.ack()
            done.add(message.offset)
            if len({at for _, _, at in fake.acked}) + 100 >= 300 and len(done) == 300:
                break
    assert done == set(range(300))
    assert queue.stats.connections >= 2


@pytest.mark.parametrize("unread", [b"", encode_frame(FrameType.HEARTBEAT, b"")], ids=["nothing", "heartbeat"])
def test_a_connection_that_was_lost_while_nobody_asked_is_opened_again_by_who_asks_next(
    fake: FakeQueues, client: millstream.Client, unread: bytes
) -> None:
    """It was found out by the request that was sent on it, which failed."""
    with client.queue("t") as queue:
        fill(client, 1)
        queue.ack(queue.lease(1, wait="10s"))
        connections = len(fake._peers)
        for peer in list(fake._peers):
            peer.send(unread)
        fake.drop_all()
        eventually(lambda: len(fake._peers) < connections)
        eventually(lambda: queue._turns.neglected(0.01))
        client.publish("t", b"later")
        assert [message.value for message in queue.lease(1, wait="10s")] == [b"later"]


def test_what_was_held_when_the_connection_was_lost_is_refused(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 10)
    with client.queue("t", prefetch=10, timeout_s=0.5) as queue:
        first = queue.next(5)
        assert first is not None
        fake.drop_all()
        while (message := queue.next(5)) is not None and not message.redelivered:
            pass
        assert message is not None
        first.ack()
        assert queue.stats.refused == 1
        queue.flush()
    assert fake.acked == []


def test_a_broker_that_is_away_is_waited_for(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    with client.queue("t") as queue:
        message = queue.next(5)
        fake.stop_listening()
        assert queue.next(0.2) is None
        fake.listen()
        again = queue.next(10)
    assert message is not None
    assert again is not None
    assert again.delivery_count == 2


def test_a_consumer_that_the_broker_forgot_is_opened_again(fake: FakeQueues, client: millstream.Client) -> None:
    with client.queue("t") as queue:
        fake._consumers.clear()
        fill(client, 1)
        eventually(lambda: queue.next(0.5) is not None)
    assert len(fake.opened) == 2


def test_errors_that_pass_are_waited_out_and_others_are_raised(fake: FakeQueues, client: millstream.Client) -> None:
    fill(client, 1)
    fake.lease_errors += [ShuttingDown("in a moment")]
    with client.queue("t", prefetch=1) as queue:
        message = queue.next(5)
        assert message is not None
        fake.lease_errors += [TopicNotFound("it is gone")]
        message.ack()
        with pytest.raises(TopicNotFound):
            queue.next(5)


def test_opening_says_what_the_user_said(fake: FakeQueues, client: millstream.Client) -> None:
    client.queue("t", group="g", lease="45s", consumer="me", start="latest", retry="durable", ordering="key").close()
    (call,) = fake.opened
    assert (call.topic, call.group, call.lease_ms, call.consumer, call.start) == ("t", "g", 45_000, "me", "latest")
    assert call.policy == {"retry": "durable", "ordering": "key"}


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"lease": "1ms"},
        {"lease": "soon"},
        {"retry": "sometimes"},
        {"ordering": "key", "fair_by": "header:a"},
        {"prefetsch": 7},
        {"start": "yesterday"},
    ],
)
def test_what_cannot_be_is_refused_at_once(client: millstream.Client, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        client.queue("t", **options)  # type: ignore[arg-type]


def test_what_was_lost_while_its_id_was_looked_up_is_not_handed_out(
    fake: FakeQueues, client: millstream.Client
) -> None:
    """The broker went away and came back in between: somebody else may have had the messages since."""
    fill(client, 3)
    with client.queue("t") as queue:
        fake.before["Metadata"] = fake.drop_all
        messages = queue.lease(max=3, wait="10s")
        assert [message.delivery_count for message in messages] == [2, 2, 2]
        assert queue.ack(messages) == [Settled.DONE] * 3

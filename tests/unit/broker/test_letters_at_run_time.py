"""Dead letters inside a broker, while the topics that hold them come and go."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from typing import Any

import pytest

from millstream.broker.journal import Fact
from millstream.broker.letters import letters, replays
from millstream.broker.transfer import Transfer
from millstream.dead_letters import LetterFilter
from millstream.errors import GroupNotFound, InvalidArgument, StorageFailed
from millstream.policies import QueuePolicy
from millstream.queues.records import Result
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls, letter_calls, queue_calls
from millstream.wire.leases import Settle
from millstream.wire.message_calls import SummarizeTopics, TopicSummaries
from tests.simulated_broker import Client, after_kill, run, started
from tests.unit.broker.test_queues_at_run_time import lives, publish, topic_of
from tests.waiting import eventually_async


def test_a_topic_that_is_deleted_while_letters_are_looked_through_does_not_hide_those_of_the_next() -> None:
    async def work(client: Client) -> None:
        for name in ("orders.dlq", "payments.dlq"):
            await client.call(calls.CreateTopic(name=name))
            await publish(client, [b"x"], topic=name)
        for _ in range(10):
            await publish(client, [bytes(20_000)] * 10, topic="orders.dlq")
        looking = client.broker.letters.scan("default", LetterFilter())
        found = len((await anext(looking))[0])
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        rest = [letter.topic async for letters, _ in looking for letter in letters]
        assert found < 101
        assert rest == ["payments.dlq"], "the others are looked through all the same"
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"new"], topic="orders.dlq")
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        assert [letter.value for letter in page.letters] == [b"new", b"x"]

    lives(work)


def test_a_letter_that_holds_up_others_and_is_purged_holds_them_up_no_longer() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"first", b"second"], topic="orders.dlq")
        consumer = await client.open_queue("orders.dlq", group="dlq", policy={"ordering": "strict"})
        assert [message.value for message in await client.lease(consumer, 1)] == [b"first"]
        waiting = asyncio.ensure_future(client.lease(consumer, 1, wait_ms=20_000))
        await asyncio.sleep(0)
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        (first,) = [letter.id for letter in page.letters if letter.value == b"first"]
        await client.call(letter_calls.PurgeLetters(ids=[first]))
        async with asyncio.timeout(5):  # its lease would last for 30 s
            assert [message.value for message in await waiting] == [b"second"]

    lives(work)


def test_a_replay_leaves_letters_that_a_consumer_is_working_on() -> None:
    async def work(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"0", b"1", b"2", b"3"], topic="orders.dlq")
        consumer = await client.open_queue("orders.dlq", group="dlq")
        held = await client.lease(consumer, 3)
        await client.settle(Settle.ACK, held[0])
        await client.settle(Settle.RELEASE, held[2])
        begun = await client.call(letter_calls.ReplayLetters(everything=True, target="orders"))
        assert isinstance(begun, letter_calls.ReplayStarted)
        replay = begun.replay
        assert replay is not None
        await eventually_async(lambda: replay.is_over)
        assert await client.read_all("orders") == [b"2", b"3"]
        assert (replay.status, replay.replayed, replay.failed) == ("completed", 2, 1)
        (failure,) = replay.failures
        assert failure.retriable
        assert "a consumer has the letter" in failure.reason
        assert await client.settle(Settle.ACK, held[1]) == [0]

    lives(work)


def test_no_consumer_gets_a_letter_that_is_just_being_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    intend, got = Transfer._intend, list[bytes | None]()

    async def work(client: Client) -> None:
        async def slow(transfer: Transfer, intent: Fact, *details: Any) -> None:
            got.extend(message.value for message in await client.lease(consumer, 10))
            await intend(transfer, intent, *details)

        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"0", b"1"], topic="orders.dlq")
        consumer = await client.open_queue("orders.dlq", group="dlq")
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        (first,) = [letter.id for letter in page.letters if letter.value == b"0"]
        monkeypatch.setattr(Transfer, "_intend", slow)
        await client.call(letter_calls.ReplayLetters(ids=[first], target="orders"))
        await eventually_async(lambda: client.broker.metrics.dead_letters_replayed)
        got.extend(message.value for message in await client.lease(consumer, 10))
        assert got == [b"1"], "the other is there as soon as it is certain"
        assert await client.read_all("orders") == [b"0"]

    lives(work)


def test_a_replay_takes_nothing_from_a_topic_that_was_made_again() -> None:
    async def work(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"old"] * 5, topic="orders.dlq")
        begun = await client.call(letter_calls.ReplayLetters(everything=True, target="orders", rate=10))
        assert isinstance(begun, letter_calls.ReplayStarted)
        assert begun.replay is not None
        replay = begun.replay
        await eventually_async(lambda: replay.replayed)
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"new"] * 5, topic="orders.dlq")
        await eventually_async(lambda: replay.is_over)
        assert set(await client.read_all("orders")) == {b"old"}
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        assert len(page.letters) == 5

    lives(work)


def test_a_replay_that_goes_on_after_a_restart_takes_nothing_from_a_topic_that_was_made_again() -> None:
    async def begin(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"old"] * 5, topic="orders.dlq")
        await client.call(letter_calls.ReplayLetters(everything=True, target="orders", rate=0.001))
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"new"] * 5, topic="orders.dlq")

    async def go_on(client: Client) -> None:
        (replay,) = [job.info for job in client.broker.replays._jobs.values()]
        await eventually_async(lambda: replay.is_over or replay.replayed)
        assert b"new" not in await client.read_all("orders")

    lives(begin, go_on)


def test_letters_that_were_found_before_their_topic_was_made_again_purge_none_of_the_new_ones() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"old"], topic="orders.dlq")
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"new"], topic="orders.dlq")
        assert await client.broker.letters._remove("default", page.letters) == []
        after = await client.call(letter_calls.ListLetters())
        assert isinstance(after, letter_calls.LetterPage)
        assert [letter.value for letter in after.letters] == [b"new"]

    lives(work)


def test_a_purge_whose_client_goes_away_is_done_or_not_and_a_restart_changes_nothing() -> None:
    async def go_away(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"x"], topic="orders.dlq")
        box = client.broker.letters.box(topic_of(client, "orders.dlq"), 0)
        purging = asyncio.ensure_future(client.call(letter_calls.PurgeLetters(everything=True)))
        while not box._claimed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        purging.cancel()
        await asyncio.wait((purging,))
        await eventually_async(lambda: not box._claimed)
        found.append(await count(client))

    async def come_back(client: Client) -> None:
        found.append(await count(client))

    async def count(client: Client) -> int:
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        return len(page.letters)

    found: list[int] = []
    lives(go_away, come_back)
    assert found == [0, 0]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_purge_of_ids_that_takes_long_counts_each_letter_once(monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
    monkeypatch.setattr(letters, "_WORK_MS", -1)  # every call has worked for too long

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"one", b"two"], topic="orders.dlq")
        page = await client.call(letter_calls.ListLetters(limit=2))
        assert isinstance(page, letter_calls.LetterPage)
        purge = letter_calls.PurgeLetters(ids=[letter.id for letter in page.letters], dry_run=dry_run)
        answer = await client.call(purge)
        assert isinstance(answer, letter_calls.LetterCount)
        assert (answer.statistics.total, answer.after) == (2, ""), "whoever went on would count them again"

    lives(work)


def test_a_purge_of_fewer_than_none_is_refused() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"one", b"two"], topic="orders.dlq")
        with pytest.raises(InvalidArgument, match="limit must be 0"):
            await client.call(letter_calls.PurgeLetters(everything=True, limit=-1))
        assert await values_of_letters(client) == [b"one", b"two"]

    lives(work)


def test_that_a_replay_has_ended_is_noted_although_the_disk_refused_it_at_first() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"x"] * 3, topic="orders.dlq")
        await client.call(letter_calls.ReplayLetters(everything=True, target="orders", rate=0.001))
        (job,) = client.broker.replays._jobs.values()
        job.end("failed", "what was sent died again")
        assert job.task is not None
        await asyncio.wait((job.task,))
        storage.inject(Fault.WRITE_ERROR, when=lambda operation: operation.path.startswith("state/replays"))
        with pytest.raises(StorageFailed):
            await client.broker.replays.note()
        await client.broker.replays.note()
        client = await after_kill(client, storage)
        (job,) = client.broker.replays._jobs.values()
        assert job.info.status == "failed", "the rest stays where it is"

    run(scenario)


def test_a_replay_whose_order_has_rotted_keeps_neither_the_broker_nor_other_replays_from_going_on() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"x"] * 3, topic="orders.dlq")
        for _ in range(2):
            await client.call(letter_calls.ReplayLetters(everything=True, target="orders", rate=0.001))
        first, second = client.broker.replays._jobs.values()
        first.changed = True
        await client.broker.replays.note()
        log = client.broker.replays._log.partition.log
        log.note_durable()  # so that it is rot, and not the end of a write that was cut short
        storage.flip(log.segments[0].path, 150)
        client = await after_kill(client, storage)
        assert list(client.broker.replays._jobs) == [second.info.id]
        for job in client.broker.replays._jobs.values():
            assert job.task is not None
        await client.broker.stop()

    run(scenario)


def test_replays_that_begin_at_once_forget_the_oldest_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_REPORTS_MAX", 1)

    async def work(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        call = letter_calls.ReplayLetters(everything=True, target="orders")
        for _ in range(2):
            await client.call(call)
        await asyncio.gather(*(client.call(call) for _ in range(3)))
        assert len(client.broker.replays._jobs) == 1

    lives(work)


def test_what_was_read_of_dead_letters_goes_with_their_topic() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"x"], topic="orders.dlq")
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        await client.call(letter_calls.ShowLetter(id=page.letters[0].id))
        box = weakref.ref(client.broker.letters.box(topic_of(client, "orders.dlq"), 0))
        assert box() is not None
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        gc.collect()
        assert box() is None

    lives(work)


def test_nothing_is_remembered_of_the_letters_and_replays_of_topics_that_are_gone() -> None:
    async def work(client: Client) -> None:
        for name in ("stays", "goes"):
            await client.call(calls.CreateTopic(name=name))
            await client.send([b"x"], topic=name)
            consumer = await client.open_queue(name)
            await client.settle(Settle.REJECT, *await client.lease(consumer))
            await eventually_async(partial(client.broker.letters._said.__contains__, ("default", name)))
            await client.call(letter_calls.ReplayLetters(filter=LetterFilter(topic=name)))
        recorder = client.broker.recorder
        await eventually_async(lambda: len(recorder.watched) == 2)
        await client.call(calls.DeleteTopic(name="goes", force=True))
        await recorder.tidy()
        assert list(recorder.watched) == topic_of(client, "stays").partition_uids
        assert list(client.broker.letters._said) == [("default", "stays")]

    lives(work)


def test_a_topic_that_others_name_for_their_dead_letters_is_summed_up_as_one() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="graveyard"))
        config = {"dead_letter_topic": "graveyard"}
        await client.call(calls.CreateTopic(name="orders", config=config))
        await client.send([b"x", b"y"])
        consumer = await client.open_queue()
        await client.settle(Settle.REJECT, *await client.lease(consumer))
        for include, expected in ((False, {"orders": 2}), (True, {"graveyard": 2, "orders": 2})):
            found = await client.call(SummarizeTopics(include_dead_letters=include))
            assert isinstance(found, TopicSummaries)
            assert {one.name: one.dead_letters for one in found.topics} == expected

    lives(work)


# --- the group `dlq`, which the broker has before anybody opens it --------------------------------------------------


async def values_of_letters(client: Client) -> list[bytes | None]:
    """Those that are there, oldest first."""
    page = await client.call(letter_calls.ListLetters(limit=100))
    assert isinstance(page, letter_calls.LetterPage)
    return [letter.value for letter in page.letters]


def test_letters_that_were_purged_do_not_come_back_when_somebody_first_consumes_them() -> None:
    async def purge(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        for number in range(6):
            await publish(client, [b"%d" % number], topic="orders.dlq")
            if number == 1:
                client.broker.topics.partition("default", "orders.dlq", 0).log.roll()
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        gone = [letter.id for letter in page.letters if letter.value not in (b"4", b"5")]
        await client.call(letter_calls.PurgeLetters(ids=gone))
        log = client.broker.topics.partition("default", "orders.dlq", 0).log
        log.delete_before(2)  # as retention does
        assert log.start_offset == 2

    async def consume(client: Client) -> None:
        consumer = await client.open_queue("orders.dlq", group="dlq")
        assert [message.value for message in await client.lease(consumer, wait_ms=5000)] == [b"4", b"5"]
        assert await values_of_letters(client) == [b"4", b"5"]

    lives(purge, consume)


def test_a_consumer_that_wants_only_the_latest_does_not_make_letters_vanish() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"x"], topic="orders.dlq")
        consumer = await client.open_queue("orders.dlq", group="dlq", start="latest")
        assert await values_of_letters(client) == [b"x"]
        assert [message.value for message in await client.lease(consumer)] == [b"x"]

    lives(work)


def test_a_group_dlq_of_a_topic_without_letters_is_like_any_other() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"before"])
        consumer = await client.open_queue(group="dlq", start="latest")
        await publish(client, [b"after"])
        assert [message.value for message in await client.lease(consumer)] == [b"after"]

    lives(work)


def test_letters_that_are_done_with_stay_so_when_their_group_is_deleted() -> None:
    async def work(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"acked", b"replayed", b"purged", b"held", b"left"], topic="orders.dlq")
        page = await client.call(letter_calls.ListLetters())
        assert isinstance(page, letter_calls.LetterPage)
        ids = [letter.id for letter in page.letters]
        begun = await client.call(letter_calls.ReplayLetters(ids=ids[1:2], target="orders"))
        assert isinstance(begun, letter_calls.ReplayStarted)
        assert begun.replay is not None
        replay = begun.replay
        await eventually_async(lambda: replay.is_over)
        await client.call(letter_calls.PurgeLetters(ids=ids[2:3]))
        consumer = await client.open_queue("orders.dlq", group="dlq", policy={"max_deliveries": 3})
        acked, held = await client.lease(consumer, 2)
        await client.settle(Settle.ACK, acked)
        await client.call(queue_calls.DeleteQueue(topic="orders.dlq", group="dlq", force=True))
        assert await client.call(queue_calls.ListQueues(topic="orders.dlq")) == []
        with pytest.raises(GroupNotFound, match="was deleted"):
            await client.lease(consumer)
        assert await client.settle(Settle.ACK, held) == [Result.INVALID], "who had it is no consumer any more"
        assert await values_of_letters(client) == [b"held", b"left"]

    async def again(client: Client) -> None:
        assert await values_of_letters(client) == [b"held", b"left"]
        consumer = await client.open_queue("orders.dlq", group="dlq")
        assert [(message.value, message.part.delivery) for message in await client.lease(consumer)] == [
            (b"held", 1),
            (b"left", 1),
        ]
        info = await client.call(queue_calls.DescribeQueue(topic="orders.dlq", group="dlq"))
        assert isinstance(info, queue_calls.QueueInfo)
        assert info.policy["max_deliveries"] == QueuePolicy().max_deliveries

    lives(work, again)


def test_letters_can_be_listed_while_their_group_is_deleted() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq", partitions=4))
        for number in range(4):
            await publish(client, [b"x"], topic="orders.dlq", partition=number)
        await client.open_queue("orders.dlq", group="dlq")
        deleting = asyncio.ensure_future(
            client.call(queue_calls.DeleteQueue(topic="orders.dlq", group="dlq", force=True))
        )
        while not deleting.done():
            assert await values_of_letters(client) == [b"x"] * 4
            await asyncio.sleep(0)
        await deleting
        assert await values_of_letters(client) == [b"x"] * 4

    lives(work)


def test_who_opens_the_group_of_letters_while_it_is_deleted_is_told() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"x"], topic="orders.dlq")
        await client.open_queue("orders.dlq", group="dlq")
        group = client.broker.queues.registry.get("default", "orders.dlq", "dlq")
        late = client.broker.queues.add_consumer(client.session, name="late")
        await client.call(queue_calls.DeleteQueue(topic="orders.dlq", group="dlq", force=True))
        with pytest.raises(GroupNotFound, match="was deleted"):
            client.broker.queues.join(late, group)

    lives(work)


def test_what_a_deleted_group_of_letters_has_done_is_counted_once() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await publish(client, [b"x"] * 3, topic="orders.dlq")
        for expected in (1, 2):
            consumer = await client.open_queue("orders.dlq", group="dlq")
            await client.settle(Settle.ACK, *await client.lease(consumer, 1))
            await client.call(queue_calls.DeleteQueue(topic="orders.dlq", group="dlq", force=True))
            departed = topic_of(client, "orders.dlq").departed
            assert (departed["consumed"], departed["acked"]) == (expected, expected)

    lives(work)

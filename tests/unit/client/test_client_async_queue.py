"""The asynchronous queue: the same promises, kept by the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_queues import FakeQueues

from millstream import aio
from millstream.errors import Forbidden, InvalidArgument, ReceiptInvalid, StorageFailed, TopicNotFound
from millstream.wire.leases import Scope, Settled
from tests.waiting import eventually_async

Scenario = Callable[[FakeQueues, aio.Client], Awaitable[None]]


def in_a_loop(scenario: Scenario) -> Callable[[FakeQueues], None]:
    """Runs a test in an event loop with a connected client, and sees that it leaves no task behind."""

    async def main(fake: FakeQueues) -> None:
        async with asyncio.timeout(30), aio.connect(fake.address, timeout_s=10) as client:
            await scenario(fake, client)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def test(fake: FakeQueues) -> None:
        asyncio.run(main(fake))

    test.__name__ = scenario.__name__
    return test


@pytest.fixture
def fake() -> Iterator[FakeQueues]:
    with FakeQueues() as broker:
        yield broker


async def fill(client: aio.Client, count: int) -> list[bytes]:
    values = [b"%05d" % number for number in range(count)]
    await client.publish_many("t", values)
    return values


@in_a_loop
async def test_every_message_is_handed_out_once_and_acked(fake: FakeQueues, client: aio.Client) -> None:
    values = await fill(client, 1000)
    seen = []
    async with client.queue("t", prefetch=100, timeout_s=10) as queue:
        async for message in queue:
            seen.append(message.value)
            message.ack()
            if len(seen) == 1000:
                break
    assert seen == values
    assert len(fake.acked) == 1000
    assert all(entry.scope != Scope.ONE for entry in fake.settles)


@in_a_loop
async def test_settling_may_be_awaited_or_not(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 5)
    async with client.queue("t") as queue:
        first, second, third, fourth, fifth = await queue.lease(max=5)
        first.ack()
        await second.ack()
        await third.nack("db down", retry_after="10s")
        fourth.reject("bad payload")
        await fifth.ack(wait=True)
    assert sorted(at for _, _, at in fake.acked) == [0, 1, 4]
    assert fake.nacked == [(2, "db down", 10_000)]
    assert fake.rejected == [(3, "bad payload")]


@in_a_loop
async def test_an_ack_is_said_while_the_loop_is_idle(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 3)
    async with client.queue("t", ack_linger="10ms") as queue:
        message = await queue.next(5)
        assert message is not None
        message.ack()
        await eventually_async(lambda: fake.acked == [("t", 0, 0)])


@in_a_loop
async def test_waiting_for_an_ack_tells_when_it_was_too_late(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 3)
    async with client.queue("t") as queue:
        messages = await queue.lease(max=3)
        fake.expire()
        with pytest.raises(ReceiptInvalid):
            await messages[0].ack(wait=True)
        assert await queue.ack(messages) == [Settled.INVALID] * 3


@in_a_loop
async def test_a_slow_handler_keeps_its_lease_and_what_was_leased_ahead(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 6)
    async with client.queue("t", prefetch=6, lease="500ms", timeout_s=10) as queue:
        async for message in queue:
            if message.offset == 0:
                await asyncio.sleep(1.5)
            message.ack()
            if message.offset == 5:
                break
        assert queue.stats.extensions >= 2
    assert [at for _, _, at in fake.acked] == list(range(6))
    assert max(fake.deliveries.values()) == 1


@in_a_loop
async def test_leaving_the_loop_gives_back_what_was_not_handed_out(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 50)
    async with client.queue("t", prefetch=50) as queue:
        messages = aiter(queue)
        message = await anext(messages)
        await messages.aclose()
        await eventually_async(lambda: sum(held.left.bit_count() for held in fake.leases.values()) == 1)
        await message.ack(wait=True)


@in_a_loop
async def test_many_tasks_take_from_one_queue(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 300)
    seen: list[int] = []
    async with client.queue("t", prefetch=20) as queue:

        async def work() -> None:
            while len(seen) < 300:
                if (message := await queue.next(0.1)) is not None:
                    await asyncio.sleep(0)
                    seen.append(message.offset)
                    message.ack()

        await asyncio.gather(*(work() for _ in range(5)))
    assert sorted(seen) == list(range(300))


@in_a_loop
async def test_a_message_wakes_one_task_and_not_all_that_wait(fake: FakeQueues, client: aio.Client) -> None:
    """What a message cost grew with the number of tasks of a worker."""
    async with client.queue("t") as queue:
        looks, refill = 0, queue._leasing.refill

        def look(now_ms: int) -> bool:
            nonlocal looks
            looks += 1
            return refill(now_ms)

        queue._leasing.refill = look  # type: ignore[method-assign]
        tasks = [asyncio.create_task(queue.next()) for _ in range(50)]
        await eventually_async(lambda: looks >= 50)
        costs = []
        for number in range(5):
            before = looks
            await client.publish("t", b"x")
            await eventually_async(lambda: sum(task.done() for task in tasks) == number + 1)  # noqa: B023
            costs.append(looks - before)
        assert min(costs) < 10, "every second all of them look by themselves"
        tasks[-1].cancel()
        await asyncio.wait(tasks[-1:])
        await client.publish_many("t", [b"x"] * 44)
        await asyncio.wait(tasks)


@in_a_loop
async def test_messages_may_be_settled_in_threads(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 4)
    threads = threading.active_count()
    async with client.queue("t") as queue:
        messages = await queue.lease(max=4)

        def settle() -> None:
            for message in messages[:3]:
                message.ack()
            messages[3].nack("no")

        await asyncio.to_thread(settle)
        await eventually_async(lambda: len(fake.acked) == 3 and fake.nacked)
    assert threading.active_count() < threads + 10, "settling does not cost a thread each"


@in_a_loop
async def test_a_reason_that_is_not_text_is_refused_in_the_thread_that_gives_it(
    fake: FakeQueues, client: aio.Client
) -> None:
    """The loop refused it, nobody heard of that, and the worker acked a message that had failed."""
    await fill(client, 1)
    async with client.queue("t") as queue:
        (message,) = await queue.lease()

        def settle() -> None:
            with pytest.raises(InvalidArgument, match="a reason is text, not 5"):
                message.nack(5)  # type: ignore[arg-type]

        await asyncio.to_thread(settle)
        assert (queue.stats.nacked, queue.stats.acked) == (0, 0)
        await message.nack("no", wait=True)


@in_a_loop
async def test_the_first_word_of_a_thread_counts(fake: FakeQueues, client: aio.Client) -> None:
    """The loop heard of the nack when the ack was there already."""
    await fill(client, 3)
    async with client.queue("t") as queue:
        first, second, third = await queue.lease(max=3)

        def settle() -> None:
            first.nack("no")
            first.ack()
            second.ack()
            second.nack("too late")
            third.ack()

        thread = threading.Thread(target=settle)
        thread.start()
        thread.join()  # the loop hears of all of it at once
        await eventually_async(lambda: len(fake.acked) == 2 and fake.nacked)
    assert sorted(at for _, _, at in fake.acked) == [1, 2]
    assert [(at, reason) for at, reason, _ in fake.nacked] == [(0, "no")]


@in_a_loop
async def test_after_a_lost_connection_the_queue_goes_on(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 200)
    done: set[int] = set()
    async with client.queue("t", prefetch=50, timeout_s=2) as queue:
        number = 0
        async for message in queue:
            number += 1
            if number in (30, 80):
                fake.drop_all()
                await asyncio.sleep(0.01)
            message.ack()
            done.add(message.offset)
            if len(done) == 200 and number > 200:
                break
    assert done == set(range(200))
    assert queue.stats.connections >= 2


@in_a_loop
async def test_a_refusal_is_raised(fake: FakeQueues, client: aio.Client) -> None:
    fake.call_errors["OpenQueue"] = deque([TopicNotFound("no such topic")])
    with pytest.raises(TopicNotFound):
        await client.queue("t")


@in_a_loop
async def test_a_message_that_is_never_settled_does_not_stop_the_queue(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 1)
    async with client.queue("t", prefetch=1, lease="150ms", auto_extend=False, ack_linger="30s") as queue:
        first, again = await queue.next(5), await queue.next(5)
        assert first is not None
        assert again is not None
        assert again.redelivered
        first.ack()
        assert queue.stats.refused == 1
        await again.ack(wait=True)


@in_a_loop
async def test_a_handler_that_blocks_the_loop_is_not_given_more_of_an_old_lease(
    fake: FakeQueues, client: aio.Client
) -> None:
    await fill(client, 5)
    async with client.queue("t", prefetch=10, lease="300ms", auto_extend=False) as queue:
        messages = aiter(queue)
        first = await anext(messages)
        time.sleep(0.28)  # noqa: ASYNC251 - as some do
        assert (await anext(messages)).source.lease is not first.source.lease
        await messages.aclose()


@in_a_loop
async def test_a_lease_is_kept_however_long_settles_linger(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 1)
    async with client.queue("t", prefetch=1, lease="500ms", ack_linger="30s") as queue:
        message = await queue.next(5)
        assert message is not None
        await asyncio.sleep(1.2)
        await message.ack(wait=True)


@in_a_loop
async def test_what_was_lost_while_its_id_was_looked_up_is_not_handed_out(fake: FakeQueues, client: aio.Client) -> None:
    """The broker went away and came back in between: somebody else may have had the messages since."""
    await fill(client, 1)
    async with client.queue("t") as queue:
        fake.before["Metadata"] = fake.drop_all
        (message,) = await queue.lease(wait="10s")
        assert message.delivery_count == 2
        await message.ack(wait=True)


@in_a_loop
async def test_a_lease_says_why_the_queue_cannot_be_opened_again(fake: FakeQueues, client: aio.Client) -> None:
    """It said that the broker was not there, whatever that had said."""
    async with client.queue("t") as queue:
        fake.call_errors["OpenQueue"] = deque([Forbidden("the key may not consume from t")])
        fake.drop_all()
        await eventually_async(lambda: queue._connection is None)
        with pytest.raises(Forbidden):
            await queue.lease(1)
        await fill(client, 1)  # allowed by now
        assert len(await queue.lease(1, wait="10s")) == 1


@in_a_loop
async def test_what_was_acked_for_somebody_who_has_gone_is_handed_out_next(
    fake: FakeQueues, client: aio.Client
) -> None:
    """It was never due, and whoever asked for the next message kept a processor busy for ever."""
    values = await fill(client, 3)
    async with client.queue("t", auto_ack=True) as queue:
        answer = threading.Event()
        fake.before["Metadata"] = lambda: answer.wait(10)
        asking = asyncio.create_task(queue.lease(10, wait="10s"))
        await eventually_async(lambda: not fake.before)
        asking.cancel()
        await asyncio.wait((asking,))
        answer.set()
        async with asyncio.timeout(10):
            found = [await queue.next(timeout_s=5) for _ in values]
        assert [message.value for message in found if message is not None] == values


@pytest.mark.parametrize("at", ["Hello", "OpenQueue"])
def test_a_queue_that_is_closed_while_it_connects_again_keeps_no_connection(fake: FakeQueues, at: str) -> None:
    @in_a_loop
    async def scenario(fake: FakeQueues, client: aio.Client) -> None:
        queue = await client.queue("t")
        connections = len(fake._peers)
        asked, go_on = threading.Event(), threading.Event()

        def answer_late() -> None:
            asked.set()
            assert go_on.wait(20)

        assert queue._connection is not None
        fake.before[at] = answer_late
        queue._connection.close()
        waiting = asyncio.create_task(queue.next())
        await asyncio.to_thread(asked.wait, 20)
        await queue.close()
        go_on.set()
        async with asyncio.timeout(20):
            assert await waiting is None
        await eventually_async(lambda: len(fake._peers) == connections - 1)

    scenario(fake)


@in_a_loop
async def test_a_close_that_is_given_up_while_the_broker_is_told_keeps_no_connection(
    fake: FakeQueues, client: aio.Client
) -> None:
    answer = threading.Event()
    queue = await client.queue("t")
    fake.before["CloseQueue"] = lambda: answer.wait(20) and None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await queue.close()
    answer.set()
    await eventually_async(lambda: fake.consumer_is_gone(1))
    assert await queue.next(5) is None


@in_a_loop
async def test_acks_that_the_broker_could_not_take_are_counted(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 3)
    async with client.queue("t") as queue:
        messages = await queue.lease(max=3)
        fake.settle_errors.append(StorageFailed("the disk is full"))
        messages[0].ack()
        messages[1].ack()
        messages[2].extend("2m")
        queue.flush()
        await eventually_async(lambda: queue.stats.refused == 2)


# --- queues that nobody holds any more -------------------------------------------------------------------------------


@in_a_loop
async def test_a_queue_that_is_dropped_gives_everything_back(fake: FakeQueues, client: aio.Client) -> None:
    await fill(client, 20)

    async def take_two() -> None:
        queue = await client.queue("t", prefetch=10)
        message = await queue.next(5)
        assert message is not None
        message.ack()
        assert await queue.next(5) is not None

    await take_two()
    gc.collect()
    await eventually_async(lambda: fake.acked == [("t", 0, 0)] and fake.consumer_is_gone(1))
    async with client.queue("t", timeout_s=10) as other:
        taken = set()
        async for message in other:
            message.ack()
            taken.add(message.offset)
            if len(taken) == 19:
                break
    assert taken == set(range(1, 20))


@pytest.mark.parametrize("wait", [False, True])
def test_a_message_whose_queue_was_dropped_says_so(fake: FakeQueues, wait: bool) -> None:
    @in_a_loop
    async def scenario(fake: FakeQueues, client: aio.Client) -> None:
        await fill(client, 1)
        message = await (await client.queue("t")).next(5)
        assert message is not None
        gc.collect()
        await eventually_async(lambda: fake.consumer_is_gone(1))
        with pytest.raises(ReceiptInvalid, match=r"keep the queue \(queue = client.queue"):
            await message.ack(wait=wait)

    scenario(fake)


@in_a_loop
async def test_a_queue_that_is_dropped_while_its_broker_is_away_is_not_opened_again(
    fake: FakeQueues, client: aio.Client
) -> None:
    queue = await client.queue("t")
    fake.stop_listening()
    assert await queue.next(0.1) is None
    del queue
    gc.collect()
    fake.listen()
    await fill(client, 1)  # the client is back
    await eventually_async(lambda: len(asyncio.all_tasks()) == 2)  # the client's producer and this one
    assert len(fake.opened) == 1


@in_a_loop
async def test_a_queue_is_there_as_long_as_a_task_waits_for_it(fake: FakeQueues, client: aio.Client) -> None:
    taken: list[int] = []

    async def consume() -> None:
        async for message in client.queue("t"):
            await message.ack(wait=True)
            taken.append(message.offset)
            if message.offset == 2:
                break

    asyncio.create_task(consume())  # noqa: RUF006 - as some do
    await eventually_async(lambda: fake.opened)
    for number in range(3):
        await asyncio.sleep(0)
        gc.collect()
        await client.publish("t", b"x")
        await eventually_async(lambda: len(taken) == number + 1)  # noqa: B023
    await eventually_async(lambda: fake.consumer_is_gone(1))


@pytest.mark.parametrize("settle", ["nack", "reject", "release"])
def test_a_thread_that_settles_when_the_loop_has_ended_is_told_so(fake: FakeQueues, settle: str) -> None:
    """It was the RuntimeError of a loop that the thread knows nothing about."""
    kept: list[Any] = []

    async def main() -> None:
        client = await aio.connect(fake.address, timeout_s=10)
        await fill(client, 1)
        queue = await client.queue("t")
        kept.extend((client, queue, await queue.next(5)))

    asyncio.run(main())
    with ThreadPoolExecutor(1) as threads, pytest.raises(ReceiptInvalid, match=r"event loop .* has ended"):
        threads.submit(getattr(kept.pop(), settle)).result()

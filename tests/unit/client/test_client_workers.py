"""Workers: what a handler returns or raises becomes of its message, and a worker ends in good order."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fake_queues import FakeQueues

import millstream
from millstream import Reject, Retry, aio
from millstream.errors import InvalidArgument, TopicNotFound
from tests.waiting import eventually, eventually_async


@pytest.fixture
def fake() -> Iterator[FakeQueues]:
    with FakeQueues() as broker:
        yield broker


def misbehave(message: millstream.QueueMessage) -> None:
    """Does what the value says."""
    match message.text:
        case "reject":
            raise Reject("bad payload")
        case "retry":
            raise Retry("not now", after="10s")
        case "fail":
            raise ValueError("no")


def check_outcomes(fake: FakeQueues) -> None:
    eventually(lambda: fake.acked and fake.rejected and {at for at, _, _ in fake.nacked} == {2, 3})
    assert fake.acked == [("t", 0, 0)]
    assert fake.rejected == [(1, "bad payload")]
    assert (2, "not now", 10_000) in fake.nacked
    assert (3, "ValueError('no')", -1) in fake.nacked


VALUES = ["fine", "reject", "retry", "fail"]


def test_what_a_plain_handler_says(
    fake: FakeQueues, client: millstream.Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish_many("t", VALUES)
    worker = client.worker("t", group="g", concurrency=2)(misbehave)
    with caplog.at_level(logging.WARNING, "millstream"), worker:
        check_outcomes(fake)
    assert any(record.exc_info for record in caplog.records), "the traceback of a failure is logged"


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("problem", [Retry("not now", after=-1.5), Retry("not now", after="soon"), Unspeakable()])
def test_a_worker_goes_on_after_an_exception_that_cannot_be_heeded(
    fake: FakeQueues, client: millstream.Client, problem: Exception
) -> None:
    """`Retry(after=when - time.time())` is below zero when that is over, and ended the worker."""
    client.publish_many("t", ["bad", "fine"])

    def handle(message: millstream.QueueMessage) -> None:
        if message.text == "bad":
            raise problem

    with client.worker("t")(handle) as worker:
        eventually(lambda: fake.acked == [("t", 0, 1)] and fake.nacked)
        assert worker.failure is None
    assert fake.nacked[0] == (0, type(problem).__name__, -1)


def test_what_a_coroutine_handler_says_to_a_synchronous_client(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish_many("t", VALUES)
    threads = set()

    @client.worker("t", concurrency=4)
    async def handle(message: millstream.QueueMessage) -> None:
        threads.add(threading.current_thread().name)
        await asyncio.sleep(0.001)
        misbehave(message)

    with handle:
        check_outcomes(fake)
    assert len(threads) == 1
    assert threads != {threading.current_thread().name}


@pytest.mark.parametrize("plain", [True, False])
def test_what_a_handler_says_to_an_asynchronous_client(fake: FakeQueues, plain: bool) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish_many("t", VALUES)
            worker = client.worker("t", concurrency=3)(misbehave if plain else gently)
            async with worker:
                await asyncio.to_thread(check_outcomes, fake)

    asyncio.run(main())


async def gently(message: millstream.QueueMessage) -> None:
    await asyncio.sleep(0.001)
    misbehave(message)


class Gentle:
    async def __call__(self, message: millstream.QueueMessage) -> None:
        await gently(message)


def around(handler: Callable[[millstream.QueueMessage], Any]) -> Callable[[millstream.QueueMessage], Any]:
    """As decorators are often written."""

    @functools.wraps(handler)
    def wrapper(message: millstream.QueueMessage) -> Any:
        return handler(message)

    return wrapper


async def forgetful(message: millstream.QueueMessage) -> Any:
    return gently(message)


@pytest.mark.parametrize("handler", [Gentle(), functools.partial(Gentle()), Gentle().__call__, forgetful])
def test_a_coroutine_handler_that_is_no_function_is_awaited(
    fake: FakeQueues, client: millstream.Client, handler: Callable[[millstream.QueueMessage], Any]
) -> None:
    client.publish_many("t", VALUES)
    with client.worker("t")(handler):
        check_outcomes(fake)


@pytest.mark.parametrize("handler", [Gentle(), around(gently), around(around(Gentle())), lambda m: gently(m)])
def test_an_asynchronous_client_awaits_what_a_handler_returns(
    fake: FakeQueues, handler: Callable[[millstream.QueueMessage], Any]
) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish_many("t", VALUES)
            async with client.worker("t", concurrency=2)(handler):
                await asyncio.to_thread(check_outcomes, fake)

    asyncio.run(main())


def test_a_message_whose_handler_returned_what_nobody_awaits_is_not_acked(
    fake: FakeQueues, client: millstream.Client
) -> None:
    client.publish("t", "fine")
    returned = []

    def handle(message: millstream.QueueMessage) -> Any:
        returned.append(gently(message))
        return returned[-1]

    with client.worker("t")(handle):
        eventually(lambda: fake.nacked)
    assert fake.acked == []
    assert inspect.getcoroutinestate(returned[0]) == inspect.CORO_CLOSED, "Python would warn of it"
    assert "make it `async def`" in fake.nacked[0][1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_message_whose_handler_is_a_generator_is_not_acked(
    fake: FakeQueues, client: millstream.Client, asynchronous: bool
) -> None:
    def handle(message: millstream.QueueMessage) -> Iterator[None]:
        yield

    async def handle_in_a_loop(message: millstream.QueueMessage) -> AsyncIterator[None]:
        yield

    client.publish("t", "fine")
    with client.worker("t")(handle_in_a_loop if asynchronous else handle):
        eventually(lambda: fake.nacked)
    assert fake.acked == []
    assert "take `yield` out of it" in fake.nacked[0][1]


async def never_awaited(*_: object) -> None: ...


def test_functions_that_nobody_would_await_are_refused(fake: FakeQueues, client: millstream.Client) -> None:
    for name in ("on_assigned", "on_revoked"):
        with pytest.raises(InvalidArgument, match=name):
            client.stream("t", **{name: never_awaited})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="on_error"):
        client.producer("t", on_error=never_awaited)

    async def main() -> None:
        async with aio.connect(fake.address) as asynchronous:
            with pytest.raises(InvalidArgument, match="on_error"):
                asynchronous.producer("t", on_error=never_awaited)

    asyncio.run(main())


def test_as_many_handlers_as_asked_for_run_at_a_time(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish_many("t", [b"x"] * 12)
    together = threading.Barrier(3)  # breaks unless three come

    @client.worker("t", concurrency=3)
    def handle(message: millstream.QueueMessage) -> None:
        together.wait(5)

    with handle:
        eventually(lambda: len(fake.acked) == 12)


def test_stopping_finishes_what_runs_and_gives_back_the_rest(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish_many("t", [b"x"] * 20)
    begun, go_on = threading.Event(), threading.Event()

    @client.worker("t", prefetch=10)
    def handle(message: millstream.QueueMessage) -> None:
        begun.set()
        assert go_on.wait(5)

    handle.start()
    begun.wait(5)
    threading.Timer(0.05, go_on.set).start()
    assert handle.stop(5)
    assert fake.acked == [("t", 0, 0)]
    assert fake.nacked == []
    assert not any(held.left for held in fake.leases.values())


def test_a_handler_that_does_not_end_is_given_up(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish("t", b"x")
    begun, go_on = threading.Event(), threading.Event()

    @client.worker("t")
    def handle(message: millstream.QueueMessage) -> None:
        begun.set()
        go_on.wait(5)

    handle.start()
    begun.wait(5)
    assert not handle.stop(0.05)
    go_on.set()
    assert fake.acked == []


def test_a_task_that_is_cancelled_gives_its_message_back(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            begun = asyncio.Event()

            @client.worker("t")
            async def handle(message: aio.QueueMessage) -> None:
                begun.set()
                await asyncio.sleep(60)

            await handle.start()
            await begun.wait()
            assert not await handle.stop(0.01)

    asyncio.run(main())
    assert (set(fake.released), fake.nacked) == ({0}, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_run_until_a_signal(fake: FakeQueues, client: millstream.Client, number: int) -> None:
    client.publish_many("t", [b"x"] * 5)
    before = signal.getsignal(number)

    @client.worker("t")
    def handle(message: millstream.QueueMessage) -> None:
        if message.offset == 4:
            os.kill(os.getpid(), number)

    client.run_workers()
    assert len(fake.acked) == 5
    assert signal.getsignal(number) is before


def test_asynchronous_workers_run_until_a_signal(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish_many("t", [b"x"] * 5)

            @client.worker("t", concurrency=2)
            async def handle(message: aio.QueueMessage) -> None:
                if message.offset == 4:
                    os.kill(os.getpid(), signal.SIGTERM)

            await client.run_workers()

    asyncio.run(main())
    assert len(fake.acked) == 5


def test_a_signal_stops_all_asynchronous_workers_that_run_beside_each_other(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            first, second = (client.worker("t", group=group)(gently) for group in ("a", "b"))
            running = asyncio.gather(first.run(), second.run())
            await asyncio.sleep(0)  # they listen from the beginning
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await running

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_one_asynchronous_worker_leaves_the_signal_to_the_others(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            first, second = (client.worker("t", group=group)(gently) for group in ("a", "b"))
            running = asyncio.create_task(first.run())
            ended = asyncio.create_task(second.run())
            await asyncio.sleep(0)
            ended.cancel()
            await asyncio.wait([ended])
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await running

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_asynchronous_worker_leaves_the_application_its_own_handlers(fake: FakeQueues, number: int) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            before = signal.getsignal(number)
            handle = client.worker("t")(gently)
            running = asyncio.create_task(handle.run())
            await asyncio.sleep(0)
            os.kill(os.getpid(), number)
            await running
            assert signal.getsignal(number) is before

            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(number, told.set)
            running = asyncio.create_task(client.worker("t")(gently).run())
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])
            os.kill(os.getpid(), number)
            async with asyncio.timeout(10):
                await told.wait()

    asyncio.run(main())


def test_a_signal_is_for_the_application_that_asked_its_loop_for_it_as_well(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
            running = asyncio.create_task(client.worker("t")(gently).run())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await running
                await told.wait()

    asyncio.run(main())


def test_a_cancelled_run_leaves_no_task_behind(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            before = asyncio.all_tasks()
            running = asyncio.create_task(client.worker("t")(gently).run())
            async with asyncio.timeout(10):
                await eventually_async(lambda: fake.acked)
                running.cancel()
                await asyncio.wait([running])
                await asyncio.sleep(0)
            assert not {task for task in asyncio.all_tasks() - before if "wait" in repr(task.get_coro())}

    asyncio.run(main())


def test_the_second_interrupt_gives_up_the_handlers_that_still_run(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            begun = asyncio.Event()

            @client.worker("t")
            async def handle(message: aio.QueueMessage) -> None:
                begun.set()
                await asyncio.sleep(60)

            running = asyncio.ensure_future(handle.run())
            await begun.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await eventually_async(lambda: handle._stopped)
            os.kill(os.getpid(), signal.SIGINT)
            await running

    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert time.monotonic() - began_s < 10
    assert (set(fake.released), fake.nacked) == ({0}, [])


@pytest.mark.parametrize("coroutine", [True, False])
def test_a_refusal_ends_the_worker_with_its_reason(
    fake: FakeQueues, client: millstream.Client, coroutine: bool
) -> None:
    async def gently(message: millstream.QueueMessage) -> None: ...

    fake.call_errors["OpenQueue"] = deque([TopicNotFound("no such topic")])
    worker = client.worker("t")(gently if coroutine else misbehave)
    with pytest.raises(TopicNotFound):
        worker.run()


def test_a_worker_that_is_stopped_while_it_starts_begins_nothing(fake: FakeQueues, client: millstream.Client) -> None:
    client.publish("t", b"x")
    asked, go_on, handled = threading.Event(), threading.Event(), threading.Event()

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    fake.before["OpenQueue"] = answer_late
    worker = client.worker("t")(lambda message: handled.set())
    starting = threading.Thread(target=worker.start, daemon=True)
    starting.start()
    assert asked.wait(20)
    assert worker.stop()
    go_on.set()
    starting.join(20)
    eventually(lambda: fake.closed_consumers == [1] and fake.consumer_is_gone(1))
    assert not handled.is_set()


def test_an_asynchronous_worker_that_is_stopped_while_it_starts_begins_nothing(fake: FakeQueues) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            await client.publish("t", b"x")
            asked, go_on, handled = asyncio.Event(), threading.Event(), asyncio.Event()
            loop = asyncio.get_running_loop()

            def answer_late() -> None:
                loop.call_soon_threadsafe(asked.set)
                assert go_on.wait(20)

            @client.worker("t")
            async def handle(message: aio.QueueMessage) -> None:
                handled.set()

            fake.before["OpenQueue"] = answer_late
            starting = [asyncio.create_task(handle.start()) for _ in range(2)]
            await asyncio.wait_for(asked.wait(), 20)
            assert await handle.stop()
            go_on.set()
            await asyncio.wait_for(asyncio.gather(*starting), 20)
            await asyncio.wait_for(handle.ended, 20)
            assert not handled.is_set()
            assert (len(fake.opened), fake.closed_consumers) == (1, [1])

    asyncio.run(main())


def test_a_worker_can_be_called_in_tests(client: millstream.Client) -> None:
    @client.worker("t")
    def handle(message: str) -> str:
        """What it does."""
        return message.upper()

    assert handle("abc") == "ABC"
    assert (handle.__name__, handle.__doc__) == ("handle", "What it does.")


def test_concurrency_is_at_least_one(client: millstream.Client) -> None:
    with pytest.raises(InvalidArgument):
        client.worker("t", concurrency=0)


def test_while_one_worker_is_waited_for_the_others_begin_nothing_new(fake: FakeQueues) -> None:
    """They were asked to stop one after the other, each when the handlers of all before it were done."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def handle(_: millstream.QueueMessage) -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    client = millstream.connect(fake.address, timeout_s=10)
    client.publish("t", b"long")
    client.worker("t")(handle).start()
    other = client.worker("u")(lambda _: None).start()
    assert begun.wait(20)
    closing = threading.Thread(target=client.close)
    closing.start()
    try:
        eventually(lambda: other._stopped)
        assert not ended.is_set()
    finally:
        go_on.set()
        closing.join(20)


def test_while_one_asynchronous_worker_is_waited_for_the_others_begin_nothing_new(fake: FakeQueues) -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handle(_: aio.QueueMessage) -> None:
            begun.set()
            await go_on.wait()

        async def handle_other(_: aio.QueueMessage) -> None:
            pass

        client = await aio.connect(fake.address, timeout_s=10)
        await client.publish("t", b"long")
        await client.worker("t")(handle).start()
        other = await client.worker("u")(handle_other).start()
        async with asyncio.timeout(20):
            await begun.wait()
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)
            assert other._stopped
            go_on.set()
            await closing

    asyncio.run(main())

"""The sender's connections: an answer belongs to the request that was asked on them, or to none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from millstream.broker.webhooks import names
from millstream.broker.webhooks.sender import Sender
from millstream.clock import SystemClock
from millstream.testing.virtual_loop import VirtualLoop
from millstream.testing.virtual_loop import run as run_virtual
from millstream.webhooks.targets import parse_target
from millstream.webhooks.verdicts import Answer
from tests.waiting import eventually_async

FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
FAILED = b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"
BORED = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Post = Callable[[], Awaitable[Answer]]


class Receiver:
    """Answers request after request with these bytes, and goes away after half an answer, or none."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.writers: list[asyncio.StreamWriter] = []
        self.requests = 0
        self.port = 0
        #: Requests that wait for this are under way together.
        self.open = asyncio.Event()
        self.open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while await reader.read(65_536):
            self.requests += 1
            await self.open.wait()
            answer = self._answers.pop(0)
            writer.write(answer)
            if not answer.endswith(b"\r\n\r\n"):
                writer.close()
                return


def run(receiver: Receiver, work: Callable[[Sender, Post], Awaitable[None]]) -> None:
    async def body() -> None:
        server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
        receiver.port = server.sockets[0].getsockname()[1]
        target = parse_target(f"http://127.0.0.1:{receiver.port}/")
        sender = Sender(asyncio.get_running_loop(), clock=SystemClock(), allow_private=True)
        try:
            await work(sender, lambda: sender.post(target, [], b"x", timeout_s=5))
        finally:
            sender.close()
            server.close()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_connection_is_used_again() -> None:
    receiver = Receiver(FINE, FAILED)

    async def work(_: Sender, post: Post) -> None:
        assert [(await post()).status, (await post()).status] == [200, 500]
        assert len(receiver.writers) == 1

    run(receiver, work)


def test_two_answers_to_one_request_do_not_answer_the_next_one() -> None:
    async def work(_: Sender, post: Post) -> None:
        assert [(await post()).status, (await post()).status] == [200, 500]

    run(Receiver(FINE + FINE, FAILED), work)


def test_what_a_receiver_says_to_an_idle_connection_answers_nothing() -> None:
    receiver = Receiver(FINE, FAILED)

    async def work(sender: Sender, post: Post) -> None:
        assert (await post()).status == 200
        [[connection]] = sender._idle.values()
        receiver.writers[0].write(BORED)
        await eventually_async(lambda: connection.reader._buffer)  # type: ignore[attr-defined]
        assert (await post()).status == 500

    run(receiver, work)


@pytest.mark.parametrize(
    ("first", "requests"),
    [(b"", 2), (b"SSH-2.0-x\r\n\r\n", 1), (b"HTTP/1.1 2", 1)],
    ids=["nothing", "no HTTP", "half an answer"],
)
def test_an_attempt_is_not_repeated_on_every_idle_connection(first: bytes, requests: int) -> None:
    """Only a connection that ends without a word may have been closed before the request came: then once more."""
    receiver = Receiver(*[FINE] * 5, *[first] * requests, FINE)

    async def work(_: Sender, post: Post) -> None:
        receiver.open.clear()
        at_once = [asyncio.ensure_future(post()) for _ in range(5)]
        await eventually_async(lambda: receiver.requests == 5)
        receiver.open.set()
        assert [answer.status for answer in await asyncio.gather(*at_once)] == [200] * 5
        assert (await post()).status == 0
        assert receiver.requests == 5 + requests
        assert (await post()).status == 200

    run(receiver, work)


def test_a_connection_that_was_closed_a_moment_ago_costs_no_attempt() -> None:
    receiver = Receiver(FINE, b"", FINE)

    async def work(_: Sender, post: Post) -> None:
        assert [(await post()).status, (await post()).status] == [200, 200]
        assert len(receiver.writers) == 2

    run(receiver, work)


def test_a_name_that_is_looked_up_for_long_does_not_hold_up_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    looked_up: list[str] = []

    def resolve(host: str) -> list[str]:
        looked_up.append(host)
        if host == "hangs.example":
            answered.wait(20)
        return ["127.0.0.1"]

    monkeypatch.setattr("millstream.broker.webhooks.names._resolve", resolve)

    async def work(sender: Sender, post: Post) -> None:
        hanging = parse_target("http://hangs.example:9/")
        waiting = [asyncio.ensure_future(sender.post(hanging, [], b"x", timeout_s=20)) for _ in range(100)]
        try:
            await eventually_async(lambda: "hangs.example" in looked_up)
            assert (await post()).status == 200
            assert looked_up.count("hangs.example") == 1
        finally:
            answered.set()
            await asyncio.wait(waiting)

    run(Receiver(FINE), work)


def test_names_that_never_answer_hold_up_neither_names_that_do_nor_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    hanging: list[str] = []

    def resolve(host: str) -> list[str]:
        if host.startswith("hangs"):
            hanging.append(host)
            answered.wait(20)
            raise OSError("no answer")
        return ["127.0.0.1"]

    monkeypatch.setattr(names, "_resolve", resolve)
    monkeypatch.setattr(names, "_SLOW_S", 0.05)

    async def work(sender: Sender, post: Post) -> None:
        def posts(count: int, host: str) -> list[asyncio.Future[Answer]]:
            targets = [parse_target(f"http://{host}{number}.example:{port}/") for number in range(count)]
            return [asyncio.ensure_future(sender.post(target, [], b"x", timeout_s=20)) for target in targets]

        port = receiver.port
        assert [(await answer).status for answer in posts(1, "good")] == [200]
        unknown = posts(40, "hangs")
        await eventually_async(lambda: len(hanging) == 16)
        assert [(await answer).status for answer in posts(1, "good")] == [200], "it is known to answer"
        assert (await post()).status == 200, "an address needs nobody's answer"
        await asyncio.sleep(0.1)  # which is long, here
        answered.set()
        await asyncio.wait(unknown)
        answered.clear()
        hanging.clear()
        known = posts(16, "hangs")
        await eventually_async(lambda: len(hanging) == 16)
        assert [(await answer).status for answer in posts(1, "new")] == [200], "known ones do not hold up new ones"
        answered.set()
        await asyncio.wait(known)

    receiver = Receiver(*[FINE] * 9)
    run(receiver, work)


def test_a_name_is_a_slow_one_until_it_has_answered_at_once_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead names that were asked for less often than every ten minutes held the threads of names that answer."""
    took_s = 0.0
    monkeypatch.setattr(names, "_timed", lambda _host: (["192.0.2.1"], took_s))

    async def work(loop: VirtualLoop) -> None:
        asked = names.Names(loop)

        async def ask(*, after_s: float, takes_s: float) -> str:
            """Which lane it takes."""
            nonlocal took_s
            took_s = takes_s
            await asyncio.sleep(after_s)
            lane = asked._lane("there.example")
            await asked.addresses("there.example")
            return lane

        assert await ask(after_s=0, takes_s=30) == "new"
        assert await ask(after_s=601, takes_s=30) == "slow", "it has not answered since"
        assert await ask(after_s=400, takes_s=0.1) == "slow"
        assert await ask(after_s=100, takes_s=0.1) == "slow", "once may have been luck"
        assert await ask(after_s=200, takes_s=0.1) == "slow", "nobody knows it yet"
        assert await ask(after_s=1, takes_s=30) == "quick"
        assert await ask(after_s=1, takes_s=0.1) == "slow"
        asked.close()

    run_virtual(work)

"""Dead letters inside a broker, while the topics that hold them come and go."""

from __future__ import annotations

import gc
import weakref

from millstream.dead_letters import LetterFilter
from millstream.wire import calls, letter_calls
from tests.simulated_broker import Client
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

"""Dead letters inside a broker, while the topics that hold them come and go."""

from __future__ import annotations

import gc
import weakref

from millstream.dead_letters import LetterFilter
from millstream.wire import calls, letter_calls
from tests.simulated_broker import Client
from tests.unit.broker.test_queues_at_run_time import lives, publish, topic_of


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

"""`dlq-report` on letters of which the test knows why and when they died."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millstream.client import Outgoing
from tests.spark.ready.running import Ready
from tests.spark.world import World


def kill(world: World, topic: str, errors: list[str], group: str = "workers") -> None:
    """A message dies of each of these."""
    world.client.publish_many(topic, [Outgoing(value=error, key=f"k{n % 3}") for n, error in enumerate(errors)])
    with world.client.queue(topic, group=group, timeout_s=5) as queue:
        left = len(errors)
        while left:
            for message in queue.lease(100, wait="5s"):
                message.reject(message.text)
                left -= 1


def test_errors_are_clustered_and_dated(alone: Ready, own_world: World) -> None:
    world = own_world
    world.client.create_topic("orders", 2)
    world.client.create_topic("bills")
    kill(world, "orders", [f"order {n}: no such customer c-{n * 7}" for n in range(30)])
    world.broker.clock.advance("2h")
    kill(world, "orders", ["the bank at 10.0.0.1:443 does not answer"] * 4)
    world.broker.clock.advance("1h")
    kill(world, "bills", [f"cannot find 0{n}f1a2b3-1111-2222-3333-44445555666{n}" for n in range(6)], group="printers")

    facts = alone.facts("dlq-report")

    clusters = {each["error"]: each for each in facts["clusters"]}
    assert {error: each["letters"] for error, each in clusters.items()} == {
        "order <n>: no such customer c-<n>": 30,
        "cannot find <uuid>": 6,
        "the bank at <address> does not answer": 4,
    }
    assert [each["letters"] for each in facts["clusters"]] == [30, 6, 4]
    assert clusters["cannot find <uuid>"]["topic"] == "bills"
    assert clusters["cannot find <uuid>"]["group"] == "printers"
    assert clusters["cannot find <uuid>"]["reason"] == "REJECTED"
    first = {error: each["first"] for error, each in clusters.items()}
    assert sorted(first, key=lambda error: first[error]) == [
        "order <n>: no such customer c-<n>",
        "the bank at <address> does not answer",
        "cannot find <uuid>",
    ]
    assert re.fullmatch(r"order \d+: no such customer c-\d+", clusters["order <n>: no such customer c-<n>"]["example"])
    assert facts["letters"] == 40
    assert facts["places"] == [["orders → workers", 34], ["bills → printers", 6]]
    assert sum(sum(each["times"]) for each in facts["clusters"]) == 40
    assert dict(facts["keys"]) == {"k0": 14, "k1": 13, "k2": 13}


@pytest.mark.slow
def test_the_page_stands_on_its_own(alone: Ready, own_world: World) -> None:
    own_world.client.create_topic("orders")
    kill(own_world, "orders", ["<script>alert(1)</script> is not a name", "second"])
    assert alone.run("dlq-report", report="report.html") == 2
    page = alone.page
    assert "&lt;script&gt;alert(<n>)" not in page  # what we put in for a number is escaped, too
    assert "&lt;script&gt;alert(&lt;n&gt;)&lt;/script&gt;" in page
    assert "<script" not in page
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
    assert "prefers-color-scheme:dark" in page


@pytest.mark.slow
def test_letters_are_chosen_by_topic_group_and_time(alone: Ready, own_world: World) -> None:
    world = own_world
    for topic in ("orders", "bills"):
        world.client.create_topic(topic)
        kill(world, topic, ["old"] * 2)
    assert alone.facts("dlq-report", topics="orders")["letters"] == 2
    assert alone.facts("dlq-report", pattern="b.*")["letters"] == 2
    assert alone.facts("dlq-report", groups=["nobody"])["letters"] == 0
    assert "Nothing is dead" in alone.page


def test_without_a_letter_there_is_a_page_all_the_same(alone: Ready) -> None:
    facts: Any = alone.facts("dlq-report")
    assert facts["letters"] == 0
    assert facts["clusters"] == []
    assert "Nothing is dead" in alone.page

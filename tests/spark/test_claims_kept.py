"""What a query has claimed stays its own while its batch runs: over lost connections and ends of leases."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from millstream.config import Settings
from millstream.policies import LEASE_MS_MIN
from millstream.spark.claims import Claims
from millstream.spark.options import Target
from millstream.testing.broker import BrokerForTests
from tests.spark.claimed import Query, numbers, state
from tests.spark.world import World
from tests.waiting import eventually


def test_a_lost_connection_costs_nothing_when_nobody_else_is_there(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    for extended in (True, False):
        world.publish(topic, numbers(10))
        assert query.begin()
        claims = query.reader._claims
        assert claims is not None
        claims._connection.link()._sock.close()
        if extended:
            claims.extend()
            assert state(world.client, topic)[1] == 20
        query.run()
        query.done = len(query.offsets)
    assert query.batch() is None
    assert state(world.client, topic) == (0, 0, 30)


def test_one_lost_connection_with_several_claims_is_made_up_for_once(queries: list[Query]) -> None:
    """Each time that a message is taken again is a delivery, and there are not many."""
    with BrokerForTests() as broker:
        client = broker.connect()
        for topic in ("jobs", "tasks"):
            client.create_topic(topic)
            client.queue(topic, group="workers", policy={"max_deliveries": 3}).close()
            client.publish_many(topic, numbers(10))
        query = Query({"bootstrap.servers": broker.address, "subscribe": "jobs,tasks"})
        queries.append(query)
        assert query.begin()
        claims = query.reader._claims
        assert claims is not None

        def held() -> bool:
            claims.extend()
            return [state(client, topic) for topic in ("jobs", "tasks")] == [(0, 10, 0)] * 2

        claims._connection.link()._sock.close()
        eventually(held)  # once the broker has noticed
        assert all(held() for _ in range(4))
        assert len(query.run()) == 20
        query.done = len(query.offsets)
        assert query.batch() is None
        assert [state(client, topic) for topic in ("jobs", "tasks")] == [(0, 0, 10)] * 2


def test_claims_survive_a_broker_that_restarts(tmp_path: Path, queries: list[Query]) -> None:
    with BrokerForTests(tmp_path) as broker:
        port = int(broker.address.rpartition(":")[2])
        broker.connect().publish_many("jobs", numbers(10))
        query = Query({"bootstrap.servers": broker.address, "subscribe": "jobs", "maxOffsetsPerTrigger": "5"})
        queries.append(query)
        assert query.begin()
    with BrokerForTests(tmp_path, port=port) as broker:
        values = query.run()
        query.done = len(query.offsets)
        assert values + query.drain() == numbers(10)
        assert state(broker.connect(), "jobs") == (0, 0, 10)
        query.reader.stop()


@pytest.mark.parametrize("lost", ["driver", "connection", "connection before the ack"])
def test_a_batch_of_more_ranges_than_a_claim_may_name_is_had_again(
    world: World, queries: list[Query], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As a checkpoint may say of messages that are scattered."""
    monkeypatch.setattr("millstream.spark.claims.RANGES_MAX", 4)
    topic = world.topic()
    world.publish(topic, numbers(20))
    scattered = [[0, offset, offset + 1] for offset in range(0, 20, 2)]
    query = Query(world.options(topic))
    queries.append(query)
    query.offsets.append(json.dumps({**json.loads(query.offsets[0]), "claim": 1, "ranges": {topic: scattered}}))
    monkeypatch.setattr("millstream.broker.queues.claims._RANGES_MAX", 4)
    assert query.run() == numbers(20)[::2]
    claims = query.reader._claims
    assert claims is not None
    if lost == "driver":
        query.crash()
        query = query.restarted(world.options(topic))
        queries.append(query)
        assert query.run() == numbers(20)[::2]
    else:
        claims._connection.link()._sock.close()
        if lost == "connection":

            def held() -> bool:
                claims.extend()
                return state(world.client, topic) == (10, 10, 0)

            eventually(held)
    query.done = len(query.offsets)
    query.begin()
    assert state(world.client, topic)[2] == 10


# --- leases --------------------------------------------------------------------------------------------------------


def test_a_claim_is_extended_while_its_batch_runs(queries: list[Query]) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        client.publish_many("jobs", numbers(10))
        query = Query({"bootstrap.servers": broker.address, "subscribe": "jobs"})
        queries.append(query)
        assert query.begin()
        claims = query.reader._claims
        assert claims is not None
        for _ in range(5):
            broker.clock.advance("20s")  # a lease is 30 s
            claims.extend()
            assert state(client, "jobs") == (0, 10, 0)
        query.run()
        query.done = len(query.offsets)
        assert not query.begin()
        assert state(client, "jobs") == (0, 0, 10)


def test_a_short_claim_is_extended_in_time_beside_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"server": {"heartbeat_ms": 3_600_000}}
    with BrokerForTests(settings=Settings.model_validate(settings)) as broker:
        client = broker.connect()
        for topic, lease_ms in (("jobs", 60_000), ("tasks", LEASE_MS_MIN)):
            client.publish(topic, "1")
            client.queue(topic, group="workers", policy={"lease_ms": lease_ms}).close()
        claims = Claims(Target((broker.address,)), "workers")
        extended = threading.Event()
        monkeypatch.setattr(claims, "extend", extended.set)
        assert claims.take("jobs", 1)[0]
        assert not extended.wait(0.3), "there is time"
        assert claims.take("tasks", 1)[0]
        assert extended.wait(5)
        claims.close()


def test_a_lease_that_ran_out_gives_messages_to_others(queries: list[Query], capfd: pytest.CaptureFixture[str]) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        client.publish_many("jobs", numbers(10))
        client.queue("jobs", group="workers", policy={"retry": "simple"}).close()
        query = Query({"bootstrap.servers": broker.address, "subscribe": "jobs"})
        queries.append(query)
        assert query.begin()
        query.run()
        with client.queue("jobs", group="workers", timeout_s=5, prefetch=4) as others:
            broker.clock.advance("31s")
            taken = others.lease(4, wait="5s")
            query.done = len(query.offsets)
            assert not query.begin()
            assert state(client, "jobs")[1:] == (4, 6)
            others.ack(taken)
        assert state(client, "jobs") == (0, 0, 10)
    assert "4 messages of group 'workers' were done after others had got them" in capfd.readouterr().err


def test_messages_with_which_a_query_dies_again_and_again_become_dead_letters(queries: list[Query]) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        client.create_topic("jobs")
        client.queue("jobs", group="workers", policy={"max_deliveries": 3}).close()
        client.publish_many("jobs", ["poison", "other"])
        options = {"bootstrap.servers": broker.address, "subscribe": "jobs"}
        query = Query(options)
        assert query.begin()
        for _ in range(2):
            assert sorted(query.run()) == [b"other", b"poison"]
            query.crash()
            query = query.restarted(options)
        assert sorted(query.run()) == [b"other", b"poison"]
        query.crash()
        query = query.restarted(options)
        queries.append(query)
        assert query.run() == []
        query.done = len(query.offsets)
        client.publish("jobs", "fine")
        assert query.drain() == [b"fine"]
        eventually(lambda: len(client.dead_letters.list()) == 2)  # they are written beside the work
        letters = client.dead_letters.list()
        assert {letter.reason for letter in letters} == {"MAX_DELIVERIES_EXCEEDED"}
        assert sorted(letter.text for letter in letters) == ["other", "poison"]
        assert {attempt.kind for letter in letters for attempt in letter.attempts} == {"returned"}

"""Stages and claims over a socket, with kills and with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import Forbidden, StageLost
from millstream.testing.broker import BrokerForTests
from millstream.wire.stage_calls import stage_address
from tests.e2e.access_world import guarded, key_for
from tests.native import NativeClient
from tests.stage_kills import publish_through_kills, values_of
from tests.waiting import eventually


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[NativeClient]:
    with NativeClient(broker.address) as client:
        yield client


def test_what_is_staged_over_a_socket_is_published_by_one_call(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    stage = client.call("stage.open", query="q", batch=0)["stage"]
    first = client.publish(stage_address(stage, "orders"), [b"a", b"b"])
    second = client.publish(stage_address(stage, "orders"), [b"c"])
    assert [(it.base_offset, it.label) for it in (first, second)] == [(0, "disk"), (2, "disk")]
    assert values_of(client) == []
    part = {"stage": stage, "batches": 2, "messages": 3}
    answer = client.call("stage.publish", query="q", batch=0, stages=[part])
    assert (answer["already"], answer["messages"]) == (False, 3)
    assert values_of(client) == [b"a", b"b", b"c"]
    assert client.call("stage.publish", query="q", batch=0, stages=[part])["already"]
    assert client.call("stage.open", query="q", batch=0) == {"stage": "", "already": True}
    with pytest.raises(StageLost):
        client.publish(stage_address(stage, "orders"), [b"late"])
    assert client.call("stage.list")[0]["published"] == 0


@pytest.mark.slow
def test_a_broker_that_is_killed_publishes_every_batch_once(tmp_path: Path) -> None:
    publish_through_kills(tmp_path, batches=12, kills=2)


def test_staging_needs_the_right_to_produce_to_every_target() -> None:
    with guarded() as broker:
        admin = broker.connect(key=key_for(broker, "admin"))
        for topic in ("orders", "bills"):
            admin.create_topic(topic)
        with (
            NativeClient(broker.address, hello=False) as producer,
            NativeClient(broker.address, hello=False) as stranger,
            NativeClient(broker.address, hello=False) as reader,
        ):
            producer.hello(namespace="default", token=key_for(broker, "produce", scopes=["orders"]))
            stranger.hello(namespace="default", token=key_for(broker, "produce", scopes=["bills"]))
            reader.hello(namespace="default", token=key_for(broker, "read"))
            stage = producer.call("stage.open", query="q", batch=0)["stage"]
            producer.publish(stage_address(stage, "orders"), [b"mine"])
            with pytest.raises(Forbidden):
                producer.publish(stage_address(stage, "bills"), [b"not mine"])
            part = {"stage": stage, "batches": 1, "messages": 1}
            with pytest.raises(Forbidden):
                stranger.call("stage.publish", query="q", batch=0, stages=[part])
            with pytest.raises(Forbidden):
                reader.call("stage.open", query="q", batch=0)
            with pytest.raises(Forbidden):
                producer.call("stage.list")
            assert reader.call("stage.list")[0]["messages"] == 1
            assert producer.call("stage.publish", query="q", batch=0, stages=[part])["messages"] == 1


def test_a_query_is_only_for_those_who_may_produce_to_its_topics() -> None:
    """A batch without messages has no targets to ask for; but all batches up to its number count as published."""
    with guarded() as broker:
        admin = broker.connect(key=key_for(broker, "admin"))
        for topic in ("orders", "bills"):
            admin.create_topic(topic)
        with (
            NativeClient(broker.address, hello=False) as producer,
            NativeClient(broker.address, hello=False) as stranger,
        ):
            producer.hello(namespace="default", token=key_for(broker, "produce", scopes=["orders"]))
            stranger.hello(namespace="default", token=key_for(broker, "produce", scopes=["bills"]))
            for batch in range(2):
                stage = producer.call("stage.open", query="q", batch=batch)["stage"]
                producer.publish(stage_address(stage, "orders"), [b"mine"])
                with pytest.raises(Forbidden):
                    stranger.call("stage.publish", query="q", batch=1000, stages=[])
                with pytest.raises(Forbidden):
                    stranger.call("stage.abort", query="q", batch=batch)
                part = {"stage": stage, "batches": 1, "messages": 1}
                assert not producer.call("stage.publish", query="q", batch=batch, stages=[part])["already"]
            with pytest.raises(Forbidden):
                stranger.call("stage.publish", query="q", batch=1000, stages=[])


def test_a_claim_over_a_socket_comes_back_with_its_connection(client: NativeClient, broker: BrokerForTests) -> None:
    client.call("topic.create", name="orders")
    client.publish("orders", [b"%d" % n for n in range(10)])
    driver = NativeClient(broker.address, client_id="driver")
    claim = driver.call("queue.claim", topic="orders", group="spark", max=6)
    assert claim["ranges"] == [[0, 0, 6]]
    assert driver.call("queue.settle_claim", claim=claim["claim"], ranges=[[0, 0, 2]])["settled"] == 2
    told = client.call("why", topic="orders", group="spark")
    assert (told["state"], "driver" in told["sentence"]) == ("leased", True)
    driver.close()
    eventually(lambda: not client.call("queue.describe", topic="orders", group="spark")["leased"])
    again = client.call("queue.claim", topic="orders", group="spark", wanted=[[0, 0, 6]])
    assert (again["ranges"], again["settled"], again["refused"]) == ([[0, 2, 6]], [[0, 0, 2]], [])

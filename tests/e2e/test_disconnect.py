"""An administrator ends the connection of a client: it is told why, and what it held goes back at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

import millstream
from millstream import aio
from millstream.client import Client
from millstream.errors import ConnectionLost, ConnectionNotFound, Forbidden, InvalidArgument
from millstream.mqtt.packets import Disconnect
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for
from tests.e2e.command_line import CommandLine, keep_logs_out
from tests.e2e.mqtt.support import Address, Wires
from tests.logged import logged
from tests.native import NativeClient
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True, mqtt=True) as running:
        yield running


@pytest.fixture(scope="module")
def operator(broker: BrokerForTests) -> Client:
    return broker.connect(client_id="operator")


def the(operator: Client, client_id: str) -> Any:
    found = [one for one in operator.admin.connections() if one.client_id == client_id]
    assert len(found) == 1, found
    return found[0]


def test_a_native_client_is_told_why_and_closed(broker: BrokerForTests, operator: Client) -> None:
    with NativeClient(broker.address, client_id="idle") as client:
        ended = operator.admin.disconnect(the(operator, "idle").id, "go home")
        assert (ended.client_id, ended.door) == ("idle", "native")
        error = client.closing_error()
    assert isinstance(error, ConnectionLost)
    assert "administrator" in str(error)
    assert "go home" in str(error)
    assert not [one for one in operator.admin.connections() if one.client_id == "idle"]


def test_what_it_had_leased_goes_to_the_next_one_at_once(broker: BrokerForTests, operator: Client) -> None:
    operator.publish("held", b"job")
    with broker.connect(client_id="hoarder") as hoarder, hoarder.queue("held", lease="1h") as queue:
        assert queue.lease(wait="5s")
        holding = [one for one in operator.admin.connections() if one.client_id == "hoarder" and one.leased]
        assert operator.admin.disconnect(holding[0].id).leased == 1
        with operator.queue("held") as mine:
            (message,) = mine.lease(wait="5s")
            message.ack()


def test_a_client_that_does_not_read_loses_what_it_holds_all_the_same(broker: BrokerForTests, operator: Client) -> None:
    operator.publish("hung", b"job")
    with NativeClient(broker.address, client_id="hung") as client:
        consumer = client.call("queue.open", topic="hung", group="default", lease_ms=3_600_000)["consumer"]
        assert client.lease(consumer, 1, wait_ms=5_000)
        operator.publish("large", bytes(500_000))
        for _ in range(200):  # what it does not read fills all buffers on the way
            client.send_fetch("large", 0)
        with operator.queue("hung") as mine:
            assert mine.lease() == []
            sockets = broker.broker.metrics.connections_by_door
            before = sockets["native"]
            operator.admin.disconnect(the(operator, "hung").id)
            (message,) = mine.lease(wait="5s")
            message.ack()
            assert sockets["native"] == before, "it has not read its last words"
            broker.clock.advance("6s")
            eventually(lambda: sockets["native"] == before - 1)


def test_the_sdk_comes_back_by_itself(broker: BrokerForTests, operator: Client) -> None:
    with broker.connect(client_id="loyal") as client:
        client.create_topic("loyal")
        operator.admin.disconnect(the(operator, "loyal").id)
        client.publish("loyal", b"again")
        assert the(operator, "loyal")


def test_a_websocket_and_an_mqtt_client_are_told_too(broker: BrokerForTests, operator: Client) -> None:
    with connect(f"{broker.url.replace('http', 'ws')}/api/v1/ws?client_id=page") as line:
        line.recv()
        operator.admin.disconnect(the(operator, "page").id, "closing time")
        assert "closing time" in json.loads(line.recv())["error"]["message"]
    wire = Wires(Address("127.0.0.1", broker.mqtt_port)).connect(client_id="sensor")
    operator.admin.disconnect(the(operator, "sensor").id, "closing time")
    told = wire.receive(Disconnect)
    assert (told.reason, "closing time" in told.properties.reason_string) == (0x98, True)


def test_a_stream_over_http_ends_with_the_reason(broker: BrokerForTests, operator: Client) -> None:
    operator.publish("streamed", b"job")
    url = f"{broker.url}/api/v1/queues/streamed/default/stream"
    with httpx.stream("GET", url, headers={"x-client-id": "reader"}, timeout=10) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["receipt"]
        operator.admin.disconnect(the(operator, "reader").id, "enough")
        assert "enough" in json.loads([*lines][-1])["error"]["message"]


def test_http_and_the_command_line_end_connections_too(
    broker: BrokerForTests, operator: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_logs_out()
    command = CommandLine(capsys, monkeypatch, broker.address, "admin")
    with NativeClient(broker.address, client_id="one") as client:
        path = f"{broker.url}/api/v1/admin/connections/{the(operator, 'one').id}"
        answer = httpx.delete(path, params={"reason": "by HTTP"})
        assert (answer.status_code, answer.json()["client_id"]) == (200, "one")
        assert "by HTTP" in str(client.closing_error())
        assert httpx.delete(path).json()["code"] == "CONNECTION_NOT_FOUND"
    with NativeClient(broker.address, client_id="two") as client:
        number = the(operator, "two").id
        assert number in command("connections", "--json")
        said = command("disconnect", number, "--reason", "by hand")
        assert "two" in said
        assert "by hand" in str(client.closing_error())


def test_the_asynchronous_client_can_do_it_too(broker: BrokerForTests, operator: Client) -> None:
    async def scenario(number: str) -> str:
        async with await aio.connect(broker.address) as client:
            return (await client.admin.disconnect(number)).client_id

    with NativeClient(broker.address, client_id="three"):
        assert asyncio.run(scenario(the(operator, "three").id)) == "three"


def test_who_is_not_there_and_oneself_are_refused(operator: Client) -> None:
    with pytest.raises(ConnectionNotFound):
        operator.admin.disconnect("nobody")
    with pytest.raises(InvalidArgument, match="ask through"):
        operator.admin.disconnect(the(operator, "operator").id)


def test_only_administrators_may_and_it_is_audited_and_logged() -> None:
    with (
        guarded() as broker,
        logged() as log,
        millstream.connect(broker.address, key=key_for(broker, "admin"), client_id="operator") as operator,
        millstream.connect(broker.address, key=key_for(broker, "consume"), client_id="worker") as worker,
    ):
        with pytest.raises(Forbidden):
            worker.admin.disconnect("any")
        number = the(operator, "worker").id
        operator.admin.disconnect(number, "too slow")
        entries = operator.audit(call="admin.disconnect").entries
        assert [(entry.outcome, entry.names) for entry in entries] == [("done", [number]), ("FORBIDDEN", ["any"])]
        entry = log.one("client disconnected")
        assert (entry["client"], entry["by"], entry["reason"]) == ("worker", "operator", "too slow")
        assert "too slow" in log.one("client gone", client="worker")["reason"]


def test_the_sockets_of_those_who_were_ended_are_closed(broker: BrokerForTests, operator: Client) -> None:
    with NativeClient(broker.address, client_id="last") as client:
        operator.admin.disconnect(the(operator, "last").id)
        client.closing_error()
        eventually(lambda: len(operator.admin.connections()) == 1)

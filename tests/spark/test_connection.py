"""The connector's own connection: keys, TLS, brokers that go away, and those that were never there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream import connect as client_of
from millstream.config import Settings
from millstream.errors import ConnectionLost, Forbidden, InvalidArgument, TopicNotFound, Unauthorized
from millstream.spark import connection as module
from millstream.spark.connection import BrokerConnection, connect, fetched
from millstream.spark.options import Target
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire import calls
from millstream.wire.messages import FetchRequest
from tests.e2e.access_world import guarded, key_for
from tests.spark.reading import batch_reader, read, values
from tests.spark.world import World


def describe(connection: BrokerConnection) -> object:
    return connection.call(calls.DescribeBroker())


def test_a_process_has_one_connection_to_a_broker(world: World) -> None:
    target = Target((world.broker.address,))
    assert connect(target) is connect(Target((world.broker.address,)))
    assert connect(target) is not connect(Target((world.broker.address,), namespace="other"))


def test_a_forked_worker_does_not_talk_on_the_connection_of_its_parent(world: World) -> None:
    target = Target((world.broker.address,))
    parent = connect(target)
    describe(parent)
    child = os.fork()
    if not child:
        os._exit(0 if connect(target) is not parent and describe(connect(target)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert describe(parent)


def test_many_questions_at_once_and_each_has_its_own_error(world: World) -> None:
    topics = [world.topic(), "missing", world.topic(2)]
    first, missing, second = connect(Target((world.broker.address,))).calls(
        [calls.DescribeTopic(name=name) for name in topics], calls.TopicInfo
    )
    assert isinstance(missing, TopicNotFound)
    assert (len(first.partitions), len(second.partitions)) == (1, 2)


def test_large_answers_keep_what_they_say_while_others_come(world: World) -> None:
    """They are not copied out of the memory that they were received into."""
    topic = world.topic()
    for number in range(6):
        world.publish(topic, [b"%d" % number * 100_000] * 6)
    connection = BrokerConnection(Target((world.broker.address,)))
    requests = [FetchRequest(topic, 0, 6 * number, 100_000, 0) for number in range(6)]
    one_by_one = [connection.fetch(request).batches for request in requests]
    copies = [bytes(batches) for batches in one_by_one]
    answers = [connection.begin_fetch(request) for request in requests]  # several of them in one receive
    describe(connection)
    at_once = [fetched(answer.wait(time.monotonic() + 10)).batches for answer in answers]
    assert len(set(copies)) == 6
    assert [bytes(batches) for batches in one_by_one] == copies
    assert [bytes(batches) for batches in at_once] == copies


def test_nobody_there_is_said_soon_and_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_CONNECT_S", 0.3)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(ConnectionLost, match=f"nobody listens at {address}: start a broker"):
        read({"bootstrap.servers": address, "subscribe": "orders"})


def test_another_server_is_asked_when_one_does_not_answer(world: World) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{sock.getsockname()[1]}"
    assert describe(BrokerConnection(Target((nobody, world.broker.address))))


def test_something_else_that_listens_is_not_taken_for_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_S", 60.0)  # so that one try is all there is time for
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(4096)  # all of it: closing on unread bytes would reset the connection
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match="is not a Millstream broker"):
            describe(BrokerConnection(Target((address,))))


@pytest.mark.parametrize("address", ["", ":9092", "host:port", "host:0", "host:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument):
        describe(BrokerConnection(Target((address,) if address else ())))


# --- brokers that go away ------------------------------------------------------------------------------------------


def test_a_read_goes_on_when_the_broker_was_killed_and_started_again(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    again = BrokerProcess(tmp_path, port=int(broker.address.rpartition(":")[2]))
    starting = threading.Timer(0.5, again.start)
    try:
        with client_of(broker.address) as client:
            client.create_topic("orders")
            for _ in range(20):  # each of a size that is handed out by itself
                client.publish_many("orders", [bytes(3000)] * 100)
        reader = batch_reader({"bootstrap.servers": broker.address, "subscribe": "orders", "fetch.max.bytes": "64k"})
        (part,) = reader.partitions()
        rows = reader.read(part)
        seen = next(rows).column("offset").to_pylist()
        assert len(seen) < 2000
    finally:
        broker.kill()
    starting.start()
    try:
        for batch in rows:
            seen += batch.column("offset").to_pylist()
        assert seen == list(range(2000))
    finally:
        starting.join()
        again.stop()


def test_a_connection_that_was_silent_for_too_long_is_opened_again(world: World) -> None:
    connection = BrokerConnection(Target((world.broker.address,)))
    before = connection.link()
    before.welcome.heartbeat_ms = 0  # as if more than two heartbeats had passed
    assert describe(connection)
    assert connection.link() is not before


# --- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_opens_what_it_may() -> None:
    with guarded() as broker:
        with broker.connect(key=key_for(broker, "admin", "produce")) as client:
            client.create_topic("orders")
            client.create_topic("secrets")
            client.publish("orders", b"x")
        options = {"bootstrap.servers": broker.address, "subscribe": "orders"}
        with pytest.raises(Unauthorized):
            read(options)
        with pytest.raises(Unauthorized):
            read({**options, "token": "ms_wrong_key"})
        allowed = {**options, "token": key_for(broker, "read", "consume", scopes=["orders"])}
        assert values(allowed) == [b"x"]
        with pytest.raises(Forbidden):
            read({**allowed, "subscribe": "secrets"})


# --- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    directory = tmp_path_factory.mktemp("certificates")
    certificate, key = str(directory / "it.pem"), str(directory / "it.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=it", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@contextmanager
def encrypted(certificate: tuple[str, str]) -> Iterator[BrokerForTests]:
    settings = {
        "server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100},
        "tls": {"certificate": certificate[0], "key": certificate[1]},
    }
    with BrokerForTests(settings=Settings.model_validate(settings)) as broker:
        yield broker


def test_tls_is_spoken_with_a_broker_whose_authority_is_trusted(certificate: tuple[str, str]) -> None:
    with encrypted(certificate) as broker:
        with broker.connect(ca=certificate[0]) as client:
            client.create_topic("orders")
            client.publish_many("orders", [b"%d" % number * 100 for number in range(5000)])
        options = {"bootstrap.servers": broker.address, "subscribe": "orders"}
        assert len(read({**options, "tls.ca": certificate[0]})) == 5000
        with pytest.raises(InvalidArgument, match="is not trusted"):
            read({**options, "bootstrap.servers": f"tls://{broker.address.removeprefix('tls://')}"})
        with pytest.raises(InvalidArgument, match=r"tls\.ca"):
            read({**options, "tls.ca": "/no/such/file"})
        connect(Target((broker.address,), ca=certificate[0])).close()  # or the broker waits for its farewell


def test_tls_with_a_broker_that_speaks_none_is_an_error(world: World, certificate: tuple[str, str]) -> None:
    with pytest.raises((InvalidArgument, ConnectionLost), match=r"TLS|lost|closed"):
        read(world.options("any", **{"tls.ca": certificate[0], "timeout": "1s"}))

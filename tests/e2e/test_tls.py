"""TLS on every port: native and HTTP, blocking and asyncio, asyncio's loop and uvloop, with certificates of our own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import millstream
from millstream.config import Settings, TlsSettings
from millstream.errors import ConnectionLost, InvalidArgument, StartFailed
from millstream.server.tls import ServerTls
from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.e2e.mqtt.round_trip import round_trip
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


class Pair(NamedTuple):
    certificate: str
    key: str


def certificate(directory: Path, name: str, signer: Pair | None = None) -> Pair:
    pair = Pair(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", pair.key, "-out", pair.certificate]
    if signer is not None:
        command += ["-CA", signer.certificate, "-CAkey", signer.key, "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(directory: Path) -> Pair:
    return certificate(directory, "authority")


@pytest.fixture(scope="module")
def server(directory: Path, authority: Pair) -> Pair:
    try:
        return certificate(directory, "server", authority)
    except subprocess.CalledProcessError:
        pytest.skip("this openssl is too old to sign with -CA")


def settings(pair: Pair, **more: str) -> Settings:
    return Settings.model_validate(
        {
            "server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100},
            "tls": {"certificate": pair.certificate, "key": pair.key, **more},
        }
    )


@pytest.fixture(scope="module")
def broker(server: Pair) -> Iterator[BrokerForTests]:
    with BrokerForTests(settings=settings(server), http=True, mqtt=True) as broker:
        yield broker


def use_everything(client: millstream.Client, topic: str) -> None:
    """All that the blocking client does with its socket: large and small, one and many, waiting and not."""
    values = [bytes([number % 256]) * size for number, size in enumerate((1, 100, 70_000, 500_000) * 5)]
    client.publish(topic, b"first")
    with client.producer(topic) as producer:
        for value in values:
            producer.send(value)
    found = []
    for message in client.stream(topic, timeout_s=10):
        found.append(message.value)
        if len(found) == len(values) + 1:
            break
    assert found == [b"first", *values]
    with client.queue(topic, prefetch=5) as queue:
        for expected in found:
            leased = queue.next(timeout_s=10)
            assert leased is not None
            assert leased.value == expected
            leased.ack()


def test_the_blocking_client_works_over_tls(broker: BrokerForTests, authority: Pair) -> None:
    use_everything(broker.connect(ca=authority.certificate), "blocking")


@pytest.mark.parametrize("acks", ["leader", "none"])
def test_records_that_the_system_takes_in_pieces_arrive_whole_and_in_order(
    broker: BrokerForTests, authority: Pair, acks: Any
) -> None:
    values = [bytes([number]) * 400_000 for number in range(20)]
    client = broker.connect(ca=authority.certificate)
    with client.producer(f"pieces-{acks}", acks=acks, linger_ms=0) as producer:
        transport = producer._transport
        assert transport is not None
        transport._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # type: ignore[arg-type]
        for value in values:
            producer.send(value)
        producer.flush(20)
    assert transport.drains, "the link was never full"
    with client.stream(f"pieces-{acks}", start="earliest", timeout_s=10) as stream:
        assert [message.value for message in itertools.islice(stream, len(values))] == values


def test_threads_share_an_encrypted_connection(broker: BrokerForTests, authority: Pair) -> None:
    client = broker.connect(ca=authority.certificate)
    client.create_topic("shared")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                client.publish("shared", b"x" * (number * 1000 + turn))
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert client.topic("shared").partitions[0].high_watermark == 180


def test_the_asyncio_client_works_over_tls(broker: BrokerForTests, authority: Pair) -> None:
    async def use() -> list[bytes | None]:
        async with millstream.aio.connect(f"tls://{broker.address}", ca=authority.certificate) as client:
            values = [b"x" * size for size in (1, 100_000, 600_000)]
            for value in values:
                await client.publish("asynchronous", value)
            found = []
            async for message in client.stream("asynchronous", timeout_s=10):
                found.append(message.value)
                if len(found) == len(values):
                    break
            return found

    assert [len(value or b"") for value in asyncio.run(use())] == [1, 100_000, 600_000]


def test_what_is_sent_without_confirmations_is_with_the_broker_when_the_producer_is_closed(
    broker: BrokerForTests, authority: Pair
) -> None:
    async def use() -> None:
        async with (
            millstream.aio.connect(f"tls://{broker.address}", ca=authority.certificate) as client,
            client.producer("unconfirmed", acks="none", batch_bytes=1 << 18, buffer_bytes=1 << 20) as producer,
        ):
            for _ in range(60):
                await producer.send(bytes(200_000))

    asyncio.run(use())
    client = broker.connect(ca=authority.certificate)
    eventually(lambda: client.topic("unconfirmed").partitions[0].high_watermark == 60)


def test_http_is_https(broker: BrokerForTests, authority: Pair) -> None:
    assert broker.url.startswith("https://")
    context = ssl.create_default_context(cafile=authority.certificate)
    with httpx.Client(verify=context) as http:
        assert http.get(f"{broker.url}/api/v1/namespaces").json() == ["default"]


def test_mqtt_is_encrypted_on_its_port_and_over_websocket(broker: BrokerForTests, authority: Pair) -> None:
    round_trip(broker.mqtt_port, "tcp", ca=authority.certificate)
    round_trip(int(broker.url.rpartition(":")[2]), "websockets", ca=authority.certificate)


def test_who_cannot_be_trusted_and_who_speaks_plainly_is_told_so(broker: BrokerForTests, server: Pair) -> None:
    with pytest.raises(ConnectionLost, match=r"certificate of .* is not trusted: .*; say who has signed it: --ca"):
        broker.connect(tls=True)
    with pytest.raises(ConnectionLost, match="if it speaks TLS, write tls:// in front of the address"):
        broker.connect(timeout_s=2)

    async def plainly() -> None:
        async with millstream.aio.connect(broker.address, timeout_s=2):
            pass

    with pytest.raises(ConnectionLost, match="if it speaks TLS, write tls:// in front of the address"):
        asyncio.run(plainly())

    async def untrusting() -> None:
        async with millstream.aio.connect(broker.address, tls=True):
            pass

    with pytest.raises(ConnectionLost, match="not trusted"):
        asyncio.run(untrusting())
    with BrokerForTests() as plain, pytest.raises(ConnectionLost, match=r"TLS|closed|lost"):
        plain.connect(tls=True, timeout_s=5)
    with pytest.raises(InvalidArgument, match="cannot be used"):
        broker.connect(ca="/nowhere.pem")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_of_tls_are_refused(broker: BrokerForTests) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = broker.address.split(":")
    with socket.create_connection((host, int(port))) as sock, pytest.raises((ssl.SSLError, ConnectionResetError)):
        context.wrap_socket(sock)


def test_clients_can_be_asked_for_a_certificate(directory: Path, authority: Pair, server: Pair) -> None:
    mine = certificate(directory, "client", authority)
    with BrokerForTests(settings=settings(server, client_ca=authority.certificate)) as broker:
        context = ssl.create_default_context(cafile=authority.certificate)
        context.load_cert_chain(mine.certificate, mine.key)
        assert broker.connect(tls=context).broker()["node_id"]
        with pytest.raises(ConnectionLost):
            broker.connect(ca=authority.certificate, timeout_s=3)


def test_a_certificate_is_replaced_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, directory: Path, authority: Pair, server: Pair
) -> None:
    in_use = Pair(str(tmp_path / "broker.pem"), str(tmp_path / "broker.key"))

    def install(pair: Pair) -> None:
        for source, target in zip(pair, in_use, strict=True):
            shutil.copy(source, target)

    def served(tls: ServerTls) -> bytes | None:
        assert tls.context is not None
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        back = ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=authority.certificate)
        client = context.wrap_bio(theirs, ours, server_hostname="localhost")
        here = tls.context.wrap_bio(ours, back, server_side=True)
        for _ in range(4):
            for side in (client, here):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                theirs.write(back.read())
        return client.getpeercert(binary_form=True)

    install(server)
    tls = ServerTls(TlsSettings(certificate=in_use.certificate, key=in_use.key))
    first = served(tls)
    install(certificate(directory, "second", authority))
    tls.reload()
    second = served(tls)
    assert first != second
    Path(in_use.certificate).write_text("half a certificate")
    tls.reload()
    assert served(tls) == second


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"certificate": "/nowhere.pem"}, "there is no file"),
        ({"key": "/nowhere.key"}, "mean nothing without"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartFailed, match=sentence):
        ServerTls(TlsSettings(**wrong))


def test_it_is_said_which_of_the_files_is_no_good(tmp_path: Path, authority: Pair) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    good = {"certificate": authority.certificate, "key": authority.key}
    with pytest.raises(StartFailed, match=r"tls\.client_ca .*nonsense"):
        ServerTls(TlsSettings(**good, client_ca=str(nonsense)))
    with pytest.raises(StartFailed, match="not PEM"):
        ServerTls(TlsSettings(certificate=authority.certificate, key=str(nonsense)))


@pytest.mark.usefixtures("as_users_start_it")
def test_the_real_broker_on_uvloop_speaks_tls_to_both_clients(tmp_path: Path, authority: Pair, server: Pair) -> None:
    options = ["--set", f"tls.certificate={server.certificate}", "--set", f"tls.key={server.key}"]
    with BrokerProcess(tmp_path, arguments=options) as process:
        with millstream.connect(process.address, ca=authority.certificate) as client:
            use_everything(client, "uvloop")
        round_trip(process.mqtt_port, "tcp", ca=authority.certificate)
        script = (
            "import asyncio, sys, uvloop, millstream\n"
            "async def main():\n"
            "    async with millstream.aio.connect(sys.argv[1], ca=sys.argv[2]) as client:\n"
            "        await client.publish('again', b'x' * 300_000)\n"
            "        async for message in client.stream('again', timeout_s=10):\n"
            "            print(len(message.value)); break\n"
            "uvloop.run(main())\n"
        )
        command = [sys.executable, "-c", script, process.address, authority.certificate]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "300000\n"
        assert process.stop() == 0

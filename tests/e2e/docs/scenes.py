"""What each page takes for granted: how things stand when its reader begins, and how they must stand at the end.

A scene prepares a broker, yields while the steps of its page are followed, and looks at what came of it.
"""

from __future__ import annotations

import json
import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import millstream
from millstream.client import Client
from tests.e2e.docs.pages import block
from tests.e2e.docs.reader import Reader
from tests.e2e.test_tls import certificate

__all__ = ["SCENES"]

Scene = Callable[[Reader], Iterator[None]]

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def settled(client: Client, topic: str, group: str) -> bool:
    """Whether a queue has a consumer and nothing left for it."""
    queue = next((queue for queue in client.queues.list(topic) if queue.group == group), None)
    return queue is not None and queue.consumers > 0 and queue.depth == 0


def settled_by_all(client: Client, topic: str, group: str) -> bool:
    """Whether nothing is left in a queue that nobody reads any more."""
    [queue] = [queue for queue in client.queues.list(topic) if queue.group == group]
    return queue.depth == 0


class Received(NamedTuple):
    headers: set[str]
    body: bytes


@contextmanager
def receiver() -> Iterator[tuple[str, Queue[Received]]]:
    """Somebody else's server: its address, and what it was sent."""
    received: Queue[Received] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put(Received({name.lower() for name in self.headers}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    server.server_close()


def end_the_worker(reader: Reader, program: str) -> None:
    """Ctrl-C for the worker of orders/billing that a program runs, when it has done everything."""

    def watch() -> None:
        watcher = reader.broker.connect()
        reader.press_ctrl_c(lambda: settled(watcher, "orders", "billing"))

    reader.before[program] = watch


def charging(reader: Reader) -> list[str]:
    charged: list[str] = []

    async def charge(text: str) -> None:
        charged.append(text)

    reader.names["charge"] = charge
    end_the_worker(reader, "bill.run()")
    return charged


def readme(reader: Reader) -> Iterator[None]:
    reader.start()  # `make run`
    charged = charging(reader)
    yield
    assert sorted(charged)[:2] == ["a coffee", "order 0"]
    assert len(charged) == 1 + 1000
    printed = reader.printed[0].splitlines()
    assert printed[0].endswith(" disk")
    assert len(printed) == 1 + len(charged)


def index(reader: Reader) -> Iterator[None]:
    """Nothing is there: the page starts the broker itself."""
    charged = charging(reader)
    yield
    assert charged == ["a coffee"] * 3  # from the command line, Python and curl
    assert set(reader.printed[0].splitlines()) == {"a coffee"}


def access(reader: Reader) -> Iterator[None]:
    """No broker and no keys yet, but a certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    made = certificate(reader.directory, "broker")
    reader.patch.setenv("SSL_CERT_FILE", made.certificate)  # an authority of this machine
    reader.names["context"] = ssl.create_default_context()
    (reader.directory / "authority.pem").write_text((reader.directory / "broker.pem").read_text())
    first: list[str] = []

    def administrator() -> Client:
        return millstream.connect(reader.instead["broker.example:9092"](), key=first[0], ca=made.certificate)

    def id_of(name: str) -> str:
        with administrator() as client:
            return next(key.id for key in client.keys.list() if key.name == name)

    reader.before["millstream serve"] = lambda: first.append(reader.said.split()[0])
    reader.instead["ms_1f2e3d4c5b6a_…"] = lambda: first[0]
    reader.instead["9a8b7c6d5e4f"] = lambda: id_of("checkout")
    reader.instead["broker.example:9092"] = lambda: f"localhost:{reader.broker.address.rpartition(':')[2]}"
    yield
    with administrator() as client:
        assert [key.roles for key in client.keys.list()] == [["admin"]]  # the other one is revoked
        assert client.quota("team-a").topics == 100


def backpressure(reader: Reader) -> Iterator[None]:
    reader.start()
    client = reader.connect()
    client.create_topic("orders")
    yield
    assert client.topic("orders").config["throttle_lag_ms"] == 30_000
    assert client.broker()["mode"] == "normal"


def dead_letters(reader: Reader) -> Iterator[None]:
    """Letters of three kinds."""
    reader.start()
    client = reader.connect()

    def die(error: str) -> None:
        client.publish("orders", json={"amount": -5})
        with client.queue("orders", group="billing") as queue:
            queue.next(5).reject(error, wait=True)

    for error in ("db down", "a timeout", "odd amount"):
        die(error)
    [odd] = client.dead_letters.list(error="odd amount")
    repaired: list[str] = []
    reader.instead["01JD3QZ8M0K5X7T2B9WCE4R6VA"] = lambda: odd.id
    reader.names["repair"] = lambda message: repaired.append(message.headers["millstream-dead-error"])
    reader.before["plan_replay"] = lambda: die("db down")
    with receiver() as (url, received):
        reader.instead["https://alerts.example.com/hook"] = lambda: url
        yield
        assert client.stream("orders.repaired").next(5).json() == {"amount": 5}
        assert reader.names["plan"].total == 1
        assert repaired == ["a timeout"]
        die("bad payload")
        shown = json.loads(block("docs/guide/dead-letters.md", "json"))
        assert json.loads(received.get(timeout=10).body).keys() == shown.keys()
        reader.close()


def durability(reader: Reader) -> Iterator[None]:
    reader.start()
    yield
    assert reader.connect().topic("audit").config["fsync"] == "always"


def first_hour(reader: Reader) -> Iterator[None]:
    """Receipts and ids are those that the terminal has shown."""
    reader.start()  # `make run`
    client = reader.connect()
    leased: list[str] = []
    for verb in ("ack", "why", "reject"):  # each comes right behind a lease
        reader.before[f"millstream {verb} orders"] = lambda: leased.append(reader.said.split("\n")[2].split()[0])
    reader.instead["orders:0:0:1:0000010175cc0b28"] = lambda: leased[0]
    reader.instead["orders:0:1:1:0000014e4576a526"] = lambda: leased[1]
    reader.instead["orders:0:1:2:000001f21f756f99"] = lambda: leased[2]
    reader.before["--wait 5s"] = lambda: reader.broker.clock.advance("2s")  # the time of a retry
    reader.instead["01M7J4GRX25AYNAB8000000000"] = lambda: client.dead_letters.list()[0].id
    reader.instead["01M7GKBEFSGBA51QG000000001"] = lambda: client.browse("orders")[1].id
    yield
    assert not client.dead_letters.list()


def http(reader: Reader) -> Iterator[None]:
    """The guide goes on at offsets 17 and 4 of two partitions."""
    reader.start()
    client = reader.connect()
    (reader.directory / "photo.png").write_bytes(b"\x89PNG")
    client.create_topic("orders", partitions=2)
    for number in range(40):
        client.publish("orders", json={"total": 7}, partition=number % 2)
    leased: list[str] = []
    reader.before["queues/ack"] = lambda: leased.append(json.loads(reader.said)[0]["receipt"])
    reader.instead["orders:0:42:1:…"] = lambda: leased[0]
    yield
    assert client.stream("photos").next(5).value == b"\x89PNG"


def mqtt(reader: Reader) -> Iterator[None]:
    """The worker of the page is one that ends when it has done everything."""
    paho = pytest.importorskip("paho.mqtt.client")
    reader.start()
    client = reader.connect()

    def until_settled(worker: Any) -> None:
        while not settled(client, "orders", "billing"):
            worker.loop(0.05)
        worker.disconnect()

    reader.patch.setattr(paho.Client, "loop_forever", until_settled)
    yield
    handled = [line.partition(" ") for line in reader.printed[0].splitlines()]
    assert sorted(value for _, _, value in handled) == ["a coffee", "a tea"]
    assert ("order-17", " ", "a coffee") in handled
    assert not list(client.mqtt.sessions("phone"))
    assert settled_by_all(client, "mails", "sender")


def operate(reader: Reader) -> Iterator[None]:
    """Installed, not started."""

    def begin() -> None:
        reader.start()
        reader.connect().publish("orders", "a coffee")

    reader.before["millstream backup orders.backup --data"] = begin
    yield
    assert (reader.directory / "data-copy" / "topics").is_dir()


def pubsub(reader: Reader) -> Iterator[None]:
    reader.start()
    client = reader.connect()
    handled: list[str] = []
    client.once_subscribed = lambda: client.publish("orders.eu.created", "a coffee")
    reader.names |= {"handle": lambda message: handled.append(message.text), "payment": b"12 EUR"}
    client.create_topic("prices")
    reader.beside.add("message.reply(")
    yield
    assert handled == ["a coffee"]
    assert reader.names["reply"].json() == {"price": 1250}
    assert not reader.names["receipt"].duplicate


def queues(reader: Reader) -> Iterator[None]:
    reader.start()
    client = reader.connect()
    billed: list[Any] = []
    client.publish("orders", json={"total": 25})
    reader.names |= {"bill": billed.append, "message_id": client.publish("orders", json={"total": 7}).id}
    end_the_worker(reader, "handle.run()")
    yield
    assert billed == [{"total": 25}, {"total": 7}]


def schedules(reader: Reader) -> Iterator[None]:
    reader.start()
    client = reader.connect()
    reader.instead["01JD3QZ8M0K5X7T2B9WCE4R6VA"] = lambda: next(iter(client.schedules.list("reminders"))).id
    yield
    assert not list(client.schedules.list("reminders"))
    assert [schedule.name for schedule in client.schedules.repeating()] == ["nightly"]


def streams(reader: Reader) -> Iterator[None]:
    reader.start()
    client = reader.connect()
    client.create_topic("orders", partitions=3)
    handled: list[str] = []
    reader.names["orders"] = [SimpleNamespace(payload="a tea", customer="c-17")]
    reader.names["handle"] = lambda message: handled.append(message.text)
    yield
    assert handled == ["a coffee", "a tea"] * 2


def topics(reader: Reader) -> Iterator[None]:
    reader.start()
    yield
    assert not reader.connect().topics()


def traces(reader: Reader) -> Iterator[None]:
    """A message that was nacked, rejected and replayed."""
    reader.start()
    client = reader.connect()
    sent = client.publish("orders", json={"total": 7}, key="c-17", headers=TRACE)
    first = reader.broker.connect(client_id="worker-1").queue("orders", group="billing")
    first.next(5).nack("db down", wait=True)
    first.close()
    reader.broker.clock.advance("2s")
    second = reader.broker.connect(client_id="worker-2").queue("orders", group="billing")
    second.next(5).reject("bad payload", wait=True)
    second.close()
    client.dead_letters.replay(topic="orders").wait()
    reader.broker.clock.advance("1s")  # traces are written by now
    reader.instead["01M7H73V1ZTWQCFXR000000000"] = lambda: sent.id
    yield
    assert reader.names["passport"].events[0].kind == "published"


def webhooks(reader: Reader) -> Iterator[None]:
    with receiver() as (url, received):
        reader.start()
        client = reader.connect()
        client.create_topic("orders")
        reader.instead["https://example.com/hook"] = lambda: url
        reader.instead["wh-5f0c6d1e2a3b"] = lambda: client.webhooks.list()[0].id
        yield
        assert b"test" in received.get(timeout=10).body  # of `webhook test`
        client.publish("orders", json={"total": 12}, key="c-17", headers=TRACE)
        request = received.get(timeout=10)
        head, _, body = block("docs/guide/webhooks.md", "http").partition("\n\n")
        assert {line.partition(":")[0].lower() for line in head.splitlines()[1:]} <= request.headers
        assert json.loads(body).keys() == json.loads(request.body).keys()
        reader.close()


def websocket(reader: Reader) -> Iterator[None]:
    reader.start()
    yield
    assert "{'total': 25}" in reader.said.splitlines()


SCENES: dict[str, Scene] = {
    "README.md": readme,
    "docs/index.md": index,
    "docs/guide/access.md": access,
    "docs/guide/backpressure.md": backpressure,
    "docs/guide/dead-letters.md": dead_letters,
    "docs/guide/durability.md": durability,
    "docs/guide/first-hour.md": first_hour,
    "docs/guide/http.md": http,
    "docs/guide/mqtt.md": mqtt,
    "docs/guide/operate.md": operate,
    "docs/guide/pubsub.md": pubsub,
    "docs/guide/queues.md": queues,
    "docs/guide/schedules.md": schedules,
    "docs/guide/streams.md": streams,
    "docs/guide/topics.md": topics,
    "docs/guide/traces.md": traces,
    "docs/guide/webhooks.md": webhooks,
    "docs/guide/websocket.md": websocket,
}

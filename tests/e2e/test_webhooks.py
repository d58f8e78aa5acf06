"""Webhooks against a real receiver: what is acknowledged, retried, given up, and never shown again."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import Client
from millstream.config import Settings
from millstream.errors import InvalidArgument, QuotaExceeded, TopicNotFound, WebhookNotFound
from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.e2e.access_world import guarded as guarded_by_keys
from tests.e2e.access_world import key_for
from tests.waiting import eventually

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "webhooks.md"


class Receiver:
    """A web server that writes down what it is sent and answers as it is told."""

    def __init__(self) -> None:
        #: What it answers first: a status, or a status with headers.
        self.answers: list[int | tuple[int, dict[str, str]]] = []
        self.documents: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.times: list[float] = []
        self.open = threading.Event()
        self.open.set()
        self.busy = 0
        self.most_busy = 0
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers = receiver.take(dict(self.headers), body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "5")
                with suppress(ConnectionError):  # who has waited for too long is gone
                    self.end_headers()
                    self.wfile.write(b"oops!" if status >= 400 else b"fine.")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def use_tls(self, certificate: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def take(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str]]:
        with self._lock:
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            self.headers.append(headers)
            self.bodies.append(body)
            self.times.append(time.monotonic())
            if headers["Content-Type"] == "application/json":
                self.documents.append(json.loads(body))
            answer = self.answers.pop(0) if self.answers else 200
        self.open.wait(20)
        with self._lock:
            self.busy -= 1
        return answer if isinstance(answer, tuple) else (answer, {})

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def client(broker: BrokerForTests) -> Client:
    connected = broker.connect()
    connected.create_topic("orders")
    return connected


def depth(client: Client, topic: str = "orders", group: str = "default") -> int:
    return client.queues.describe(topic, group).depth


# --- delivering ------------------------------------------------------------------------------------------------------


def test_a_message_is_delivered_once_and_acknowledged(client: Client, receiver: Receiver) -> None:
    made = client.webhooks.create("orders", receiver.url, headers={"Authorization": "Bearer x"})
    sent = client.publish("orders", json={"total": 12}, key="c-17", headers={"traceparent": "00-1-2-01"})
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    (document,), (headers,) = receiver.documents, receiver.headers
    assert (document["id"], document["value"], document["key"]) == (sent.id, {"total": 12}, "c-17")
    assert (document["topic"], document["group"], document["delivery"], document["attempts"]) == (
        "orders",
        "default",
        1,
        1,
    )
    assert (headers["traceparent"], headers["Authorization"]) == ("00-1-2-01", "Bearer x")
    assert depth(client) == 0
    info = client.webhooks.show(made.webhook.id)
    assert (info.state, info.in_flight, info.last_status, info.failed) == ("active", 0, 200, 0)
    assert client.broker()["metrics"]["millstream_webhook_deliveries"] == 1


def test_a_failed_attempt_is_repeated_within_the_same_lease(
    broker: BrokerForTests, client: Client, receiver: Receiver
) -> None:
    receiver.answers = [500, 500]
    made = client.webhooks.create("orders", receiver.url, retry_delays=["20s", "2m"], concurrency=2)
    client.publish("orders", "once")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    info = client.webhooks.show(made.webhook.id)
    assert (info.state, info.in_flight, info.last_error) == ("failing", 1, "500 Internal Server Error: oops!")
    with client.queue("orders") as rival:  # waits for the same messages all the time
        broker.clock.advance("19s")
        assert rival.lease(wait=0) == []
        broker.clock.advance("1s")
        eventually(lambda: client.webhooks.show(made.webhook.id).failed == 2)
        broker.clock.advance("2m")  # four times as long as a lease lasts by itself
        eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
        assert rival.lease(wait=0) == []
    assert [(d["delivery"], d["attempts"]) for d in receiver.documents] == [(1, 1), (1, 2), (1, 3)]
    assert client.webhooks.show(made.webhook.id).state == "active"
    assert depth(client) == 0


def test_what_fails_to_the_end_is_a_dead_letter_with_the_last_error(
    broker: BrokerForTests, client: Client, receiver: Receiver
) -> None:
    receiver.answers = [500, 503]
    made = client.webhooks.create("orders", receiver.url, retry_delays=["1s"])
    client.publish("orders", "bad")
    client.publish("orders", "good")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    broker.clock.advance("1s")
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    eventually(lambda: client.dead_letters.list())
    (letter,) = client.dead_letters.list()
    assert (letter.value, letter.reason, letter.error) == (
        b"bad",
        "MAX_RETRIES_EXCEEDED",
        "503 Service Unavailable: oops!",
    )
    assert client.webhooks.show(made.webhook.id).dead == 1
    assert depth(client) == 0


def test_a_client_error_is_a_dead_letter_at_once_unless_the_webhook_says_otherwise(
    broker: BrokerForTests, client: Client, receiver: Receiver
) -> None:
    receiver.answers = [422, 422]
    strict = client.webhooks.create("orders", receiver.url)
    client.publish("orders", "bad")
    eventually(lambda: client.dead_letters.list())
    (letter,) = client.dead_letters.list()
    assert (letter.reason, letter.error) == ("REJECTED", "422 Unprocessable Entity: oops!")
    client.webhooks.update(strict.webhook.id, reject_client_errors=False)
    client.publish("orders", "late")
    eventually(lambda: client.webhooks.show(strict.webhook.id).failed == 2)
    broker.clock.advance("1s")
    eventually(lambda: client.webhooks.show(strict.webhook.id).delivered == 1)
    assert len(client.dead_letters.list()) == 1


def test_retry_after_is_honoured(broker: BrokerForTests, client: Client, receiver: Receiver) -> None:
    receiver.answers = [(429, {"Retry-After": "60"})]
    made = client.webhooks.create("orders", receiver.url, retry_delays=["1s"])
    client.publish("orders", "x")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    broker.clock.advance("59s")
    assert len(receiver.documents) == 1
    broker.clock.advance("2s")
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)


def test_gone_pauses_the_webhook_and_gives_the_message_back(client: Client, receiver: Receiver) -> None:
    receiver.answers = [410]
    made = client.webhooks.create("orders", receiver.url)
    client.publish("orders", "kept")
    eventually(lambda: client.webhooks.show(made.webhook.id).state == "paused")
    assert client.webhooks.show(made.webhook.id).paused_reason == "410 Gone: oops!"
    eventually(lambda: client.queues.describe("orders").leased == 0)
    assert (client.queues.describe("orders").ready, client.dead_letters.list()) == (1, [])
    client.webhooks.resume(made.webhook.id)
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    assert client.webhooks.show(made.webhook.id).paused_reason == ""
    assert [document["delivery"] for document in receiver.documents] == [1, 1]  # as if it had never been handed out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://no.such.host.invalid/"])
def test_a_receiver_that_is_not_there_is_a_failure_that_says_so(client: Client, url: str) -> None:
    made = client.webhooks.create("orders", url)
    client.publish("orders", "x")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    assert "cannot be reached: " in client.webhooks.show(made.webhook.id).last_error


def test_a_receiver_that_does_not_answer_in_time_is_a_failure_and_holds_up_nobody(
    client: Client, receiver: Receiver
) -> None:
    receiver.open.clear()
    made = client.webhooks.create("orders", receiver.url, timeout="100ms")
    client.publish("orders", "slow")
    eventually(lambda: receiver.busy)
    client.publish("other", "meanwhile")
    with client.queue("other") as others:
        assert others.lease(wait=5)[0].value == b"meanwhile"
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    assert client.webhooks.show(made.webhook.id).last_error == "no answer within 0.1 s"


def test_no_more_requests_than_allowed_are_under_way(client: Client, receiver: Receiver) -> None:
    receiver.open.clear()
    made = client.webhooks.create("orders", receiver.url, concurrency=3)
    client.publish_many("orders", [b"x"] * 12)
    eventually(lambda: receiver.busy == 3)
    assert client.webhooks.show(made.webhook.id).in_flight == 3
    assert client.queues.describe("orders").ready == 9  # the rest is there for others
    client.webhooks.update(made.webhook.id, concurrency=5)
    eventually(lambda: receiver.busy == 5)
    receiver.open.set()
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 12)
    assert receiver.most_busy == 5
    client.webhooks.update(made.webhook.id, concurrency=1)
    client.publish("orders", "wakes the one that waits with its lease")
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 13)
    receiver.open.clear()
    client.publish_many("orders", [b"x"] * 5)
    eventually(lambda: receiver.busy)
    time.sleep(0.05)
    assert receiver.busy == 1


def test_requests_keep_to_their_rate(client: Client, receiver: Receiver) -> None:
    made = client.webhooks.create("orders", receiver.url, concurrency=10, rate=20)
    client.publish_many("orders", [b"x"] * 31)
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered >= 2)
    assert client.queues.describe("orders").ready > 0  # what waits for its turn waits in the queue
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 31)
    assert max(receiver.times) - min(receiver.times) >= 1.2  # thirty intervals of 50 ms, a fifth of them as slack


def test_a_rate_that_is_changed_holds_at_once(client: Client, receiver: Receiver) -> None:
    made = client.webhooks.create("orders", receiver.url, rate=0.001)
    client.publish_many("orders", [b"x"] * 3)
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    client.webhooks.update(made.webhook.id, rate=0)
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 3)


def test_a_raw_payload_and_a_pattern(client: Client, receiver: Receiver) -> None:
    client.create_topic("orders.eu")
    client.webhooks.create("orders.*", receiver.url, payload="raw", group="crm")
    client.publish("orders.eu", b"\x00\xff", headers={"content-type": "image/png"})
    eventually(lambda: receiver.bodies)
    headers = receiver.headers[0]
    assert (receiver.bodies, headers["Content-Type"], headers["Millstream-Topic"]) == (
        [b"\x00\xff"],
        "image/png",
        "orders.eu",
    )


def test_an_answer_that_is_not_http_or_has_no_end_does_no_harm(client: Client) -> None:
    answers = [b"SSH-2.0-nothing\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000, b""]
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            connection.recv(65_536)
            connection.sendall(answer)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    made = client.webhooks.create("orders", f"http://127.0.0.1:{listening.getsockname()[1]}/", retry_delays=[0, 0])
    client.publish("orders", "x")
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    assert "does not speak HTTP" in client.webhooks.show(made.webhook.id).last_error
    client.publish("orders", "y")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 2)
    assert "closed the connection without an answer" in client.webhooks.show(made.webhook.id).last_error
    listening.close()


# --- life ------------------------------------------------------------------------------------------------------------


def test_a_pause_gives_back_what_is_in_hand(client: Client, receiver: Receiver) -> None:
    receiver.answers = [500]
    made = client.webhooks.create("orders", receiver.url, retry_delays=["1h"])
    client.publish("orders", "x")
    eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    assert client.webhooks.pause(made.webhook.id).state == "paused"
    with client.queue("orders") as rival:
        (message,) = rival.lease(wait=5)
        message.ack()
    client.webhooks.resume(made.webhook.id)
    client.publish("orders", "y")
    eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
    client.webhooks.delete(made.webhook.id)
    assert client.webhooks.list() == []
    with pytest.raises(WebhookNotFound):
        client.webhooks.show(made.webhook.id)
    client.publish("orders", "z")
    assert depth(client) == 1  # the group stays


def test_a_restart_goes_on_where_it_was(tmp_path: Path, receiver: Receiver) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.create_topic("orders")
        client.create_topic("other")
        made = client.webhooks.create("orders", receiver.url, headers={"X": "y"}, rate=0.5)
        paused = client.webhooks.create("other", receiver.url)
        client.webhooks.pause(paused.webhook.id)
        client.webhooks.update(made.webhook.id, rate=0, concurrency=2)
        receiver.answers = [500]
        client.publish("orders", "x")
        eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
        info = client.webhooks.show(made.webhook.id)
        assert (info.header_names, info.rate, info.concurrency) == (["X"], 0, 2)
        assert client.webhooks.show(paused.webhook.id).state == "paused"
        assert made.secret not in repr(client.webhooks.list())


def test_a_webhook_survives_kill_nine_and_its_message_comes_again(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [500]
    with BrokerProcess(tmp_path) as process:
        with millstream.connect(process.address) as client:
            client.create_topic("orders")
            made = client.webhooks.create("orders", receiver.url, retry_delays=["1h"])
            client.publish("orders", "x")
            eventually(lambda: client.webhooks.show(made.webhook.id).failed == 1)
        process.kill()
    with BrokerProcess(tmp_path) as process, millstream.connect(process.address) as client:
        eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)
        assert [document["value"] for document in receiver.documents] == ["x", "x"]


def test_a_stop_does_not_wait_for_a_receiver_that_hangs(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.webhooks.runner.GRACE_S", 0.1)
    receiver.open.clear()
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.create_topic("orders")
        client.webhooks.create("orders", receiver.url, timeout="2m", concurrency=4)
        client.publish_many("orders", [b"x"] * 4)
        eventually(lambda: receiver.busy == 4)
        began = time.monotonic()
    assert time.monotonic() - began < 8


def test_a_webhook_whose_topic_is_deleted_pauses_and_says_why(client: Client, receiver: Receiver) -> None:
    made = client.webhooks.create("orders", receiver.url)
    with pytest.raises(InvalidArgument, match="is being read by group"):
        client.delete_topic("orders")
    client.delete_topic("orders", force=True)
    eventually(lambda: client.webhooks.show(made.webhook.id).state == "paused")
    assert client.webhooks.show(made.webhook.id).paused_reason == "topic 'orders' was deleted"


def test_a_webhook_on_a_topic_that_does_not_exist_makes_none(client: Client, receiver: Receiver) -> None:
    """A mistyped topic would be made and stay empty, and its webhook would wait for ever."""
    with pytest.raises(TopicNotFound, match=r"topic 'ordres' does not exist.*; did you mean 'orders'\?"):
        client.webhooks.create("ordres", receiver.url)
    with pytest.raises(TopicNotFound, match=r"does not exist in namespace 'default'$"):
        client.webhooks.create("something.else", receiver.url)
    assert [topic.name for topic in client.topics()] == ["orders"]
    assert client.webhooks.list() == []
    client.webhooks.create("later.*", receiver.url)


def test_names_that_a_key_may_not_see_are_not_guessed(receiver: Receiver) -> None:
    with guarded_by_keys() as broker:
        admin = broker.connect(key=key_for(broker, "admin"))
        for name in ("sales.orders", "secret.orders"):
            admin.create_topic(name)
        seller = broker.connect(key=key_for(broker, "admin", scopes=["default:sales.#", "default:secret.ordres"]))
        with pytest.raises(TopicNotFound) as refused:
            seller.webhooks.create("secret.ordres", receiver.url)
        assert "secret.orders" not in str(refused.value)


def test_a_webhook_does_not_bring_back_a_topic_that_was_deleted(client: Client, receiver: Receiver) -> None:
    made = client.webhooks.create("orders", receiver.url)
    client.delete_topic("orders", force=True)
    eventually(lambda: client.webhooks.show(made.webhook.id).state == "paused")
    with pytest.raises(TopicNotFound):
        client.webhooks.resume(made.webhook.id)
    assert client.topics() == []


def test_webhooks_belong_to_their_namespace(broker: BrokerForTests, client: Client, receiver: Receiver) -> None:
    client.create_namespace("shop")
    shop = broker.connect(namespace="shop")
    shop.create_topic("orders")
    made = shop.webhooks.create("orders", receiver.url)
    assert client.webhooks.list() == []
    for ask in (client.webhooks.show, client.webhooks.pause, client.webhooks.delete, client.webhooks.rotate):
        with pytest.raises(WebhookNotFound):
            ask(made.webhook.id)
    client.delete_namespace("shop", force=True)
    client.create_namespace("shop")
    assert shop.webhooks.list() == []


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_a_secret_is_shown_once_and_never_said_again(
    client: Client, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "given-by-the-user-123"
    made = client.webhooks.create(
        "orders", f"{receiver.url}?token=hidden-1", secret=secret, headers={"Authorization": "hidden-2"}
    )
    assert made.secret == secret
    client.publish("orders", "x")
    eventually(lambda: receiver.headers)
    turned = client.webhooks.rotate(made.webhook.id)
    assert re.fullmatch(r"[0-9a-f]{64}", turned.secret)
    said = repr(client.webhooks.list()) + repr(client.webhooks.show(made.webhook.id)) + repr(client.broker())
    said += "".join(capsys.readouterr())
    for hidden in (secret, turned.secret, "hidden-1", "hidden-2"):
        assert hidden not in said
    assert client.webhooks.show(made.webhook.id).url == f"{receiver.url}?..."


@contextmanager
def receiver_of_the_guide(secret: str, handled: list[dict[str, Any]]) -> Iterator[str]:
    """The code of the guide, as it stands there."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "SECRET =" in block)
    names: dict[str, Any] = {"__name__": "receiver"}
    exec(code, names)
    names["SECRET"] = secret
    names["handle"] = handled.append
    names["Receiver"].log_message = lambda *_: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), names["Receiver"])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_the_receiver_of_the_guide_accepts_what_is_signed_and_nothing_else(client: Client) -> None:
    handled: list[dict[str, Any]] = []
    secret = "0123456789abcdef-secret"
    with receiver_of_the_guide(secret, handled) as url:
        made = client.webhooks.create("orders", url, secret=secret)
        assert client.webhooks.test(made.webhook.id).status == 204
        client.publish("orders", json={"n": 1})
        eventually(lambda: handled)
        assert handled[0]["value"] == {"n": 1}
        # During a rotation the old secret is still right, afterwards it is not.
        client.webhooks.rotate(made.webhook.id)
        assert client.webhooks.test(made.webhook.id).delivered
        client.webhooks.rotate(made.webhook.id, keep=0)
        tested = client.webhooks.test(made.webhook.id)
        assert (tested.delivered, tested.status, tested.error) == (False, 401, "401 Unauthorized")
        client.publish("orders", "forged")
        eventually(lambda: client.dead_letters.list())
        assert len(handled) == 1


def test_the_receiver_of_the_guide_refuses_what_is_old(broker: BrokerForTests, client: Client) -> None:
    secret = "0123456789abcdef-secret"
    with receiver_of_the_guide(secret, []) as url:
        made = client.webhooks.create("orders", url, secret=secret)
        broker.clock.advance("10m")
        assert client.webhooks.test(made.webhook.id).status == 401


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_must_be_known_and_be_of_the_host(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(certificate), "-out", str(tmp_path / "c.pem")]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + (tmp_path / "c.pem").read_text())
    receiver.use_tls(certificate)
    url = receiver.url.replace("http:", "https:").replace("127.0.0.1", "localhost")
    with BrokerForTests() as broker:
        client = broker.connect()
        client.create_topic("orders")
        unknown = client.webhooks.create("orders", url)
        assert "certificate of localhost is not accepted" in client.webhooks.test(unknown.webhook.id).error
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "c.pem"))
    with BrokerForTests() as broker:
        client = broker.connect()
        client.create_topic("orders")
        known = client.webhooks.create("orders", url)
        assert client.webhooks.test(known.webhook.id).delivered
        client.webhooks.update(known.webhook.id, url=url.replace("localhost", "127.0.0.1"))
        assert "is not accepted: IP address mismatch" in client.webhooks.test(known.webhook.id).error


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"concurrency": 101}, "between 1 and 100"),
        ({"rate": -1}, "rate must be"),
        ({"secret": "short"}, "16 to 256"),
        ({"headers": {"Host": "x"}}, "set by the broker"),
        ({"colour": "red"}, "no setting 'colour'"),
        ({"retry_delays": "1s"}, "a list of times"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing(
    client: Client, receiver: Receiver, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        client.webhooks.create("orders", receiver.url, **settings)
    assert client.webhooks.list() == []


def test_a_group_that_lets_go_too_early_is_refused(client: Client, receiver: Receiver) -> None:
    with client.queue("orders", group="quick"):
        pass
    client.queues.configure("orders", "quick", processing_ms=30_000)
    with pytest.raises(InvalidArgument, match=r"longer than processing_ms = 30000"):
        client.webhooks.create("orders", receiver.url, group="quick")
    made = client.webhooks.create("orders", receiver.url, group="quick", retry_delays=["1s"], timeout="5s")
    with pytest.raises(InvalidArgument, match="processing_ms"):
        client.webhooks.update(made.webhook.id, timeout="1m")
    assert client.webhooks.show(made.webhook.id).timeout_ms == 5_000


def test_there_is_a_limit_to_webhooks(client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.webhooks.webhooks._WEBHOOKS_MAX", 1)
    client.webhooks.create("orders", receiver.url)
    with pytest.raises(QuotaExceeded, match="1 webhooks at most"):
        client.webhooks.create("orders", receiver.url)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerForTests]:
    settings = Settings.model_validate({"webhooks": {"allow_private": False}})
    with BrokerForTests(tmp_path / "guarded", settings=settings) as running:
        yield running


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://2130706433/"],
)
def test_private_targets_can_be_forbidden(guarded: BrokerForTests, receiver: Receiver, url: str) -> None:
    port = receiver.url.split(":")[2].split("/")[0]
    client = guarded.connect()
    with pytest.raises(InvalidArgument, match="has a private address"):
        client.webhooks.create("orders", url.format(port=port))
    assert client.webhooks.list() == []


def test_a_name_that_turns_private_later_is_not_connected_to(
    guarded: BrokerForTests, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["93.184.216.34"]
    monkeypatch.setattr("millstream.broker.webhooks.names._resolve", lambda _host: list(addresses))
    client = guarded.connect()
    client.create_topic("orders")
    made = client.webhooks.create("orders", receiver.url.replace("127.0.0.1", "hook.example"))
    addresses[:] = ["93.184.216.34", "127.0.0.1"]  # one of them is enough
    client.publish("orders", "x")
    eventually(lambda: client.webhooks.show(made.webhook.id).state == "paused")
    assert "hook.example has a private address" in client.webhooks.show(made.webhook.id).paused_reason
    assert receiver.bodies == []
    assert client.queues.describe("orders").ready == 1


def test_an_alert_of_a_dead_letter_obeys_the_same_rule(guarded: BrokerForTests, receiver: Receiver) -> None:
    client = guarded.connect()
    client.create_topic("orders", config={"dead_letter_alert": receiver.url})
    client.publish("orders", "bad")
    with client.queue("orders") as work:
        work.lease(wait=5)[0].reject("no")
        work.flush()
    eventually(lambda: client.broker()["metrics"]["millstream_dead_letter_alerts_failed"] == 1)
    assert receiver.bodies == []


def test_the_connection_goes_to_the_address_that_was_checked_with_the_name_in_the_request(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.webhooks.names._resolve", lambda _host: ["127.0.0.1"])
    url = receiver.url.replace("127.0.0.1", "hook.example")
    made = client.webhooks.create("orders", url)
    assert client.webhooks.test(made.webhook.id).delivered
    assert receiver.headers[0]["Host"] == url.split("/")[2]


# --- the other client ------------------------------------------------------------------------------------------------


def test_the_asynchronous_client_says_the_same_words(broker: BrokerForTests, receiver: Receiver) -> None:
    async def work() -> None:
        async with await millstream.aio.connect(broker.address) as client:
            await client.create_topic("orders")
            made = await client.webhooks.create("orders", receiver.url, timeout="3s")
            webhook_id = made.webhook.id
            assert (await client.webhooks.test(webhook_id)).delivered
            assert (await client.webhooks.update(webhook_id, concurrency=2)).concurrency == 2
            assert (await client.webhooks.pause(webhook_id)).state == "paused"
            assert (await client.webhooks.resume(webhook_id)).state == "active"
            assert (await client.webhooks.rotate(webhook_id)).secret != made.secret
            assert [info.id for info in await client.webhooks.list(topic="orders")] == [webhook_id]
            assert (await client.webhooks.show(webhook_id)).timeout_ms == 3000
            await client.webhooks.delete(webhook_id)

    asyncio.run(work())


def test_a_webhook_delivers_where_everybody_else_needs_a_key(receiver: Receiver) -> None:
    with guarded_by_keys() as broker:
        client = broker.connect(key=key_for(broker, "admin"))
        client.create_topic("orders")
        made = client.webhooks.create("orders", receiver.url)
        client.publish("orders", "x")
        eventually(lambda: client.webhooks.show(made.webhook.id).delivered == 1)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "017700000001", "127.1", "0", "localhost", "[::ffff:127.0.0.1]", "[::]"]
)
def test_no_spelling_of_a_private_address_gets_past_the_rule(host: str) -> None:
    settings = Settings.model_validate({"webhooks": {"allow_private": False}})
    with BrokerForTests(settings=settings) as broker:
        client = broker.connect()
        client.create_topic("orders")
        with pytest.raises(InvalidArgument, match=r"private address|not a host"):
            client.webhooks.create("orders", f"http://{host}:9/")

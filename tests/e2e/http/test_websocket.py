"""One connection for everything: subscribe, lease, settle and publish over a WebSocket."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from millstream.client import Client
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for, new_key
from tests.examples import examples
from tests.still import limits_stand_still
from tests.waiting import eventually

SOON_S = 20


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


class Socket:
    """A client that keeps what it did not ask for until it is wanted."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.kept: list[dict[str, Any]] = []
        self._last_id = 0

    def send(self, **frame: Any) -> None:
        self.connection.send(json.dumps(frame))

    def ask(self, **frame: Any) -> dict[str, Any]:
        """Send a frame, wait for its answer."""
        self._last_id += 1
        self.send(id=self._last_id, **frame)
        return self.next(lambda told: told.get("id") == self._last_id)

    def result(self, **frame: Any) -> Any:
        answer = self.ask(**frame)
        assert answer["type"] == "result", answer
        return answer["result"]

    def next(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = SOON_S) -> dict[str, Any]:
        for told in self.kept:
            if wanted(told):
                self.kept.remove(told)
                return told
        while True:
            told = json.loads(self.connection.recv(timeout_s))
            if wanted(told):
                return told
            self.kept.append(told)

    def messages(self, count: int, timeout_s: float = SOON_S) -> list[dict[str, Any]]:
        """At least so many."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            found += self.next(lambda told: told["type"] == "messages", timeout_s)["messages"]
        return found

    def is_quiet(self) -> bool:
        """Nothing more comes; a ping that is answered says that everything before it was sent."""
        for _ in range(3):
            assert self.ask(type="ping")["type"] == "pong"
        return not any(told["type"] == "messages" for told in self.kept)


@contextmanager
def open_socket(broker: BrokerForTests, path: str = "/api/v1/ws", **options: Any) -> Iterator[Socket]:
    with connect(broker.url.replace("http", "ws", 1) + path, **options) as connection:
        yield Socket(connection)


def refused(broker: BrokerForTests, path: str = "/api/v1/ws", **options: Any) -> tuple[int, str]:
    """The status and the code with which a connection is turned away."""
    with pytest.raises(InvalidStatus) as caught, open_socket(broker, path, **options):
        pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")["code"]


# --- what it is for ----------------------------------------------------------------------------------------------


def test_headers_that_are_bytes_go_in_as_they_come_out(broker: BrokerForTests, client: Client) -> None:
    pairs = [("sum", b"\xff\x00"), ("said", b"base64:AQ=="), ("tag", b"a"), ("tag", b"\xfe")]
    client.create_topic("bytes")
    with open_socket(broker) as worker:
        worker.result(type="subscribe", patterns=["bytes"])
        client.publish("bytes", "first", headers=pairs)
        [shown] = worker.messages(1)
        worker.result(type="publish", topic="bytes", messages={"value": "again", "headers": shown["headers"]})
    assert [message.headers for message in client.browse("bytes")] == [pairs] * 2


def test_subscribe_and_publish(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("news.sport")
    with open_socket(broker) as reader, open_socket(broker) as writer:
        assert reader.next(lambda told: told["type"] == "welcome")["namespace"] == "default"
        subscription = reader.result(type="subscribe", patterns=["news.#"])["subscription"]
        outcomes = writer.result(
            type="publish",
            topic="news.sport",
            messages=[{"value": {"goals": 2}, "key": "k", "headers": {"a": "b"}}, {"value": "text"}],
        )
        frame = reader.next(lambda told: told["type"] == "messages")
        assert (frame["subscription"], frame["missed"]) == (subscription, 0)
        first, second = frame["messages"]
        assert (first["value"], first["encoding"], first["key"], first["headers"]) == (
            {"goals": 2}, "json", "k", {"a": "b"}
        )  # fmt: skip
        assert second["value"] == "text"
        assert [outcome["receipt"]["id"] for outcome in outcomes] == [first["id"], second["id"]]
        reader.result(type="unsubscribe", subscription=subscription)
        writer.result(type="publish", topic="news.sport", messages={"value": "unheard"})
        assert reader.is_quiet()


def test_lease_and_settle(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("work")
    with open_socket(broker) as worker:
        opened = worker.result(
            type="consume", topic="work", group="workers", policy={"retry": "standard,initial=1h,max=1h"}
        )
        assert opened["topics"] == ["work"]
        client.publish_many("work", ["a", "b", "c", "d"])
        a, b, c, d = worker.messages(4)
        assert [message["value"] for message in (a, b, c, d)] == ["a", "b", "c", "d"]
        assert worker.result(type="ack", receipts=[a["receipt"], "nonsense"]) == [
            {"receipt": a["receipt"], "result": "done"},
            {"receipt": "nonsense", "result": "receipt_invalid"},
        ]
        [retried] = worker.result(type="nack", receipts=[b["receipt"]], reason="not now")
        [dead] = worker.result(type="reject", receipts=[c["receipt"]], reason="never")
        [extended] = worker.result(type="extend", receipts=[d["receipt"]], delay_ms=60_000)
        assert [one["result"] for one in (retried, dead, extended)] == ["retried", "dead", "done"]
        assert extended["deadline_ms"] > d["deadline_ms"]
        [released] = worker.result(type="release", receipts=[d["receipt"]])
        assert released["result"] == "done"
        [again] = worker.messages(1)
        assert (again["value"], again["failures"]) == ("d", 0)


def test_values_come_as_they_are_asked_for(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("raw")
    with open_socket(broker) as worker:
        worker.result(type="consume", topic="raw", encoding="base64")
        worker.result(type="publish", topic="raw", messages={"value": "AP8=", "encoding": "base64"})
        [message] = worker.messages(1)
        assert (message["value"], message["encoding"]) == ("AP8=", "base64")


def test_a_namespace_by_path_or_by_query(broker: BrokerForTests) -> None:
    team = broker.connect(namespace="team")
    team.create_topic("orders")
    with (
        open_socket(broker, "/api/v1/namespaces/team/ws") as one,
        open_socket(broker, "/api/v1/ws?namespace=team&client_id=page") as other,
    ):
        assert one.next(lambda told: told["type"] == "welcome")["namespace"] == "team"
        one.result(type="subscribe", patterns=["orders"])
        other.result(type="publish", topic="orders", messages={"value": "x"})
        assert one.messages(1)[0]["value"] == "x"
        connections = httpx.get(f"{broker.url}/api/v1/admin/connections").json()
        assert ("websocket", "page") in [(row["door"], row["client_id"]) for row in connections]
    assert refused(broker, "/api/v1/topics/ws") == (404, "PATH_NOT_FOUND")
    assert refused(broker, "/api/v1/namespaces/a%2Fb/ws")[0] in (400, 404)


def test_the_example_of_the_guide_runs(broker: BrokerForTests, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[3] / "docs/guide/websocket.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    exec(program.replace("localhost:8080", urlparse(broker.url).netloc), {})
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("millstream ") for line in said)
    assert "{'total': 25}" in said


# --- credit ------------------------------------------------------------------------------------------------------


def test_no_more_comes_than_there_is_credit_for(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("many")
    client.publish_many("many", [str(number) for number in range(20)])
    with open_socket(broker) as worker:
        consumer = worker.result(type="consume", topic="many", credit=3)["consumer"]
        first = worker.messages(3)
        assert [message["value"] for message in first] == ["0", "1", "2"]
        assert worker.is_quiet()
        worker.result(type="ack", receipts=[first[0]["receipt"]])
        assert [message["value"] for message in worker.messages(1)] == ["3"], "what is settled makes room"
        assert worker.is_quiet()
        worker.result(type="credit", consumer=consumer, more=2)
        assert [message["value"] for message in worker.messages(2)] == ["4", "5"]
        assert worker.is_quiet()


def test_with_auto_ack_messages_are_done_when_they_are_sent(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("done")
    client.publish_many("done", [str(number) for number in range(20)])
    with open_socket(broker) as worker:
        worker.result(type="consume", topic="done", credit=3, auto_ack=True)
        assert [message["value"] for message in worker.messages(20)] == [str(number) for number in range(20)]
        assert client.queues.describe("done").depth == 0


def test_a_consumer_without_credit_waits_for_some(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("later")
    client.publish("later", "x")
    with open_socket(broker) as worker:
        consumer = worker.result(type="consume", topic="later", credit=0)["consumer"]
        assert worker.is_quiet()
        worker.result(type="credit", consumer=consumer, more=1)
        assert [message["value"] for message in worker.messages(1)] == ["x"]


def test_leases_that_run_out_give_their_credit_back(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("late")
    client.publish("late", "x")
    with open_socket(broker) as worker:
        worker.result(type="consume", topic="late", credit=1, lease_ms=30_000)
        assert [message["delivery"] for message in worker.messages(1)] == [1]
        broker.clock.advance("40s")
        broker.clock.advance("40s")
        assert [message["delivery"] for message in worker.messages(1)] == [2]


def test_a_subscription_gets_what_it_has_credit_for(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("feed")
    with open_socket(broker) as reader:
        subscription = reader.result(type="subscribe", patterns=["feed"], credit=2)["subscription"]
        client.publish_many("feed", ["a", "b", "c"])
        assert [message["value"] for message in reader.messages(2)] == ["a", "b"]
        assert reader.is_quiet()
        reader.result(type="credit", subscription=subscription, more=5)
        assert [message["value"] for message in reader.messages(1)] == ["c"], "what waited is not lost"


def test_a_client_that_does_not_read_misses_messages_and_holds_up_nobody(
    broker: BrokerForTests, client: Client
) -> None:
    client.create_topic("flood", config={"fsync": "never"})
    with open_socket(broker, max_size=None, max_queue=1) as slow, open_socket(broker, max_size=None) as quick:
        for reader in (slow, quick):
            reader.result(type="subscribe", patterns=["flood"])
        count = 60
        for number in range(count):
            client.publish("flood", f"{number} " + "x" * 900_000)
            assert quick.messages(1)[0]["value"].startswith(f"{number} ")
        got = missed = 0
        while got + missed < count:
            frame = slow.next(lambda told: told["type"] == "messages")
            got, missed = got + len(frame["messages"]), missed + frame["missed"]
        assert got + missed == count
        assert missed > 10, "what a slow client is sent is bounded"


def test_a_worker_that_does_not_read_is_given_no_more_than_its_sockets_hold(
    broker: BrokerForTests, client: Client
) -> None:
    client.create_topic("heavy", config={"fsync": "never"})
    for _ in range(50):
        client.publish("heavy", "x" * 500_000)
    with open_socket(broker, max_size=None, max_queue=1, close_timeout=0.1) as slow:
        slow.result(type="consume", topic="heavy", credit=50)
        time.sleep(0.3)
        leased = httpx.get(f"{broker.url}/api/v1/queues/heavy/default").json()["leased"]
        assert 0 < leased < 40
        with open_socket(broker, max_size=None) as other:
            other.result(type="consume", topic="heavy", credit=1)
            assert len(other.messages(1)) == 1


# --- endings -----------------------------------------------------------------------------------------------------


def test_a_close_returns_leases_at_once(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("returned")
    client.publish("returned", "x")
    with open_socket(broker) as first, open_socket(broker) as second:
        first.result(type="consume", topic="returned")
        assert len(first.messages(1)) == 1
        second.result(type="consume", topic="returned")
        assert second.is_quiet()
        began_s = time.monotonic()
        first.connection.close()
        [message] = second.messages(1)
        assert time.monotonic() - began_s < 5, "long before the lease ran out"
        assert (message["value"], message["failures"]) == ("x", 0)


def test_a_lost_connection_returns_leases_at_once(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("lost")
    client.publish("lost", "x")
    with open_socket(broker) as second, open_socket(broker) as first:
        first.result(type="consume", topic="lost")
        assert len(first.messages(1)) == 1
        second.result(type="consume", topic="lost")
        first.connection.socket.shutdown(socket.SHUT_RDWR)
        assert [message["value"] for message in second.messages(1)] == ["x"]


def test_a_consumer_that_is_ended_returns_its_leases(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("ended")
    client.publish("ended", "x")
    with open_socket(broker) as worker:
        first = worker.result(type="consume", topic="ended")["consumer"]
        assert len(worker.messages(1)) == 1
        worker.result(type="consume", topic="ended")
        worker.result(type="unsubscribe", consumer=first)
        assert [message["value"] for message in worker.messages(1)] == ["x"]
        assert worker.ask(type="credit", consumer=first, more=1)["error"]["code"] == "SUBSCRIPTION_NOT_FOUND"
        refused = worker.ask(type="unsubscribe", consumer=first)["error"]
        assert refused["message"] == f"this connection has no consumer {first}", "and no advice in another protocol"


def test_a_client_that_leaves_is_forgotten(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("forgotten")
    before = broker.broker.metrics.subscriptions
    with open_socket(broker) as leaving:
        leaving.result(type="consume", topic="forgotten")
        leaving.result(type="subscribe", patterns=["forgotten"])
    url = f"{broker.url}/api/v1/queues/forgotten/default"
    eventually(lambda: httpx.get(url).json()["consumers"] == [])
    assert broker.broker.metrics.subscriptions == before


def test_a_queue_that_is_deleted_ends_its_consumer(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("doomed")
    with open_socket(broker) as worker:
        consumer = worker.result(type="consume", topic="doomed")["consumer"]
        assert worker.is_quiet()
        client.delete_topic("doomed", force=True)
        told = worker.next(lambda told: told["type"] == "error")
        assert told["consumer"] == consumer
        assert worker.ask(type="ping")["type"] == "pong", "the connection goes on"


def test_a_stop_says_goodbye_and_what_was_published_is_there(tmp_path: Any) -> None:
    running = BrokerForTests(tmp_path / "data", http=True).start()
    running.connect().create_topic("orders")
    with open_socket(running) as worker:
        worker.result(type="publish", topic="orders", messages={"value": "x"})
        worker.result(type="consume", topic="orders")
        assert len(worker.messages(1)) == 1
        began_s = time.monotonic()
        running.stop()
        assert time.monotonic() - began_s < 5
        assert worker.next(lambda told: told["type"] == "bye")["reason"] == "the broker is shutting down"
        with pytest.raises(ConnectionClosed) as caught:
            worker.connection.recv(SOON_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
    with BrokerForTests(tmp_path / "data", http=True) as again, open_socket(again) as worker:
        worker.result(type="consume", topic="orders")
        assert [message["value"] for message in worker.messages(1)] == ["x"]


# --- mistakes ----------------------------------------------------------------------------------------------------


def test_the_receipt_of_another_connection_is_refused(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("mine")
    client.publish("mine", "x")
    with open_socket(broker) as owner, open_socket(broker) as thief:
        owner.result(type="consume", topic="mine")
        [message] = owner.messages(1)
        assert thief.result(type="ack", receipts=[message["receipt"]])[0]["result"] == "receipt_invalid"
        assert owner.result(type="ack", receipts=[message["receipt"]])[0]["result"] == "done"


@pytest.mark.parametrize(
    ("sent", "about"),
    [
        ("", "it is empty"),
        ("hello", "not JSON"),
        ("[]", "must be an object, not a list"),
        ("{}", "'type' is missing"),
        ('{"type":"fly"}', "'type' cannot be 'fly'"),
        ('{"type":"ping","extra":1}', "'extra' is not known here"),
        ('{"type":"consume","topic":"x","credit":-1}', "'credit' must be at least 0"),
        ('{"type":"ack","receipts":[]}', "'receipts' must have a length of at least 1"),
        ('{"type":"credit","more":1}', "name a subscription or a consumer"),
        ('{"type":"publish","topic":"garbage","messages":[]}', "no message"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 5000, ""),
    ],
)
def test_garbage_is_answered_with_an_error_and_the_connection_goes_on(
    broker: BrokerForTests, sent: str | bytes, about: str
) -> None:
    with open_socket(broker) as talking:
        talking.connection.send(sent)
        told = talking.next(lambda told: told["type"] == "error")
        assert told["error"]["code"] == "INVALID_ARGUMENT"
        assert about.lower() in told["error"]["message"].lower()
        assert talking.ask(type="ping")["type"] == "pong"


def test_every_frame_has_one_answer_and_none_is_an_internal_error(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("any")
    names = st.sampled_from(["any", "any", "none", "", "a b", "#", "_audit", "x" * 300])
    small = st.integers(-1, 3)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "topic": names,
        "group": names,
        "patterns": st.lists(names, max_size=2),
        "credit": small | st.just(10_000) | st.none(),
        "more": small | st.just(10_000),
        "subscription": small,
        "consumer": small,
        "receipts": st.lists(st.sampled_from(["any:0:0:1:0000000000000000", "", "x"]), max_size=2),
        "delay_ms": small | st.just(10**14) | st.just(2**70),
        "lease_ms": small | st.just(10**9),
        "policy": st.sampled_from([{}, {"ordering": "key"}, {"retry": "?"}, {"x": 1}, None]),
        "messages": st.lists(st.sampled_from([{"value": None}, {"value": 1, "partition": 9}, {"value": "x"}, {}, 1])),
        "fsync": st.sampled_from(["", "never", "x"]),
        "key": names,
    }
    asked = {
        "consume": ("topic", "group", "credit", "lease_ms", "policy"),
        "subscribe": ("patterns", "credit"),
        "publish": ("topic", "messages", "fsync"),
        "credit": ("more", "subscription", "consumer"),
        "unsubscribe": ("subscription", "consumer"),
        "auth": ("key",),
        "ping": (),
        **dict.fromkeys(("ack", "nack", "reject", "extend", "release"), ("receipts", "delay_ms")),
    }

    @given(st.data())
    @examples(38)
    def check(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(asked)))
        chosen = {name: data.draw(fields[name]) for name in asked[kind]}
        left_out = data.draw(st.sets(st.sampled_from(sorted(chosen)))) if chosen else set()
        answer = talking.ask(type=kind, **{name: chosen[name] for name in chosen if name not in left_out})
        assert answer["type"] in ("result", "pong", "error")
        assert answer["type"] != "error" or answer["error"]["code"] != "INTERNAL", answer
        talking.kept.clear()

    with open_socket(broker) as talking:
        check()


def test_an_error_says_which_frame_it_is_about(broker: BrokerForTests) -> None:
    with open_socket(broker) as talking:
        talking.send(id="mine", type="consume", topic="there-is-none", credit="many")
        assert talking.next(lambda told: told["type"] == "error")["id"] == "mine"
        answer = talking.ask(type="consume", topic="there-is-none")
        assert answer["error"]["code"] == "TOPIC_NOT_FOUND"


def test_a_frame_that_is_too_large_ends_the_connection(broker: BrokerForTests) -> None:
    with open_socket(broker) as talking:
        # The head of a frame says how long it is; the rest need not be sent to be refused.
        size = broker.settings.server.frame_bytes_max + 1
        talking.connection.socket.sendall(b"\x81\xff" + size.to_bytes(8, "big") + b"mask")
        with pytest.raises(ConnectionClosed) as caught:
            talking.next(lambda told: False)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


def test_a_connection_has_so_many_consumers_and_subscriptions(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("limited")
    with open_socket(broker) as greedy:
        for frame in ({"type": "consume", "topic": "limited"}, {"type": "subscribe", "patterns": ["limited"]}):
            for _ in range(32):
                assert greedy.ask(**frame)["type"] == "result"
            assert greedy.ask(**frame)["error"]["code"] == "QUOTA_EXCEEDED"


def test_the_limit_of_consumers_holds_for_frames_that_come_together(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("together")
    with open_socket(broker) as greedy:
        for number in range(60):
            greedy.send(type="consume", topic="together", id=number)
        answers = [greedy.next(lambda told, number=number: told.get("id") == number) for number in range(60)]
        assert [answer["type"] for answer in answers].count("result") == 32
        queue = httpx.get(f"{broker.url}/api/v1/queues/together/default").json()
        assert len(queue["consumers"]) == 32


def test_a_request_that_is_no_websocket_is_told_so(broker: BrokerForTests) -> None:
    answer = httpx.get(f"{broker.url}/api/v1/ws")
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT")


def test_slow_publishers_are_told_to_slow_down(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("pressed", config={"throttle_depth": 10})
    with open_socket(broker) as worker, open_socket(broker) as writer:
        worker.result(type="consume", topic="pressed", credit=1)
        writer.result(type="publish", topic="pressed", messages=[{"value": "x"}] * 100)
        told = writer.next(lambda told: told["type"] == "flow")
        assert (told["topic"], told["level"]) != ("", "normal")


# --- who may -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict() -> Iterator[BrokerForTests]:
    with guarded(http=True) as running:
        yield running


def test_a_key_by_header_by_query_or_by_the_first_frame(strict: BrokerForTests) -> None:
    key = key_for(strict, "admin")
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/api/v1/ws", {"additional_headers": {"Authorization": f"Bearer {key}"}}),
        ("/api/v1/ws", {"additional_headers": {"X-Api-Key": key}}),
        (f"/api/v1/ws?key={key}", {}),
    ]
    for path, options in ways:
        with open_socket(strict, path, **options) as known:
            assert known.next(lambda told: told["type"] == "welcome")
    with open_socket(strict) as known:
        known.send(type="auth", key=key)
        assert known.next(lambda told: told["type"] == "welcome")
        assert known.ask(type="auth", key=key)["error"]["code"] == "INVALID_ARGUMENT"


def test_nobody_comes_in_without_a_key(strict: BrokerForTests) -> None:
    assert refused(strict, "/api/v1/ws?key=ms_nonsense") == (401, "UNAUTHORIZED")
    for first in ({"type": "ping"}, {"type": "auth", "key": "ms_nonsense"}, {"type": "auth"}):
        with open_socket(strict) as unknown:
            unknown.send(**first)
            assert unknown.next(lambda told: True)["error"]["code"] == "UNAUTHORIZED"
            with pytest.raises(ConnectionClosed) as caught:
                unknown.connection.recv(SOON_S)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1008


def test_who_is_refused_is_no_error_of_the_broker(strict: BrokerForTests, caplog: pytest.LogCaptureFixture) -> None:
    assert refused(strict, "/api/v1/ws?key=ms_nonsense") == (401, "UNAUTHORIZED")
    assert httpx.get(f"{strict.url}/health/live").status_code == 200  # by now the refusal is over for the broker, too
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_who_says_nothing_is_not_waited_for(strict: BrokerForTests) -> None:
    with open_socket(strict) as silent:
        strict.clock.advance("11s")
        assert silent.next(lambda told: True)["error"]["code"] == "UNAUTHORIZED"


def test_who_has_not_said_its_key_does_not_delay_a_stop() -> None:
    """In real time.  One try must succeed: others may be using this machine."""
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=2) >= 2:
        running = guarded(http=True)
        with running, open_socket(running) as silent:
            began_s = time.monotonic()
            running.stop()
            took_s.append(time.monotonic() - began_s)
            assert silent.next(lambda told: True)["error"]["code"] == "SHUTTING_DOWN"
    assert min(took_s) < 2, took_s


def test_a_key_allows_what_its_role_allows(strict: BrokerForTests) -> None:
    admin, producer = key_for(strict, "admin"), key_for(strict, "produce", scopes=["default:orders.#"])
    with open_socket(strict, f"/api/v1/ws?key={admin}") as owner:
        for topic in ("orders.new", "secret"):
            owner.result(type="publish", topic=topic, messages={"value": "x"})
        owner.result(type="consume", topic="orders.new", credit=1)
        [message] = owner.messages(1)
        with open_socket(strict, f"/api/v1/ws?key={producer}") as limited:
            limited.result(type="publish", topic="orders.new", messages={"value": "y"})
            for frame in (
                {"type": "publish", "topic": "secret", "messages": {"value": "y"}},
                {"type": "subscribe", "patterns": ["orders.new"]},
                {"type": "consume", "topic": "orders.new"},
                {"type": "ack", "receipts": [message["receipt"]]},
            ):
                assert limited.ask(**frame)["error"]["code"] == "FORBIDDEN", frame
    assert refused(strict, f"/api/v1/namespaces/other/ws?key={producer}", open_timeout=5) == (403, "FORBIDDEN")


def test_a_key_whose_scope_is_one_pattern_consumes_what_it_covers(strict: BrokerForTests) -> None:
    admin, worker = key_for(strict, "admin"), key_for(strict, "consume", scopes=["default:scoped.*"])
    with (
        open_socket(strict, f"/api/v1/ws?key={admin}") as owner,
        open_socket(strict, f"/api/v1/ws?key={worker}") as limited,
    ):
        owner.result(type="publish", topic="scoped.new", messages={"value": "x"})
        for topic in ("scoped.new", "scoped.*"):
            limited.result(type="consume", topic=topic, group=f"group-of-{len(topic)}", credit=1)
            [message] = limited.messages(1)
            assert limited.result(type="ack", receipts=[message["receipt"]])
        assert limited.ask(type="consume", topic="*.new")["error"]["code"] == "FORBIDDEN"


def test_a_key_that_is_revoked_ends_its_connections(strict: BrokerForTests) -> None:
    made = new_key(strict, "admin")
    with open_socket(strict, f"/api/v1/ws?key={made.key}") as known:
        assert known.next(lambda told: told["type"] == "welcome")
        strict.run(strict.broker.access.revoke(made.info.id))
        assert known.next(lambda told: told["type"] == "error")["error"]["code"] == "UNAUTHORIZED"
        with pytest.raises(ConnectionClosed):
            known.connection.recv(SOON_S)


def test_a_key_that_is_revoked_ends_its_connection_although_nobody_reads() -> None:
    with guarded(http=True, server={"max_connections": 1}) as crowded:
        admin = crowded.connect(key=key_for(crowded, "admin"))
        admin.create_topic("flood", config={"fsync": "never"})
        made = new_key(crowded, "admin")
        with open_socket(crowded, f"/api/v1/ws?key={made.key}", max_size=None, max_queue=1, close_timeout=0) as deaf:
            deaf.result(type="subscribe", patterns=["flood"])
            for _ in range(30):
                admin.publish("flood", "x" * 900_000)
            assert not is_served(crowded)
            crowded.run(crowded.broker.access.revoke(made.info.id))
            crowded.clock.advance("5s")
            eventually(lambda: is_served(crowded), "its place is free")


def is_served(broker: BrokerForTests) -> bool:
    try:
        return httpx.get(f"{broker.url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_frames_count_where_requests_are_limited() -> None:
    with guarded(http=True, limits={"requests_per_s_per_key": 5.0}) as limited:
        key = key_for(limited, "admin")
        with open_socket(limited, f"/api/v1/ws?key={key}") as busy:
            with limits_stand_still(limited):
                answers = [busy.ask(type="ping") for _ in range(10)]
            codes = [answer["error"]["code"] for answer in answers if answer["type"] == "error"]
            assert codes
            assert set(codes) == {"THROTTLED"}


def test_a_page_of_another_site_may_not_connect(broker: BrokerForTests) -> None:
    """A browser lets any page connect to any WebSocket; that this machine is trusted does not mean its pages are."""
    assert refused(broker, origin="https://evil.example") == (403, "FORBIDDEN")
    with open_socket(broker, origin=f"http://{urlparse(broker.url).netloc}") as own:
        assert own.ask(type="ping")["type"] == "pong"

"""Publishing and browsing over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.client import Client
from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


def publish(http: httpx.Client, topic: str, messages: Any, **options: Any) -> list[dict[str, Any]]:
    answer = http.post(f"/topics/{topic}/messages", json=messages, params=options)
    assert answer.status_code == 200, answer.text
    receipts: list[dict[str, Any]] = answer.json()
    return receipts


def browse(http: httpx.Client, topic: str, **options: Any) -> list[dict[str, Any]]:
    answer = http.get(f"/topics/{topic}/messages", params=options)
    assert answer.status_code == 200, answer.text
    messages: list[dict[str, Any]] = answer.json()["messages"]
    return messages


# --- publishing --------------------------------------------------------------------------------------------------


def test_headers_that_are_bytes_go_in_as_they_come_out(http: httpx.Client, client: Client) -> None:
    pairs = [("sum", b"\xff\x00"), ("flag", b"\x01"), ("said", b"base64:AQ=="), ("tag", b"a"), ("tag", b"\xfe")]
    client.publish("bytes", "first", headers=pairs)
    [shown] = browse(http, "bytes")
    publish(http, "bytes", {"value": "again", "headers": shown["headers"]})
    query = {"header": ["sum=base64:/wA=", "flag=\x01", "said=base64:YmFzZTY0OkFRPT0=", "tag=a", "tag=base64:/g=="]}
    answer = http.post("/topics/bytes/messages", content=b"raw", params=query, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 200, answer.text
    assert [message.headers for message in client.browse("bytes")] == [pairs] * 3


def test_a_header_that_is_no_base64_where_it_says_so_is_refused(http: httpx.Client) -> None:
    answer = http.post("/topics/bytes/messages", json={"value": "x", "headers": {"sum": "base64:%"}})
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT")
    assert "header 'sum'" in answer.text


def test_one_message_gets_one_receipt(http: httpx.Client, client: Client) -> None:
    [receipt] = publish(http, "one", {"value": "hello", "key": "k", "headers": {"a": "1", "b": ["2", "3"]}})
    [message] = client.browse("one")
    assert receipt == {
        "id": message.id,
        "topic": "one",
        "partition": 0,
        "offset": 0,
        "durability": "disk",
        "duplicate": False,
        "scheduled": False,
    }
    assert (message.value, message.key) == (b"hello", b"k")
    assert message.headers == [("a", b"1"), ("b", b"2"), ("b", b"3")]


def test_many_messages_stay_in_order_and_keys_choose_their_partition(http: httpx.Client, client: Client) -> None:
    client.create_topic("many", partitions=4)
    messages: list[dict[str, Any]] = [{"value": f"v{n}", "key": f"k{n % 7}"} for n in range(50)]
    messages += [{"value": f"n{n}"} for n in range(5)] + [{"value": "p", "partition": 3}]
    receipts = publish(http, "many", messages)
    for message, receipt in zip(messages, receipts, strict=True):
        assert client.find(receipt["id"]).value == message["value"].encode()
    for number in range(7):
        of_key = [r for m, r in zip(messages, receipts, strict=True) if m.get("key") == f"k{number}"]
        sdk = client.publish("many", "x", key=f"k{number}")
        assert {receipt["partition"] for receipt in of_key} == {sdk.partition}
        assert [receipt["offset"] for receipt in of_key] == sorted(receipt["offset"] for receipt in of_key)
    assert len({receipt["partition"] for receipt in receipts[50:55]}) == 1
    assert receipts[55]["partition"] == 3


def test_values_are_stored_as_they_were_sent(http: httpx.Client, client: Client) -> None:
    body = (
        b'[{"value": "text \\u00e9"}, {"value": {"n": 123456789012345678901234567890, "f": 1.10}}, {"value": 7},'
        b'{"value": "eA==", "encoding": "base64"}, {"value": "quoted", "encoding": "json"},'
        b'{"value": null, "key": "k"},'
        b'{"value": "", "key": "aw==", "key_encoding": "base64"}]'
    )
    answer = http.post("/topics/values/messages", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    found = client.browse("values")
    assert [message.value for message in found] == [
        "text é".encode(),
        b'{"n": 123456789012345678901234567890, "f": 1.10}',
        b"7",
        b"x",
        b'"quoted"',
        None,
        b"",
    ]
    assert [message.key for message in found[-2:]] == [b"k", b"k"]


def test_a_message_per_line(http: httpx.Client, client: Client) -> None:
    body = b'{"value":"a"}\n{"value":{"b":1}}\n'
    answer = http.post("/topics/lines/messages", content=body, headers={"content-type": "application/x-ndjson"})
    assert [receipt["offset"] for receipt in answer.json()] == [0, 1]
    assert [message.value for message in client.browse("lines")] == [b"a", b'{"b":1}']


def test_any_other_body_is_the_value_itself(http: httpx.Client, client: Client) -> None:
    answer = http.post(
        "/topics/raw/messages",
        content=b"\x00\xffraw",
        headers={"content-type": "image/png"},
        params=[("key", "k"), ("header", "a=1"), ("header", "b=x=y"), ("priority", "high"), ("fsync", "never")],
    )
    assert answer.json()[0]["durability"] == "os"
    [message] = client.browse("raw")
    assert (message.value, message.key, message.priority) == (b"\x00\xffraw", b"k", 1)
    assert message.headers == [("a", b"1"), ("b", b"x=y")]


def test_a_body_that_is_said_to_be_a_form_is_refused_because_curl_says_that_of_json(
    http: httpx.Client, client: Client
) -> None:
    client.create_topic("curled")
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = http.post("/topics/curled/messages", content=b'{"value": 1}', headers=form)

    assert (answer.status_code, answer.json()["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")
    assert "-H 'Content-Type: application/json'" in answer.json()["message"]
    assert client.browse("curled") == []
    described = http.get("/openapi.json").json()["paths"]["/api/v1/topics/{topic}/messages"]["post"]
    assert "415" in described["responses"]


def test_a_cloud_event_keeps_its_attributes_and_is_recognised_when_it_comes_again(
    http: httpx.Client, client: Client
) -> None:
    client.create_topic("events", config={"dedup_window_ms": 60_000}, partitions=3)
    event = {
        "ce-specversion": "1.0",
        "ce-id": "17",
        "ce-source": "/shop",
        "ce-type": "order.made",
        "ce-subject": "caf%C3%A9",
        "ce-partitionkey": "customer-5",
        "content-type": "application/json; charset=utf-8",
    }
    for duplicate in (False, True):
        answer = http.post("/topics/events/messages?dedup=1", content=b'{"total": 5}', headers=event)
        assert answer.status_code == 200, answer.text
        assert answer.json()[0]["duplicate"] is duplicate
    [message] = client.browse("events")
    headers = dict(message.headers)
    assert (message.value, message.key) == (b'{"total": 5}', b"customer-5")
    assert headers["ce-subject"] == "café".encode()
    assert headers["content-type"] == b"application/json; charset=utf-8"
    assert {name: headers[name] for name in ("ce-id", "ce-source", "ce-type", "ce-specversion")} == {
        "ce-id": b"17",
        "ce-source": b"/shop",
        "ce-type": b"order.made",
        "ce-specversion": b"1.0",
    }
    del event["ce-type"]
    refused = http.post("/topics/events/messages", content=b"", headers=event)
    assert (refused.status_code, "ce-type" in refused.json()["message"]) == (400, True)


def test_delays_and_expiry_follow_the_clock_of_the_broker(broker: BrokerForTests, http: httpx.Client) -> None:
    broker.clock.advance("10m")  # so that it is not the clock of this process
    [delayed] = publish(http, "timed", {"value": "later", "delay_ms": 60_000, "ttl_ms": 3_600_000})
    at_ms = broker.broker.now_us() // 1000 + 30_000
    [due] = publish(http, "timed", {"value": "sooner", "deliver_at_ms": at_ms, "timestamp_ms": 1_700_000_000_000})
    assert delayed["scheduled"]
    assert due["scheduled"]
    assert browse(http, "timed") == []
    waiting = http.get(f"/messages/{due['id']}").json()
    assert (waiting["deliver_at_ms"], waiting["timestamp_ms"]) == (at_ms, 1_700_000_000_000)
    broker.clock.advance("2m")
    eventually(lambda: len(browse(http, "timed")) >= 2)  # they are on their way to the disk
    assert [message["value"] for message in browse(http, "timed")] == ["sooner", "later"]
    assert http.get(f"/messages/{delayed['id']}").json()["value"] == "later"


def test_a_dedup_id_on_a_topic_without_a_window_refuses_the_request_before_anything_is_stored(
    http: httpx.Client, client: Client
) -> None:
    client.create_topic("windowless", partitions=2)
    for messages in ({"value": "a", "dedup_id": "1"}, [{"value": "plain"}, {"value": "a", "dedup_id": "1"}]):
        answer = http.post("/topics/windowless/messages", json=messages)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT")
        assert "no dedup window" in answer.json()["message"]
    assert sum(client.offsets("windowless").values()) == 0


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ({"value": "a", "dedup_id": "1"}, 400, "INVALID_ARGUMENT"),
        ({"value": "a" * (1024 * 1024 + 1)}, 413, "PAYLOAD_TOO_LARGE"),
        ({"value": "a", "partition": 7}, 404, "PARTITION_NOT_FOUND"),
    ],
)
def test_a_message_that_is_refused_leaves_no_topic_behind(
    http: httpx.Client, client: Client, message: dict[str, Any], status: int, code: str
) -> None:
    for body in (message, [{"value": "plain"}, message]):
        answer = http.post("/topics/mistyped/messages", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert "mistyped" in answer.json()["message"]
        assert "mistyped" not in {topic.name for topic in client.topics()}


def test_a_message_that_is_refused_during_maintenance_leaves_no_topic_behind(
    http: httpx.Client, client: Client
) -> None:
    client.set_mode("maintenance", "new disk")
    try:
        answer = http.post("/topics/mistyped/messages", json={"value": "a"})
        assert (answer.status_code, answer.json()["code"]) == (503, "READ_ONLY")
        assert "mistyped" not in {topic.name for topic in client.topics()}
    finally:
        client.set_mode("normal")


def test_a_repetition_is_recognised_by_its_dedup_id(http: httpx.Client, client: Client) -> None:
    client.create_topic("dedup", config={"dedup_window_ms": 60_000}, partitions=4)
    batch = [{"value": "a", "dedup_id": "1"}, {"value": "b", "dedup_id": "2"}, {"value": "c"}]
    first = publish(http, "dedup", batch)
    again = publish(http, "dedup", batch[:2])
    assert [receipt["duplicate"] for receipt in first + again] == [False, False, False, True, True]
    assert [receipt["id"] for receipt in again] == [receipt["id"] for receipt in first[:2]]


def test_a_repetition_is_recognised_by_the_first_request_after_a_restart(tmp_path: Path) -> None:
    message = {"value": "a", "dedup_id": "1", "key": "k"}
    with BrokerForTests(tmp_path, http=True) as broker, httpx.Client(base_url=f"{broker.url}/api/v1") as http:
        broker.connect().create_topic("dedup", config={"dedup_window_ms": 600_000}, partitions=2)
        [first] = publish(http, "dedup", message)
    with BrokerForTests(tmp_path, http=True) as broker, httpx.Client(base_url=f"{broker.url}/api/v1") as http:
        [again] = publish(http, "dedup", message)
    assert (again["duplicate"], again["id"]) == (True, first["id"])


def test_options_of_a_message_reach_the_queue(http: httpx.Client, client: Client) -> None:
    publish(http, "options", [{"value": "x", "lease_ms": 5000, "max_retries": 0, "priority": 0}])
    with client.queue("options") as queue:
        message = queue.next(5)
        assert message is not None
        message.nack("no")
    eventually(lambda: client.dead_letters.list(topic="options"))
    assert [letter.reason for letter in client.dead_letters.list(topic="options")] == ["MAX_RETRIES_EXCEEDED"]


def test_a_trace_goes_on_in_the_message_unless_it_has_its_own(http: httpx.Client, client: Client) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = http.post(
        "/topics/traced/messages",
        json=[{"value": "a"}, {"value": "b", "headers": {"traceparent": "own"}}],
        headers={"traceparent": parent, "tracestate": "vendor=1"},
    )
    assert answer.status_code == 200
    first, second = client.browse("traced")
    assert dict(first.headers) == {"traceparent": parent.encode(), "tracestate": b"vendor=1"}
    assert dict(second.headers)["traceparent"] == b"own"


def test_several_topics_at_once(http: httpx.Client, client: Client) -> None:
    messages = [{"topic": "x.a", "value": "1"}, {"topic": "x.b", "value": "2"}, {"topic": "x.a", "value": "3"}]
    answer = http.post("/messages", json=messages)
    assert [(receipt["topic"], receipt["offset"]) for receipt in answer.json()] == [("x.a", 0), ("x.b", 0), ("x.a", 1)]
    partly = http.post("/messages", json=[{"topic": "x.a", "value": "4"}, {"topic": "not/ok", "value": "5"}])
    assert partly.status_code == 207
    stored, refused = partly.json()
    assert stored["receipt"]["offset"] == 2
    assert refused["error"]["code"] == "INVALID_NAME"
    assert http.post("/messages", json=[{"topic": "not/ok", "value": "5"}]).status_code == 400


def test_partitions_that_fail_do_not_take_others_with_them(
    broker: BrokerForTests, http: httpx.Client, client: Client
) -> None:
    client.create_topic("halves", partitions=2)
    publish(http, "halves", [{"value": "a", "partition": 0}, {"value": "b", "partition": 1}])

    async def fail() -> None:
        broker.broker.topics.partition("default", "halves", 1).fail("the disk is broken")

    broker.run(fail())
    batch = [{"value": "c", "partition": 1}, {"value": "d", "partition": 0}, {"value": "e", "partition": 1}]
    answer = http.post("/topics/halves/messages", json=batch)
    assert answer.status_code == 207
    first, second, third = answer.json()
    assert first["error"]["code"] == third["error"]["code"] == "STORAGE_FAILED"
    assert (second["receipt"]["partition"], second["receipt"]["offset"]) == (0, 1)
    assert http.post("/topics/halves/messages", json=batch[:1]).json()["code"] == "STORAGE_FAILED"


def test_one_bad_message_keeps_the_whole_request_out(http: httpx.Client, client: Client) -> None:
    client.create_topic("strict", config={"max_message_bytes": 100})
    refusals = {
        "message 1: ": [{"value": "ok"}, {"value": "x", "priority": "urgent"}],
        "not both": [{"value": "ok"}, {"value": "x", "delay_ms": 1, "deliver_at_ms": 1}],
        "message 1 has 200 bytes": [{"value": "ok"}, {"value": "x" * 200}],
        "needs a value": [{"value": "ok"}, {"value": None}],
        "partitions 0 to 0": [{"value": "ok"}, {"value": "x", "partition": 3}],
        "no message": [],
        "not base64": {"value": "%%", "encoding": "base64"},
        "must be a string": {"value": 5, "encoding": "text"},
        "a lease lasts": {"value": "x", "lease_ms": 1},
        "dedup_id": {"value": "x", "dedup_id": ""},
    }
    for words, body in refusals.items():
        answer = http.post("/topics/strict/messages", json=body)
        assert answer.status_code in (400, 404, 413), (words, answer.text)
        assert words in answer.json()["message"]
    assert client.browse("strict") == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"7",
        b'"x"',
        b"[[]]",
        b'{"value":1,"wrong":2}',
        b'{"key":"x"}',
        b'{"value":"\\ud800"}',
        b'{"value":"\xff"}',
        b'{"value":[\xff]}',
        b'{"value":"x","key":"\\udfff"}',
        b'{"value":1,"deliver_at_ms":9223372036854775807}',
        b'{"value":1,"timestamp_ms":99999999999999999999999}',
        b'{"value":1,"priority":1.5}',
        b'{"value":1,"partition":-1}',
        b"[" * 100_000,
        b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_not_right_is_refused(http: httpx.Client, body: bytes) -> None:
    for kind in ("application/json", "application/x-ndjson"):
        answer = http.post("/topics/wrong/messages", content=body, headers={"content-type": kind})
        assert answer.status_code == 400, (kind, answer.text)
        assert answer.json()["code"] == "INVALID_ARGUMENT"


def test_too_much_at_once_is_refused(http: httpx.Client) -> None:
    answer = http.post("/topics/much/messages", json=[{"value": 1}] * 10_001)
    assert (answer.status_code, answer.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
    answer = http.post("/topics/much/messages", content=b"x" * (10 * 1024 * 1024 + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")


def test_options_in_the_query_of_a_json_body_are_a_mistake(http: httpx.Client) -> None:
    answer = http.post("/topics/odd/messages?key=k", json={"value": 1})
    assert (answer.status_code, "key" in answer.json()["message"]) == (400, True)


def test_a_broker_that_may_not_make_topics_says_so() -> None:
    settings = Settings.model_validate({"topics": {"auto_create": False}})
    with BrokerForTests(http=True, settings=settings) as broker:
        answer = httpx.post(f"{broker.url}/api/v1/topics/missing/messages", json={"value": 1})
        assert (answer.status_code, answer.json()["code"]) == (404, "TOPIC_NOT_FOUND")


def test_a_full_queue_refuses(http: httpx.Client, client: Client) -> None:
    client.create_topic("full", config={"max_depth": 2})
    client.queue("full").close()
    publish(http, "full", [{"value": 1}, {"value": 2}])
    answer = http.post("/topics/full/messages", json={"value": 3})
    assert (answer.status_code, answer.json()["code"]) == (429, "QUEUE_FULL")


# --- looking -----------------------------------------------------------------------------------------------------


def test_values_come_in_the_form_that_is_asked_for(http: httpx.Client, client: Client) -> None:
    for value in (b'{"a": 1}', b"text", b"\xff\x00", b"7", b"[broken"):
        client.publish("forms", value)
    client.publish("forms", None, key=b"\xfe")

    def forms(encoding: str) -> list[tuple[Any, str]]:
        return [(found["value"], found["encoding"]) for found in browse(http, "forms", encoding=encoding)]

    base64_of = {value: base64.b64encode(value).decode() for value in (b'{"a": 1}', b"text", b"\xff\x00")}
    assert forms("auto")[:5] == [
        ({"a": 1}, "json"),
        ("text", "text"),
        (base64_of[b"\xff\x00"], "base64"),
        ("7", "text"),
        ("[broken", "text"),
    ]
    assert forms("json")[3] == (7, "json")
    assert forms("text")[0] == ('{"a": 1}', "text")
    assert forms("base64")[1] == (base64_of[b"text"], "base64")
    assert forms("auto")[5] == (None, "text")
    last = browse(http, "forms", newest_first=True, limit=1)[0]
    assert (last["key"], last["key_encoding"], last["offset"]) == ("/g==", "base64", 5)


def test_a_value_that_is_cut_stays_readable(http: httpx.Client, client: Client) -> None:
    client.publish("cut", "éé" * 10)
    client.publish("cut", '{"a": "' + "x" * 50 + '"}')
    first, second = browse(http, "cut", value_bytes=3)
    assert (first["value"], first["encoding"], first["size"]) == ("é", "text", 40)
    assert (second["value"], second["encoding"]) == ('{"a', "text")


def test_browsing_goes_on_where_it_ended(http: httpx.Client, client: Client) -> None:
    client.create_topic("pages", partitions=2)
    for number in range(20):
        client.publish("pages", str(number), key=str(number), headers={"odd": str(number % 2)})
    seen: list[str] = []
    after = ""
    while True:
        page = http.get("/topics/pages/messages", params={"limit": 3, "after": after, "header": "odd=1"}).json()
        seen += [message["value"] for message in page["messages"]]
        after = page["after"]
        if not after:
            break
    assert seen == [str(number) for number in range(1, 20, 2)]
    assert [found["value"] for found in browse(http, "pages", key="7")] == ["7"]
    assert [found["value"] for found in browse(http, "pages", text="1", newest_first=True, limit=2)] == ["19", "18"]


def test_a_long_poll_ends_when_a_message_comes(http: httpx.Client, client: Client) -> None:
    client.publish("polled", "old")
    tail = http.get("/topics/polled/messages").json()["tail"]
    threading.Timer(0.1, lambda: client.publish("polled", "new")).start()
    page = http.get("/topics/polled/messages", params={"after": tail, "wait_ms": 30_000}).json()
    assert [message["value"] for message in page["messages"]] == ["new"]
    page = http.get("/topics/polled/messages", params={"after": page["tail"], "wait_ms": 20}).json()
    assert page["messages"] == []


def test_an_unknown_id_is_not_found(http: httpx.Client) -> None:
    assert http.get("/messages/00000000000000000000000000").status_code == 404
    assert http.get("/messages/nonsense").status_code == 400


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "partition=x",
        "offset=-1",
        "from_ms=99999999999999999999",
        "after=x",
        "encoding=xml",
        "header==x",
        "newest_first=1&wait_ms=1",
        "text=%FF",
        "key=a&key=b",
        "wrong=1",
    ],
)
def test_questions_that_make_no_sense_are_refused(http: httpx.Client, client: Client, query: str) -> None:
    client.create_topic("asked", if_missing=True)
    answer = http.get(f"/topics/asked/messages?{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT")


def test_the_document_describes_bodies_and_the_answer_with_several_outcomes(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    operation = document["paths"]["/api/v1/topics/{topic}/messages"]["post"]
    assert "application/json" in operation["requestBody"]["content"]
    assert "207" in operation["responses"]
    assert json.dumps(document["components"]["schemas"]["NewMessage"])

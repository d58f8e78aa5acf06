"""What is sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from millstream.webhooks.content import compose, compose_test
from millstream.webhooks.registration import Secret, Webhook
from millstream.webhooks.signing import signature
from millstream.wire.queue_calls import LeasedMessage

WEBHOOK = Webhook(
    id="wh-1", namespace="shop", topic="t", group="g", url="http://h/", created_ms=0, secrets=[Secret("s" * 16)]
)


def message(**changes: Any) -> LeasedMessage:
    made = LeasedMessage(
        receipt="r",
        id="01M7",
        topic="orders",
        partition=3,
        offset=17,
        delivery=2,
        failures=1,
        deadline_ms=0,
        append_time_ms=5,
        timestamp_ms=4,
        priority=2,
        key=b"c-17",
        value=b'{"total": 12}',
        headers=[],
    )
    return msgspec.structs.replace(made, **changes)


def test_the_document_says_everything_about_the_message() -> None:
    request = compose(WEBHOOK, message(), attempt=2, now_ms=9_000)
    assert json.loads(request.body) == {
        "id": "01M7",
        "webhook": "wh-1",
        "namespace": "shop",
        "topic": "orders",
        "group": "g",
        "partition": 3,
        "offset": 17,
        "key": "c-17",
        "key_encoding": "text",
        "value": {"total": 12},
        "encoding": "json",
        "headers": {},
        "delivery": 2,
        "attempts": 2,
        "timestamp_ms": 4,
        "sent_ms": 9_000,
    }
    headers = dict(request.headers)
    assert headers["Content-Type"] == "application/json"
    assert headers["Millstream-Signature"] == signature(["s" * 16], 9, request.body)


@pytest.mark.parametrize(
    ("value", "shown", "encoding"),
    [
        (None, None, "text"),
        (b"", "", "text"),
        (b"plain", "plain", "text"),
        (b"12", "12", "text"),
        (b"[1, 2.50]", [1, 2.5], "json"),
        (b"{broken", "{broken", "text"),
        (b"[" * 100_000, "[" * 100_000, "text"),
        (b'{"a": "\xff"}', "eyJhIjogIv8ifQ==", "base64"),
        (b"\xff\xfe", "//4=", "base64"),
    ],
)
def test_a_value_is_shown_as_what_it_is(value: bytes | None, shown: object, encoding: str) -> None:
    document = json.loads(compose(WEBHOOK, message(value=value), attempt=1, now_ms=1).body)
    assert (document["value"], document["encoding"]) == (shown, encoding)


def test_numbers_of_a_json_value_are_not_touched() -> None:
    body = compose(WEBHOOK, message(value=b'{"n":1.10,"big":123456789012345678901234567890}'), attempt=1, now_ms=1).body
    assert b'{"n":1.10,"big":123456789012345678901234567890}' in body


def test_headers_of_a_message_are_text_lists_or_base64() -> None:
    headers = [("a", b"1"), ("a", b"2"), ("b", b"\xff")]
    document = json.loads(compose(WEBHOOK, message(headers=headers), attempt=1, now_ms=1).body)
    assert document["headers"] == {"a": ["1", "2"], "b": "base64:/w=="}


def test_a_trace_goes_on_unless_it_would_break_the_request() -> None:
    def sent(value: bytes) -> str | None:
        headers = compose(WEBHOOK, message(headers=[("traceparent", value)]), attempt=1, now_ms=1).headers
        return dict(headers).get("traceparent")

    assert sent(b"00-abc-def-01") == "00-abc-def-01"
    assert sent(b"00\r\nX-Evil: 1") is None
    assert sent(b"\xff") is None


def test_a_raw_payload_is_the_value_with_the_rest_in_headers() -> None:
    raw = msgspec.structs.replace(WEBHOOK, payload="raw")
    given = message(value=b"\x00\x01", headers=[("content-type", b"image/png")])
    request = compose(raw, given, attempt=1, now_ms=1)
    headers = dict(request.headers)
    assert request.body == b"\x00\x01"
    assert (headers["Content-Type"], headers["Millstream-Topic"], headers["Millstream-Key"]) == (
        "image/png",
        "orders",
        "c-17",
    )
    assert dict(compose(raw, message(key=b"\xff"), attempt=1, now_ms=1).headers)["Millstream-Key-Base64"] == "/w=="
    assert compose(raw, message(value=None), attempt=1, now_ms=1).body == b""


def test_custom_headers_replace_ours_but_never_the_signature() -> None:
    custom = msgspec.structs.replace(WEBHOOK, headers={"user-agent": "shop", "Authorization": "Bearer x"})
    headers = compose(custom, message(), attempt=1, now_ms=1).headers
    assert [value for name, value in headers if name.lower() == "user-agent"] == ["shop"]
    assert ("Authorization", "Bearer x") in headers


def test_a_test_is_signed_and_marked() -> None:
    request = compose_test(WEBHOOK, now_ms=9_000)
    headers = dict(request.headers)
    assert json.loads(request.body)["test"] is True
    assert headers["Millstream-Test"] == "true"
    assert headers["Millstream-Signature"] == signature(["s" * 16], 9, request.body)

"""A message as a line: bytes for pipes, something safe for terminals, JSON that can be published again."""

from __future__ import annotations

import datetime
import io
import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from millstream.cli import publish
from millstream.cli.failure import UsageProblem
from millstream.cli.json_lines import read_json_lines
from millstream.cli.rendering import make_renderer
from millstream.client.messages import moment
from millstream.headers import decode_headers, encode_headers


@dataclass
class Message:
    value: bytes | None = b"wheat"
    key: bytes | None = b"k"
    items: list[tuple[str, bytes]] = field(default_factory=list)
    topic: str = "grain"
    partition: int = 2
    offset: int = 7
    timestamp_us: int = 1_767_225_600_123_456
    id: str = "01KE"
    priority: int = 2
    expiry_us: int = 0

    def header_items(self) -> list[tuple[str, bytes]]:
        return self.items

    @property
    def timestamp(self) -> datetime.datetime:
        return moment(self.timestamp_us)


def render(message: Any, line_format: str = "{value}", *, as_json: bool = False, terminal: bool = False) -> bytes:
    return make_renderer(line_format, as_json=as_json, terminal=terminal)(message)


@pytest.mark.parametrize("value", [b"wheat", b"", b"\x00\xff\xfe", "Mühle".encode(), b"\x1b[2J"])
def test_values_go_through_a_pipe_unchanged(value: bytes) -> None:
    assert render(Message(value=value)) == value + b"\n"
    assert render(Message(value=value), "<{value}>") == b"<" + value + b">\n"


def test_a_terminal_is_not_at_the_mercy_of_messages() -> None:
    """Clear screen, set the title, ring the bell: all of it can be in a message and none of it may happen."""
    shown = render(Message(value=b"a\x1b[2J\x07\x9b\tb\n\xc2\x9bc"), terminal=True).decode()
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2J\\x07" in shown
    assert "\tb\n" in shown


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert render(Message(timestamp_us=1_790_000_000_000_000_000), "{timestamp}") == b"1790000000000000 ms\n"
    assert render(Message(timestamp_us=-(2**62)), "{timestamp}") == b"%d ms\n" % (-(2**62) // 1000)
    assert render(Message(timestamp_us=253_402_300_799_999_999), "{timestamp}") == b"9999-12-31T23:59:59.999Z\n"


def test_every_field_can_be_named() -> None:
    line = render(
        Message(items=[("a", "ü".encode())]),
        "{id} {topic} {partition}:{offset:04} {timestamp} {priority:d} {key} {headers}\\t{value}",
    )
    assert line.decode() == '01KE grain 2:0007 2026-01-01T00:00:00.123Z 2 k {"a": "ü"}\twheat\n'


def test_absent_keys_and_values_are_empty() -> None:
    assert render(Message(key=None, value=None), "[{key}|{value}]") == b"[|]\n"


@pytest.mark.parametrize("line_format", ["{nothing}", "{}", "{value", "{offset:q}", "{value.__class__}", "{0}"])
def test_formats_that_cannot_work_are_refused_before_the_first_message(line_format: str) -> None:
    with pytest.raises(UsageProblem):
        make_renderer(line_format, as_json=False, terminal=False)


def test_json_says_when_bytes_are_not_text() -> None:
    document = json.loads(render(Message(key=None, value=b"\xff\x00"), as_json=True))
    assert document["key"] is None
    assert document["value_base64"] == "/wA="
    assert "value" not in document
    assert document["timestamp_ms"] == 1_767_225_600_123


@pytest.mark.parametrize(
    "message",
    [
        Message(items=[("a", b"b")]),
        Message(items=[("a", b"b"), ("c", b"\xff\x00"), ("c", b"base64:/wA"), ("c", b"base64:YQ==")]),
        Message(key=None, value=b"\xff\x00"),
        Message(key=b"\xfe", value=None),
        Message(value='line\nbreak "quoted" ü'.encode()),
    ],
)
def test_what_consume_prints_as_json_publish_reads_back(message: Message) -> None:
    line = render(message, as_json=True)
    assert line.count(b"\n") == 1
    (read,) = read_json_lines(io.BytesIO(line), None, None)
    assert (read.value, read.key) == (message.value, message.key)
    assert decode_headers(encode_headers(read.headers)) == message.items
    assert read.options == {"timestamp": 1_767_225_600.123, "priority": 2}


def test_json_lines_say_what_an_argument_of_publish_says() -> None:
    line = (
        b'{"value": "x", "partition": 1, "priority": "high", "ttl": "1h", "timestamp": "2026-01-31T09:30",'
        b' "dedup_id": "d", "max_retries": 0}'
    )
    (read,) = read_json_lines(io.BytesIO(line), None, None)
    assert read.options == {
        "partition": 1,
        "priority": "high",
        "ttl": "1h",
        "timestamp": datetime.datetime(2026, 1, 31, 9, 30, tzinfo=datetime.UTC),
        "dedup_id": "d",
        "max_retries": 0,
    }


def test_what_is_left_of_a_message_is_left_of_its_copy() -> None:
    ahead_us = (time.time_ns() // 1000) + 3_600_000_000
    (read,) = read_json_lines(io.BytesIO(render(Message(expiry_us=ahead_us), as_json=True)), None, None)
    assert datetime.timedelta(minutes=59) < read.options["ttl"] <= datetime.timedelta(hours=1)
    (over,) = read_json_lines(io.BytesIO(render(Message(expiry_us=1_000_000), as_json=True)), None, None)
    assert over.options["ttl"] == datetime.timedelta(milliseconds=1)


def test_json_lines_may_hold_any_value_and_take_defaults_from_options() -> None:
    lines = io.BytesIO(b'{"value": {"total": 12}}\n\n{"value": "x", "key": "own", "headers": {"h": "own"}}\n')
    first, second = read_json_lines(lines, b"common", {"h": "common", "g": "1"})
    assert (first.value, first.key, first.headers) == (b'{"total": 12}', b"common", [("h", "common"), ("g", "1")])
    assert (second.value, second.key, second.headers) == (b"x", b"own", [("h", "own"), ("g", "1")])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"not json", "line 1 is not JSON"),
        (b"[1]", "line 1 is not an object with a value"),
        (b'{"key": "k"}', "line 1 is not an object with a value"),
        (b'{"value_base64": "%"}', "not base 64"),
        (b'{"value": "\\ud800"}', "surrogate"),
        (b'{"value": "x", "headers": {"n": 1}}', "headers that are not names with texts"),
        (b'{"value": "x", "headers": {"n": ["a", 1]}}', "headers that are not names with texts"),
        (b'{"value": "\xff"}', "line 1 is not JSON"),
        (b'{"value": "x", "priorty": "high"}', "line 1 has a 'priorty', .*; did you mean 'priority'"),
        (b'{"value": "x", "colour": "red"}', "line 1 has a 'colour', which no message has: use value, "),
        (b'{"value": "x", "topic": "elsewhere"}', "line 1 has a 'topic'"),
        (b'{"value": "x", "timestamp": "soon"}', "line 1 has a timestamp that is no time"),
        (b'{"value": "x", "timestamp_ms": "soon"}', "line 1 has a timestamp_ms that is no number"),
        (b'{"value": "x", "timestamp": "99999999d"}', "line 1 has a timestamp that is no time"),
        (
            b'{"value": "x", "expiry_ms": 100000000000000000000000000000}',
            "line 1 has an expiry_ms that is too far away",
        ),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_bad_json_lines_are_named(line: bytes, problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        list(read_json_lines(io.BytesIO(line), None, None))


def test_keyed_lines_split_at_the_first_separator() -> None:
    (read,) = publish._from_keyed_lines(io.BytesIO(b"k:v:w\n"), b":", None)
    assert (read.key, read.value) == (b"k", b"v:w")
    with pytest.raises(UsageProblem, match="line 1 has no separator"):
        list(publish._from_keyed_lines(io.BytesIO(b"novalue\n"), b":", None))
    with pytest.raises(UsageProblem, match="line 1 has no separator"):
        list(publish._from_keyed_lines(io.BytesIO(b"novalue\n"), b"\xff", None))

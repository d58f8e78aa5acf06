"""What comes over HTTP, before it reaches the broker: paths, queries, bodies and values.  Any bytes get an answer."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.entries import encode_entries
from millstream.errors import InvalidArgument, MethodNotAllowed, MillstreamError, PathNotFound
from millstream.records import Batch
from millstream.server.http.app import API
from millstream.server.http.endpoints import decode_query, decode_with
from millstream.server.http.families.messages import BrowseQuery, StreamQuery, _lines, _one_or_many
from millstream.server.http.families.topics import OffsetsQuery, TopicsQuery
from millstream.server.http.outgoing import (
    NewMessage,
    PublishQuery,
    cloud_event,
    entries_of,
    raw_message,
    trace_headers,
)
from millstream.server.http.router import Router
from millstream.server.http.site import FAMILIES
from millstream.values import Encoding, from_headers, from_json, from_raw, to_headers, to_json, to_json_start

NOW_US = 1_700_000_000_000_000
ENCODINGS: tuple[Encoding, ...] = ("auto", "text", "json", "base64")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def written(documents: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return documents.map(lambda document: json.dumps(document).encode())


# --- values ------------------------------------------------------------------------------------------------------


@given(st.one_of(st.none(), st.binary(), written(JSON)), st.sampled_from(ENCODINGS))
def test_every_value_can_be_shown_and_sent_again(data: bytes | None, encoding: Encoding) -> None:
    shown, how = to_json(data, encoding)
    document = msgspec.json.encode({"value": shown})
    sent = json.loads(document)["value"]
    back = from_json(sent, how)  # type: ignore[arg-type]
    if how == "json":
        assert data is not None
        assert json.loads(back or b"") == json.loads(data)
    else:
        assert back == data


@given(st.binary(), st.integers(0, 50), st.sampled_from(ENCODINGS))
def test_the_start_of_any_value_can_be_shown(data: bytes, size: int, encoding: Encoding) -> None:
    start = data[:size]
    shown, how = to_json_start(start, encoding)
    if how == "text":
        assert start.startswith(shown.encode())
        assert len(start) - len(shown.encode()) < 4
    else:
        assert base64.b64decode(shown) == start


@pytest.mark.parametrize(
    ("raw", "encoding", "data"),
    [
        (b'"a\\u00e9"', "auto", "aé".encode()),
        (b'"a"', "text", b"a"),
        (b'"YQ=="', "base64", b"a"),
        (b'"a"', "json", b'"a"'),
        (b"null", "auto", None),
        (b"null", "text", None),
        (b"null", "json", b"null"),
        (b"1.10", "auto", b"1.10"),
        (b'{"n": 12345678901234567890123}', "auto", b'{"n": 12345678901234567890123}'),
    ],
)
def test_a_value_in_json_becomes_bytes(raw: bytes, encoding: Encoding, data: bytes | None) -> None:
    assert from_raw(msgspec.Raw(raw), encoding) == data


@pytest.mark.parametrize(
    ("raw", "encoding"), [(b"7", "text"), (b"7", "base64"), (b'"%"', "base64"), (b'"\xff"', "auto")]
)
def test_a_value_that_does_not_fit_its_encoding_is_refused(raw: bytes, encoding: Encoding) -> None:
    with pytest.raises(InvalidArgument):
        from_raw(msgspec.Raw(raw), encoding)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b'{"price":0.12345678901234567890}', b'{"price":0.12345678901234567890}'),
        (b"[123456789012345678901234567890]", b"[123456789012345678901234567890]"),
        (b'{"a":1,"a":1.10}', b'{"a":1,"a":1.10}'),
        (b'{\n "a": [1,\r\n2]\n}', b'{"a":[1,2]}'),
    ],
)
def test_json_is_shown_to_the_last_digit_on_one_line(data: bytes, shown: bytes) -> None:
    value, encoding = to_json(data)
    assert (bytes(value), encoding) == (shown, "json")


@pytest.mark.parametrize("data", [b'{"a":"\xff"}', b'["\xc3"]', b"{\xf0"])
@pytest.mark.parametrize("encoding", ["auto", "json", "text"])
def test_bytes_that_only_look_like_json_are_shown_as_base64(data: bytes, encoding: Encoding) -> None:
    assert to_json(data, encoding) == (base64.b64encode(data).decode(), "base64")


def test_headers_that_repeat_are_a_list_and_bytes_are_marked() -> None:
    assert to_headers([("a", b"1"), ("b", b"\xff"), ("a", b"2"), ("a", b"3")]) == {
        "a": ["1", "2", "3"],
        "b": "base64:/w==",
    }


@pytest.mark.parametrize("data", [b"", b"text", b"\x01", b"\xff", b"base64:", b"base64:/w==", b"base64:no", b"base64"])
def test_a_header_that_is_shown_and_sent_again_is_the_same_to_the_byte(data: bytes) -> None:
    pairs = [("one", data), ("two", data), ("two", b"other")]
    assert from_headers(to_headers(pairs)) == pairs


def test_a_header_is_bytes_where_base64_is_said_and_refused_where_it_is_not_that() -> None:
    assert from_headers({"a": "base64:AQ==", "b": ["base64:", "base 64"]}) == [
        ("a", b"\1"),
        ("b", b""),
        ("b", b"base 64"),
    ]
    with pytest.raises(InvalidArgument, match="header 'sum' behind 'base64:' is not base64"):
        from_headers({"sum": "base64:no"})


def test_headers_of_one_name_take_no_longer_each_where_there_are_many() -> None:
    began_s = time.process_time()
    assert len(to_headers([("a", b"")] * 150_000)["a"]) == 150_000  # as a message of 1 MiB may have
    assert time.process_time() - began_s < 3


# --- paths -------------------------------------------------------------------------------------------------------


def routes() -> Router[str]:
    router: Router[str] = Router()
    for path in ("/topics", "/topics/{topic}", "/topics/{topic}/messages", "/topics/all/things", "/messages/{id}"):
        router.add("GET", path, path)
    return router


def test_a_literal_goes_before_a_variable_and_variables_are_unescaped() -> None:
    router = routes()
    assert router.find("GET", "/topics/a%20b") == ("/topics/{topic}", {"topic": "a b"})
    assert router.find("GET", "/topics/all/things") == ("/topics/all/things", {})
    assert router.find("GET", "/topics/all/messages") == ("/topics/{topic}/messages", {"topic": "all"})
    assert router.find("GET", "/topics/a%2Fb") == ("/topics/{topic}", {"topic": "a/b"})
    with pytest.raises(PathNotFound):
        router.find("GET", "/topics//messages")
    with pytest.raises(MethodNotAllowed) as refused:
        router.find("PUT", "/topics")
    assert refused.value.allowed == ("GET", "HEAD")
    assert router.find("HEAD", "/topics/a") == router.find("GET", "/topics/a")


def test_no_two_endpoints_share_a_path_in_either_form() -> None:
    router: Router[str] = Router()
    for family in FAMILIES:
        for endpoint in family.endpoints:
            router.add(endpoint.method, API + endpoint.path, endpoint.path)
            if family.namespaced:
                router.add(endpoint.method, f"{API}/namespaces/{{namespace}}{endpoint.path}", endpoint.path)


@given(st.text(max_size=20), st.one_of(st.text(), st.text("/{}%topicsmessages", max_size=40)))
def test_any_path_gets_an_answer(method: str, path: str) -> None:
    try:
        routes().find(method, path)
    except MillstreamError as problem:
        assert str(problem)


# --- queries -----------------------------------------------------------------------------------------------------


def test_a_query_is_read_by_its_types() -> None:
    query = decode_query(BrowseQuery, b"limit=7&newest_first=true&key=a%20b&text=%C3%A9&partition=3")
    assert (query.limit, query.newest_first, query.key, query.text, query.partition) == (7, True, "a b", "é", 3)
    assert decode_query(OffsetsQuery, b"partition=1&partition=2").partition == [1, 2]
    assert decode_query(TopicsQuery, b"") == TopicsQuery()


NAMES = sorted({name for kind in (BrowseQuery, StreamQuery, PublishQuery) for name in kind.__struct_fields__})
QUERIES = st.one_of(
    st.binary(max_size=60),
    st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(st.text(max_size=8), st.integers().map(str))), max_size=4).map(
        lambda pairs: "&".join(f"{name}={value}" for name, value in pairs).encode()
    ),
)


@given(QUERIES, st.sampled_from([BrowseQuery, StreamQuery, PublishQuery, OffsetsQuery, TopicsQuery]))
def test_any_query_gets_an_answer(text: bytes, kind: type[Any]) -> None:
    try:
        assert isinstance(decode_query(kind, text), kind)
    except MillstreamError as problem:
        assert str(problem)


# --- bodies ------------------------------------------------------------------------------------------------------

LIKELY = st.fixed_dictionaries(
    {"value": JSON},
    optional={
        "key": st.one_of(st.none(), st.text(max_size=5)),
        "headers": st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), st.lists(st.text(max_size=3)))),
        "encoding": st.sampled_from([*ENCODINGS, "other"]),
        "key_encoding": st.sampled_from(["text", "base64"]),
        "partition": st.one_of(st.none(), st.integers()),
        "priority": st.one_of(st.none(), st.integers(-1, 6), st.sampled_from(["high", "low", "5", "x"])),
        **{
            name: st.one_of(st.none(), st.integers(), st.integers(0, 10**15))
            for name in ("delay_ms", "deliver_at_ms", "ttl_ms", "timestamp_ms", "lease_ms", "max_retries")
        },
        "dedup_id": st.one_of(st.none(), st.text(max_size=5)),
    },
)


def published(messages: list[NewMessage]) -> None:
    """As far as a batch, which can be read again."""
    entries, _ = entries_of(messages, now_us=NOW_US, extra=[("traceparent", b"t")])
    due = [entry for entry in entries if isinstance(entry, tuple) and len(entry) > 2 and entry[4]]
    for some in (due, [entry for entry in entries if entry not in due]):
        if some:
            head, tail = encode_entries(some, base_timestamp_us=NOW_US)
            assert len(Batch.parse(head + tail, verify=False).values()) == len(some)


@pytest.mark.parametrize(
    ("parent", "state", "kept"),
    [(55, 512, ["traceparent", "tracestate"]), (55, 513, ["traceparent"]), (513, 8, []), (0, 8, [])],
)
def test_a_trace_is_passed_on_to_every_message_and_therefore_short(parent: int, state: int, kept: list[str]) -> None:
    headers = {b"traceparent": b"p" * parent, b"tracestate": b"s" * state}
    assert [name for name, _ in trace_headers(headers)] == kept


@given(
    st.one_of(
        st.binary(), st.one_of(LIKELY, st.lists(LIKELY, max_size=3), JSON).map(lambda it: json.dumps(it).encode())
    )
)
def test_any_body_becomes_messages_or_one_sentence(body: bytes) -> None:
    for decode in (_one_or_many.decode, _lines.decode_lines):
        try:
            found = decode_with(decode, body)
            published(found if isinstance(found, list) else [found])
        except MillstreamError as problem:
            assert str(problem)


HEADER = st.tuples(st.sampled_from(["ce-id", "ce-source", "ce-type", "ce-specversion", "ce-x"]), st.binary(max_size=8))


@given(st.lists(HEADER, max_size=6), st.binary(max_size=10), QUERIES)
def test_any_event_becomes_a_message_or_one_sentence(pairs: list[tuple[str, bytes]], body: bytes, text: bytes) -> None:
    try:
        query = decode_query(PublishQuery, text)
        event = cloud_event({b"ce-specversion": b"1.0", **{name.encode(): value for name, value in pairs}}, query)
        assert event is not None
        [entry], _ = raw_message(body, event[1], now_us=NOW_US, extra=event[0])
        head, tail = encode_entries([entry], base_timestamp_us=NOW_US)
        assert Batch.parse(head + tail, verify=False).values() == [body]
    except MillstreamError as problem:
        assert str(problem)

"""Options are checked before anything is read, and mistakes are answered with what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import InvalidArgument, InvalidName
from millstream.spark.offsets import Place
from millstream.spark.options import SinkOptions, SourceOptions

BROKER = {"bootstrap.servers": "localhost:9092"}
ORDERS = {**BROKER, "subscribe": "orders"}


def source(streaming: bool = False, **options: Any) -> SourceOptions:
    names = {name.replace("__", "."): str(value) for name, value in options.items()}
    return SourceOptions.of({**ORDERS, **names}, streaming=streaming)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("startingoffsetts", "startingOffsets"),
        ("kafka.bootstrap.servers", "bootstrap.servers"),
        ("max_offsets_per_trigger", "maxOffsetsPerTrigger"),
        ("group.id", "groupId"),
        ("failondataloss_", "failOnDataLoss"),
    ],
)
def test_an_unknown_option_is_an_error_that_says_what_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=f"did you mean '{meant}'"):
        SourceOptions.of({**ORDERS, wrong: "1"}, streaming=True)


def test_an_unknown_sink_option_is_an_error_too() -> None:
    with pytest.raises(InvalidArgument, match="no sink option 'topik'; did you mean 'topic'"):
        SinkOptions.of({**BROKER, "topik": "orders"})
    with pytest.raises(InvalidArgument, match="subscribe"):
        SinkOptions.of({**BROKER, "subscribe": "orders"})


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    value = "5" if name == "endingTimestamp" else '{"orders": {"0": 5}}'
    assert source(**{name: value}).ending.at != "latest"
    with pytest.raises(InvalidArgument, match=f"option {name} is for batch reads"):
        source(streaming=True, **{name: value})


def test_names_of_options_are_read_in_any_case() -> None:
    options = SourceOptions.of(
        {"BOOTSTRAP.SERVERS": "a:1, b:2", "SubScribe": "b, a,b", "maxoffsetspertrigger": "7"}, streaming=True
    )
    assert options.target.servers == ("a:1", "b:2")
    assert options.topics.names == ("a", "b")
    assert options.offsets_per_trigger_max == 7


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"subscribe": "orders"}, "bootstrap.servers"),
        ({**ORDERS, "path": "/data"}, "not both"),
        (BROKER, "exactly one of the options subscribe, subscribePattern, assign"),
        ({**ORDERS, "assign": '{"a":[0]}'}, "not by subscribe and assign"),
        ({**BROKER, "subscribePattern": "a("}, "not a regular expression"),
        ({**BROKER, "assign": "a"}, "not JSON"),
        ({**BROKER, "assign": '{"a":["0"]}'}, "as numbers"),
        ({**ORDERS, "startingOffsets": "first"}, "earliest, latest or JSON, not 'first'"),
        ({**ORDERS, "startingOffsets": '{"orders":5}'}, "topic 'orders'"),
        ({**ORDERS, "startingOffsets": '{"orders":{"0":"a"}}'}, "must be numbers"),
        ({**ORDERS, "startingOffsets": '{"orders":{"0":-3}}'}, "no place"),
        ({**ORDERS, "endingOffsets": '{"orders":{"0":-2}}'}, "no place"),
        ({**ORDERS, "endingOffsets": "earliest"}, "nothing would be read"),
        ({**ORDERS, "failOnDataLoss": "maybe"}, "true or false"),
        ({**ORDERS, "minPartitions": "0"}, "from 1 on"),
        ({**ORDERS, "maxOffsetsPerTrigger": "1.5"}, "whole number"),
        ({**ORDERS, "maxBytesPerTrigger": "lots"}, "number of bytes"),
        ({**ORDERS, "maxBytesPerTrigger": "1m", "maxOffsetsPerTrigger": "1"}, "not both"),
        ({**ORDERS, "isolation": "read_uncommitted"}, "isolation is read_committed"),
        ({**ORDERS, "maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"path": "/data", "subscribe": "a", "groupId": "g"}, "groupId needs a broker"),
    ],
)
def test_a_value_that_cannot_be_meant_is_an_error_that_names_the_option(
    options: dict[str, str], complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        SourceOptions.of(options, streaming=False)


def test_names_are_checked_like_everywhere() -> None:
    with pytest.raises(InvalidName):
        source(subscribe="a b")
    with pytest.raises(InvalidName):
        source(groupId="a b")
    with pytest.raises(InvalidName):
        source(namespace="A")


def test_a_batch_reads_everything_and_a_stream_what_comes_unless_they_are_told() -> None:
    assert source().starting.at == "earliest"
    assert source().ending.at == "latest"
    assert source(streaming=True).starting.at == "latest"


def test_a_time_goes_before_times_and_these_before_offsets() -> None:
    by_time = '{"orders":{"0":5}}'
    every = source(startingTimestamp=7, startingOffsetsByTimestamp=by_time, startingOffsets="earliest").starting
    assert (every.at, every.time_ms) == ("time", 7)
    each = source(startingOffsetsByTimestamp=by_time, startingOffsets="earliest").starting
    assert (each.at, each.places) == ("time", {Place("orders", 0): 5})


def test_sizes_may_have_units() -> None:
    assert source(maxBytesPerTrigger="16m").bytes_per_trigger_max == 16 << 20
    assert source(fetch__max__bytes="64 KiB").fetch_bytes == 64 << 10
    with pytest.raises(InvalidArgument, match=r"fetch\.max\.bytes is 9437184 bytes at most"):  # as a frame holds it
        source(fetch__max__bytes="1g")


def test_a_path_may_be_a_uri() -> None:
    options = SourceOptions.of({"path": "file:///srv/my%20data", "subscribe": "a"}, streaming=False)
    assert options.path == "/srv/my data"


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "secret" not in repr(source(token="secret"))
    monkeypatch.setenv("MILLSTREAM_KEY", "from-outside")
    assert source().target.token == "from-outside"
    assert source(token="secret").target.token == "secret"

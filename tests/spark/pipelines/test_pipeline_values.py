"""What ready steps do with single values."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from millstream.spark.pipelines.avro import AvroBroken, avro_columns, read_schema
from millstream.spark.pipelines.values import ValueBroken, make_redactor, make_splitter


def test_fields_are_dropped_masked_and_hashed_wherever_they_are() -> None:
    redact = make_redactor({"email": "hash", "customer.name": "mask", "cards[].number": "drop", "tags[]": "mask"}, None)
    value = {
        "email": "a@b.c",
        "customer": {"name": "Ada", "id": 1},
        "cards": [{"number": 1, "kind": "x"}, {}, None],
        "tags": ["a"],
    }
    assert json.loads(redact(json.dumps(value).encode())) == {
        "email": hashlib.sha256(b"a@b.c").hexdigest(),
        "customer": {"name": "***", "id": 1},
        "cards": [{"kind": "x"}, {}, None],
        "tags": ["***"],
    }


def test_a_key_makes_hashes_that_nobody_can_guess() -> None:
    redacted = json.loads(make_redactor({"a": "hash"}, b"key")(b'{"a": 7}'))
    assert redacted == {"a": hmac.new(b"key", b"7", "sha256").hexdigest()}


def test_what_is_not_redacted_keeps_every_digit() -> None:
    value = b'{"a":1.10,"b":123456789012345678901234567890,"c":1E+400,"d":null,"e":"\xc3\xa4"}'
    assert make_redactor({"zip": "drop"}, None)(value) == value


def test_nothing_stays_nothing_when_it_is_masked_or_hashed() -> None:
    assert make_redactor({"a": "mask", "b": "hash"}, None)(b'{"a":null,"b":null}') == b'{"a":null,"b":null}'


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("card.number", b'{"card": [{"number": 1}]}', "there is no JSON object at card, so card.number cannot be"),
        ("cards[].number", b'{"cards": {"number": 1}}', r"there is no JSON list at cards, so cards\[\].number"),
        ("cards[].number", b'{"cards": [5]}', r"there is no JSON object at cards\[\], so"),
        ("card.number", b'{"card": "1"}', "there is no JSON object at card"),
        ("tags[]", b'{"tags": "a"}', r"there is no JSON list at tags, so tags\[\] cannot be redacted"),
        ("card", b"[]", "there is no JSON object at the top, so card cannot be redacted"),
    ],
)
def test_a_value_of_another_shape_than_the_path_is_not_let_through(path: str, value: bytes, sentence: str) -> None:
    with pytest.raises(ValueBroken, match=sentence):
        make_redactor({path: "mask"}, None)(value)


def test_a_field_and_what_is_in_it_can_both_be_redacted() -> None:
    assert make_redactor({"card": "mask", "card.number": "drop"}, None)(b'{"card":{"number":1}}') == b'{"card":"***"}'


@pytest.mark.parametrize("value", [b"null", b"{}", b'{"card":null}', b'{"card":{}}', b'{"card":{"number":null}}'])
def test_a_field_that_is_not_there_is_no_mistake(value: bytes) -> None:
    assert make_redactor({"card.number": "mask"}, None)(value) == value


@pytest.mark.parametrize("value", [b"", b"no", b'{"a":', b"\xff"])
def test_what_is_no_json_is_said_to_be_none(value: bytes) -> None:
    with pytest.raises(ValueBroken, match="the value is not JSON"):
        make_redactor({"a": "drop"}, None)(value)
    with pytest.raises(ValueBroken, match="the value is not JSON"):
        make_splitter("a")(value)


def test_elements_are_cut_out_byte_for_byte() -> None:
    assert make_splitter("")(b'[{"a": 1.10 }, "x" , null]') == [b'{"a": 1.10 }', b'"x"', b"null"]
    assert make_splitter("order.items")(b'{"order": {"items": [1,  2]}, "x": 1}') == [b"1", b"2"]
    assert make_splitter("")(b"[]") == []


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("", b'{"a": 1}', "the value is not an array"),
        ("items", b'{"items": 5}', "items is not an array"),
        ("order.items", b'{"order": {}}', "there is no field 'order.items'"),
        ("order.items", b'{"order": 1}', "there is no JSON object at order"),
    ],
)
def test_what_cannot_be_split_is_said_why(path: str, value: bytes, sentence: str) -> None:
    with pytest.raises(ValueBroken, match=sentence):
        make_splitter(path)(value)


ITEM = {"type": "record", "name": "Item", "fields": [{"name": "n", "type": "int"}]}
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "items", "type": {"type": "array", "items": ITEM}},
    ],
}


def test_an_avro_schema_is_read_from_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(SCHEMA))
    assert read_schema("order.avsc", tmp_path) == read_schema(json.dumps(SCHEMA), tmp_path) == SCHEMA
    assert avro_columns(SCHEMA) == "`id` bigint, `note` string, `items` array<struct<`n`: int>>"


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ("gone.avsc", "cannot be read: No such file"),
        ("{", "is not JSON"),
        ({"type": "string"}, "not that of a record"),
        ({"type": "record"}, "no list `fields`"),
        (
            {"type": "record", "fields": [{"name": "a", "type": "date"}]},
            "the type 'date' of the schema has no column type",
        ),
        ({"type": "record", "fields": [{"name": "a", "type": ["int", "string"]}]}, "a union of several types"),
    ],
)
def test_a_schema_that_cannot_be_used_is_said_why(schema: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AvroBroken, match=sentence):
        read_schema(schema, tmp_path)


def test_avro_goes_there_and_back() -> None:
    pytest.importorskip("fastavro", reason="Avro needs fastavro")
    from millstream.spark.pipelines.avro import make_decoder, make_encoder

    value = b'{"id":7,"note":null,"items":[{"n":1}]}'
    stored = make_encoder(SCHEMA)(value)
    assert make_decoder(SCHEMA)(stored) == value
    for broken in (b"", stored + b"x", b"\xff" * 30):
        with pytest.raises(ValueBroken, match="not Avro of this schema"):
            make_decoder(SCHEMA)(broken)
    with pytest.raises(ValueBroken, match="does not fit the Avro schema"):
        make_encoder(SCHEMA)(b'{"id":"seven"}')


def test_avro_with_bytes_and_logical_types_goes_there_and_back() -> None:
    fastavro = pytest.importorskip("fastavro", reason="Avro needs fastavro")
    from millstream.spark.pipelines.avro import make_decoder, make_encoder

    kinds: dict[str, Any] = {
        "raw": "bytes",
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "day": {"type": "int", "logicalType": "date"},
        "price": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}],
        "parts": {"type": "array", "items": "bytes"},
        "named": {"type": "map", "values": {"type": "record", "name": "n", "fields": [{"name": "b", "type": "bytes"}]}},
    }
    schema = {"type": "record", "name": "r", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    said = {
        "raw": b"\x00\xff",
        "at": datetime(2026, 11, 16, tzinfo=UTC),
        "day": date(2026, 11, 16),
        "price": Decimal("12.34"),
        "parts": [b"a", b""],
        "named": {"x": {"b": b"c"}},
    }
    stored = io.BytesIO()
    fastavro.schemaless_writer(stored, fastavro.parse_schema(schema), said)
    assert avro_columns(schema) == (
        "`raw` binary, `at` bigint, `day` int, `price` binary, `parts` array<binary>, "
        "`named` map<string, struct<`b`: binary>>"
    )
    value = make_decoder(schema)(stored.getvalue())
    assert json.loads(value) == {
        "raw": "AP8=",
        "at": 1794787200000,
        "day": 20773,
        "price": "BNI=",
        "parts": ["YQ==", ""],
        "named": {"x": {"b": "Yw=="}},
    }
    assert make_encoder(schema)(value) == stored.getvalue()
    with pytest.raises(ValueBroken, match="does not fit the Avro schema"):
        make_encoder(schema)(value.replace(b"AP8=", b"!"))


@pytest.mark.parametrize("depth", [200, 3_000, 100_000])
@pytest.mark.parametrize("inside", ["[%s]", '{"a":%s}'])
def test_a_value_of_any_depth_is_worked_on_or_refused(depth: int, inside: str) -> None:
    """One that ends the worker instead would come again with every attempt, for ever."""
    before, after = inside.split("%s")
    value = (before * depth + "1" + after * depth).encode()
    fields = {"[].[]": "hash"} if before == "[" else {"a.a": "mask"}
    redact, split = make_redactor(fields, None), make_splitter("")
    for work, made in ((redact, bytes), (split, list)):
        try:
            assert isinstance(work(value), made)
        except ValueBroken as problem:
            assert "inside each other" in str(problem) or "not an array" in str(problem)

"""Avro, where the package fastavro is installed: schemas, and values from and to JSON."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from millstream.spark.pipelines.values import ValueBroken

__all__ = ["AvroBroken", "avro_columns", "make_decoder", "make_encoder", "read_schema"]

_PRIMITIVES: Final = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "bytes": "binary",
    "string": "string",
    "enum": "string",
}
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


class AvroBroken(ValueError):
    """This is not a schema that can be used here."""


def read_schema(given: str | Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """A schema as a mapping, as JSON text, or as the path of a file that has it."""
    schema: Any = given
    if isinstance(given, str):
        text = given
        if not given.lstrip().startswith(("{", "[")):
            path = directory / Path(given).expanduser()
            try:
                text = path.read_text()
            except OSError as problem:
                raise AvroBroken(f"the schema {str(path)!r} cannot be read: {problem.strerror}") from None
        try:
            schema = json.loads(text)
        except ValueError as problem:
            raise AvroBroken(f"the schema is not JSON: {problem}") from None
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        raise AvroBroken("the schema is not that of a record: `type: record` and its `fields`")
    avro_columns(schema)
    return dict(schema)


def avro_columns(schema: Mapping[str, Any]) -> str:
    """The columns of a record as Spark declares them."""
    return ", ".join(f"`{field['name']}` {_type(field['type'])}" for field in _fields(schema))


def _fields(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    fields = schema.get("fields")
    if not isinstance(fields, list) or not all(
        isinstance(field, Mapping) and {"name", "type"} <= set(field) for field in fields
    ):
        raise AvroBroken("a record of the schema has no list `fields` in which each has a `name` and a `type`")
    return fields


def _type(kind: Any) -> str:
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"]
        if len(others) == 1:
            return _type(others[0])
        raise AvroBroken("a union of several types has no column type: only a union with null has")
    if isinstance(kind, Mapping):
        name = kind.get("type")
        if name == "record":
            return "struct<" + ", ".join(f"`{field['name']}`: {_type(field['type'])}" for field in _fields(kind)) + ">"
        if name == "array":
            return f"array<{_type(kind.get('items'))}>"
        if name == "map":
            return f"map<string, {_type(kind.get('values'))}>"
        return _type(name)
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    raise AvroBroken(f"the type {kind!r} of the schema has no column type; there are {', '.join(_PRIMITIVES)}")


def _stored(schema: Any) -> Any:
    """The schema of what is stored, which has columns, without what logical types make of it: a moment is a number."""
    if isinstance(schema, list):
        return [_stored(each) for each in schema]
    if isinstance(schema, Mapping):
        return {name: _stored(value) for name, value in schema.items() if name != "logicalType"}
    return schema


def _make_bytes(kind: Any) -> Callable[[Any], Any] | None:
    """What makes bytes of what JSON has as Base64, as Spark writes them there; None for a type without any."""
    if isinstance(kind, list):
        return _make_bytes(next(each for each in kind if each != "null"))
    if not isinstance(kind, Mapping):
        return _from_base64 if kind == "bytes" else None
    if kind["type"] == "record":
        made = {field["name"]: make for field in kind["fields"] if (make := _make_bytes(field["type"])) is not None}
        if not made:
            return None
        return _unless_null(lambda value: value | {name: made[name](value[name]) for name in made if name in value})
    if kind["type"] not in ("array", "map"):
        return _make_bytes(kind["type"])
    inside = _make_bytes(kind["items" if kind["type"] == "array" else "values"])
    if inside is None:
        return None
    if kind["type"] == "array":
        return _unless_null(lambda value: [inside(each) for each in value])
    return _unless_null(lambda value: {name: inside(each) for name, each in value.items()})


def _unless_null(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


_from_base64: Final = _unless_null(lambda value: b64decode(value, validate=True))


def make_decoder(schema: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    """What turns Avro values into JSON."""
    import fastavro

    parsed = fastavro.parse_schema(_stored(schema))

    def decode(value: bytes) -> bytes:
        stream = io.BytesIO(value)
        try:
            document = fastavro.schemaless_reader(stream, parsed, None)
        except Exception as problem:  # whatever a parser stumbles over
            raise ValueBroken(f"the value is not Avro of this schema: {type(problem).__name__} {problem}") from None
        if stream.read(1):
            raise ValueBroken("the value is not Avro of this schema: there is more after its end")
        return _encode(document)

    return decode


def make_encoder(schema: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    """What turns JSON values into Avro."""
    import fastavro

    plain = _stored(schema)
    parsed = fastavro.parse_schema(plain)
    make_bytes = _make_bytes(plain)

    def encode(value: bytes) -> bytes:
        stream = io.BytesIO()
        try:
            document = _decode(value)
            if make_bytes is not None:
                document = make_bytes(document)
            fastavro.schemaless_writer(stream, parsed, document, strict_allow_default=True)
        except Exception as problem:
            raise ValueBroken(f"the value does not fit the Avro schema: {problem}") from None
        return stream.getvalue()

    return encode

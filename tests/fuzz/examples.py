"""Documents that a struct would take, made from its types: seeds for everything that is JSON."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import inspect

__all__ = ["example_of"]

#: What a text most likely is, by the name of its field.
_TEXTS: Final = {
    "topic": "orders",
    "source": "orders",
    "target": "invoices",
    "pattern": "orders.*",
    "patterns": "orders.#",
    "namespace": "default",
    "group": "default",
    "mode": "normal",
    "url": "http://192.0.2.1:8080/hook",
    "cron": "0 3 * * *",
    "timezone": "Europe/Berlin",
    "time_zone": "Europe/Berlin",
    "level": "info",
    "role": "admin",
    "message": "06F0000000000000000000000A",
    "id": "06F0000000000000000000000A",
    "receipt": "orders:0:0:1:1",
    "receipts": "orders:0:0:1:1",
    "secret": "0123456789abcdef0123",
    "encoding": "auto",
    "client_id": "c",
    "client": "c",
    "filter": "a/#",
}


def example_of(kind: Any) -> Any:
    """As JSON would have it."""
    return _made(inspect.type_info(kind), "", 0)


def _made(info: Any, name: str, depth: int) -> Any:
    match info:
        case inspect.Metadata():
            return _made(info.type, name, depth)
        case inspect.StructType():
            document = {} if info.tag_field is None else {info.tag_field: info.tag}
            for field in info.fields:
                if depth < 4 and (field.required or not name or not depth):
                    document[field.encode_name] = _made(field.type, field.encode_name, depth + 1)
            return document
        case inspect.UnionType():
            some = [one for one in info.types if not isinstance(one, inspect.NoneType)]
            return _made(some[0], name, depth)
        case inspect.LiteralType():
            return info.values[0]
        case inspect.StrType():
            return _TEXTS.get(name, "orders" if name == "name" else "a" * max(1, info.min_length or 0))
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return max(info.ge or 0, (info.gt or 0) + 1 if info.gt is not None else 0, 1)
        case inspect.FloatType():
            return 1.0
        case inspect.BytesType():
            return "AAAA"
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.CollectionType():
            return [_made(info.item_type, name, depth + 1)]
        case inspect.TupleType():
            return [_made(item, name, depth + 1) for item in info.item_types]
        case inspect.DictType():
            return {"orders" if depth < 3 else "a": _made(info.value_type, name, depth + 1)}
        case inspect.RawType() | inspect.AnyType():
            return "x"
        case _:
            return None


def text_of(kind: Any) -> bytes:
    return msgspec.json.encode(example_of(kind))

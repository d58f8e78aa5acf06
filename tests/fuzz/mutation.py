"""Changes to inputs that keep their shape: frames, requests and batches are moved about, what is in them is bent.

A target says how its input falls into units, and how units become an input again with right lengths and checksums.
Without that nearly everything would be refused by its first bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

__all__ = ["bend", "bend_json", "mutate_units"]

INTERESTING: Final = (
    *(0, 1, 2, -1, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1000, 4095, 4096, 65_535, 65_536, 10_485_760),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**30),
)
VALUES: Final[tuple[Any, ...]] = (
    *INTERESTING,
    *(None, True, False, 0.5, -0.0, 1e308, -1e-308, [], {}, "", " ", "0", "a", "orders", "default", "*", "#", "+", ">"),
    *("..", "../../etc/passwd", "a/../b", "a\\b", "a\x00b", "a\r\nb: c", "\x1b[31m", "<img src=x onerror=alert(1)>"),
    *("\ud7ff\uffff", "\u202e", "é" * 300, "a" * 300, "a" * 5000, "a." * 150, "**.**.**", "*.*.*.*.*.*.*", "$SYS/#"),
    *("$queue/a", "$share/g/a", "_mqtt", "_dlq", "a.dlq", "1ms", "100y", "9" * 400, "1e999", "-1", "%2e%2e%2f", "%00"),
    *("* * * * *", "*/1 * * * * *", "0 0 30 2 *", "Europe/Berlin", "../zone", "http://127.0.0.1/", "http://[::1]:1/"),
    [[]] * 50,
    ["a"] * 1001,
    {"a": {"a": {"a": {}}}},
    {"": ""},
)
_TOKENS: Final = tuple(str(value).encode(errors="replace") for value in VALUES if isinstance(value, str | int))


def bend(random: Random, data: bytes) -> bytes:
    """Change a few bytes."""
    changed = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(9):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << random.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = random.randrange(256)
            case 2:
                del changed[at : at + random.randrange(1, 9)]
            case 3:
                changed[at:at] = random.randbytes(random.randrange(1, 9))
            case 4:
                other = random.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + random.randrange(1, 65)]
            case 5:
                size, order = random.choice((1, 2, 4, 8)), random.choice(("big", "little"))
                number = random.choice(INTERESTING) & ((1 << 8 * size) - 1)
                changed[at : at + size] = number.to_bytes(size, order)  # type: ignore[arg-type]
            case 6:
                changed[at:at] = random.choice(_TOKENS)
            case 7:
                del changed[at:]
            case _:
                changed[at:at] = bytes([random.randrange(256)]) * random.choice((1, 8, 64, 1000))
    return bytes(changed)


def bend_json(random: Random, text: bytes) -> bytes | None:
    """The same document with something else in one or two places; None if it is no document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for _ in range(random.choice((1, 1, 2))):
        document = _bent(random, document)
    if not random.randrange(50):
        return b"[" * 5000 + b"]" * random.choice((0, 5000))
    return json.dumps(document, ensure_ascii=random.random() < 0.5).encode(errors="replace")


def _bent(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        if not random.randrange(12):
            return {other: content for other, content in value.items() if other != key}
        return {**value, key: _bent(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        if not random.randrange(6):
            return value * random.choice((0, 2, 30))
        return [*value[:at], _bent(random, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and random.random() < 0.4:
        return bend(random, value.encode(errors="replace")).decode(errors="replace")
    return random.choice(VALUES)


def mutate_units(
    random: Random, units: list[bytes], known: Sequence[bytes], change: Callable[[Random, bytes], bytes]
) -> list[bytes]:
    """Another row of units: some left out, repeated, swapped, taken from `known`, or changed inside."""
    units = list(units)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(units) + 1)
        match random.randrange(10):
            case 0 if len(units) > 1:
                del units[at % len(units)]
            case 1 if units:
                units.insert(at, random.choice(units))
            case 2 if len(units) > 1:
                other = random.randrange(len(units))
                units[at % len(units)], units[other] = units[other], units[at % len(units)]
            case 3 | 4:
                units[at:at] = [random.choice(known) for _ in range(random.choice((1, 1, 2)))]
            case _ if units:
                units[at % len(units)] = change(random, units[at % len(units)])
    return units

"""Who is there: the product's own objects in this process, and how much each kind of them holds.

A broker runs for years, and so do its clients.  What is left over each time that something comes and goes is found by
doing so often and counting before and after.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["census", "grown"]

_CONTAINERS: Final = (dict, list, set, deque, OrderedDict)


def census() -> Counter[str]:
    """How many there are of each class, how much is in the containers of all of them by attribute, and what the
    process has of the system's."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        module = kind.__module__
        if isinstance(module, str) and module.startswith("millstream."):  # which some compiled classes say otherwise
            name = f"{module.removeprefix('millstream.')}.{kind.__qualname__}"
            found[name] += 1
            for attribute, value in _attributes(thing):
                if isinstance(value, _CONTAINERS):
                    found[f"{name}.{attribute}"] += len(value)
    found["threads"] = threading.active_count()
    found["descriptors"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return found


def grown(before: Counter[str], after: Counter[str], *, by: int, but: frozenset[str] = frozenset()) -> dict[str, int]:
    """What there are so many more of, leaving out what has a limit of its own."""
    more = {name: after[name] - before[name] for name in after}
    return {name: count for name, count in more.items() if count >= by and not name.startswith(tuple(but))}


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and (value := getattr(thing, name, None)) is not None:
                yield name, value

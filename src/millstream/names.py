"""What things may be called, and how names become patterns and file names.  One rule for every door."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from millstream.errors import InvalidName

__all__ = [
    "AUDIT_TOPIC",
    "DEFAULT_NAMESPACE",
    "INBOX_PREFIX",
    "NAMESPACE_EXPRESSION",
    "NAME_BYTES_MAX",
    "STAGE_PREFIX",
    "check_group",
    "check_namespace",
    "check_pattern",
    "check_topic",
    "closest",
    "compile_pattern",
    "did_you_mean",
    "is_drawn",
    "is_pattern",
    "is_system",
]

DEFAULT_NAMESPACE: Final = "default"
NAME_BYTES_MAX: Final = 255
#: What a namespace may be called, for those who check texts by a regular expression.
NAMESPACE_EXPRESSION: Final = "[a-z0-9][a-z0-9-]{0,63}"
#: Addresses of inboxes look like topics; no topic is called so.
INBOX_PREFIX: Final = "_inbox."
#: Addresses of stages, where messages wait to be published all at once, look like topics, too.
STAGE_PREFIX: Final = "_stage."
#: What administrators did, in the namespace `default`.
AUDIT_TOPIC: Final = "_audit"

_NAMESPACE: Final = re.compile(NAMESPACE_EXPRESSION)
_LEVEL: Final = r"[A-Za-z0-9_-]+"
_TOPIC: Final = re.compile(rf"{_LEVEL}(\.{_LEVEL})*")
_PATTERN: Final = re.compile(rf"({_LEVEL}|\*)(\.({_LEVEL}|\*))*(\.#)?|#")
_GROUP: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_DRAWN: Final = re.compile(r"spark-[0-9a-f]{32}")  # see spark/batch_writer.py


def check_namespace(name: str) -> str:
    """The name itself, or InvalidName with a sentence that says what is wrong."""
    if not _fits(name, _NAMESPACE):
        raise InvalidName(
            f"namespace {_shown(name)} is not valid: use 1 to 64 lower-case letters, digits and '-', not starting with "
            "'-'"
        )
    return name


def check_topic(name: str) -> str:
    """A topic is dot-separated levels: `orders.eu.created`.  Safe as a file name by construction."""
    if not _fits(name, _TOPIC):
        raise InvalidName(
            f"topic {_shown(name)} is not valid: use levels of letters, digits, '-' and '_', separated by single dots, "
            f"{NAME_BYTES_MAX} bytes at most"
        )
    return name


def check_group(name: str, kind: str = "group") -> str:
    """The rule for groups, and for whatever else (`kind`) is called by a word."""
    if not _fits(name, _GROUP):
        raise InvalidName(
            f"{kind} {_shown(name)} is not valid: use letters, digits and '_ . : @ -', starting with a letter, a "
            f"digit or '_', {NAME_BYTES_MAX} bytes at most"
        )
    return name


def is_drawn(query: str) -> bool:
    """Whether this is the name that a Spark job draws which was given none: no other job will ever have it."""
    return _DRAWN.fullmatch(query) is not None


def is_pattern(name: str) -> bool:
    """Whether a topic name has wildcards: `*` stands for one level, a final `#` for any number of levels."""
    return isinstance(name, str) and ("*" in name or "#" in name)


def is_system(topic: str) -> bool:
    """Whether a topic is one of the broker's own, which administrators may see: its name begins with `_`."""
    return topic.startswith("_") and not topic.startswith(INBOX_PREFIX)


def check_pattern(pattern: str) -> str:
    if not _fits(pattern, _PATTERN):
        raise InvalidName(
            f"pattern {_shown(pattern)} is not valid: '*' stands for one whole level, a final '#' for any number"
        )
    return pattern


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for fullmatch.  `orders.#` also matches `orders` itself, as in MQTT.

    A wildcard at the beginning leaves out the broker's own topics: who reads everything did not mean those.
    """
    levels = check_pattern(pattern).split(".")
    deep = levels[-1] == "#"
    if deep:
        levels.pop()
    expression = r"\.".join(r"[^.]+" if level == "*" else re.escape(level) for level in levels)
    if deep:
        expression += r"(\..+)?" if levels else ".+"
    if not levels or levels[0] == "*":
        expression = r"(?!_)" + expression
    return re.compile(expression)


def _fits(name: object, rule: re.Pattern[str]) -> bool:
    """Whatever a program gives for a name; bytes are the most common mistake."""
    return isinstance(name, str) and len(name) <= NAME_BYTES_MAX and rule.fullmatch(name) is not None


def _shown(name: object) -> str:
    if not isinstance(name, str):
        return f"{name!r} ({type(name).__name__}, not text)"
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}... ({len(name)} characters)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that nothing has: the one that was probably meant, or nothing."""
    meant = closest(name, known)
    return "" if meant is None else f"; did you mean {meant!r}?"


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Which of the known names was probably meant; None when it is like none of them."""
    if len(name) > NAME_BYTES_MAX:  # nobody means anything by it, and to compare it takes long
        return None
    return next(iter(difflib.get_close_matches(name, known, 1, likeness)), None)

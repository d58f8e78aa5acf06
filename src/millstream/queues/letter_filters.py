"""Choosing dead letters: a filter as a test that each letter passes or fails."""

from __future__ import annotations

from collections.abc import Callable

from millstream.dead_letters import REASONS, DeadLetter, LetterFilter
from millstream.errors import InvalidArgument
from millstream.names import check_topic, compile_pattern, is_pattern

__all__ = ["compile_filter"]


def compile_filter(wanted: LetterFilter) -> Callable[[DeadLetter], bool]:
    """Whether a letter meets every condition of a filter.

    Raises InvalidName for a topic that cannot be one, InvalidArgument for a reason that there is not.
    """
    tests: list[Callable[[DeadLetter], bool]] = []
    if wanted.topic:
        if is_pattern(wanted.topic):
            matches = compile_pattern(wanted.topic).fullmatch
            tests.append(lambda letter: matches(letter.original_topic) is not None)
        else:
            topic = check_topic(wanted.topic)
            tests.append(lambda letter: letter.original_topic == topic)
    if wanted.group:
        tests.append(lambda letter: letter.group == wanted.group)
    if wanted.reason:
        reason = wanted.reason.upper()
        if reason not in REASONS:
            raise InvalidArgument(f"reason {wanted.reason[:80]!r} is none: there are {', '.join(REASONS)}")
        tests.append(lambda letter: letter.reason.upper() == reason)
    if wanted.error:
        text = wanted.error.casefold()
        tests.append(lambda letter: text in letter.error.casefold())
    if wanted.key is not None:
        key = wanted.key.encode()
        tests.append(lambda letter: letter.key == key)
    for name, value in wanted.headers.items():
        tests.append(_header_test(name, None if value is None else value.encode()))
    if wanted.since_ms:
        tests.append(lambda letter: letter.dead_ms >= wanted.since_ms)
    if wanted.until_ms:
        tests.append(lambda letter: letter.dead_ms < wanted.until_ms)
    return lambda letter: all(test(letter) for test in tests)


def _header_test(name: str, value: bytes | None) -> Callable[[DeadLetter], bool]:
    return lambda letter: any(found == name and value in (None, content) for found, content in letter.headers)

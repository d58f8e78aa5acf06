"""Which failures make a message poison, and which do not."""

from __future__ import annotations

import pytest

from millstream.queues.poison import fails_too_often, poison_of
from millstream.queues.records import PLAIN, Attempt, History
from tests.queue_log import SECOND


def history(*failures: tuple[str, int, str, str]) -> History:
    """Failures as consumer, second, kind, reason."""
    attempts = tuple(Attempt(consumer, 0, at * SECOND, kind, reason) for consumer, at, kind, reason in failures)
    return History(len(attempts), len(attempts), 0, attempts)


@pytest.mark.parametrize(
    ("failures", "part"),
    [
        ([("a", 0, "nack", "no such id"), ("b", 90, "nack", "no such id")], "the same reason"),
        ([("a", 0, "timeout", ""), ("b", 100, "timeout", ""), ("c", 299, "timeout", "")], "3 different consumers"),
        ([("a", 0, "nack", "x"), ("a", 15, "timeout", ""), ("a", 30, "nack", "y")], "3 times within 30 seconds"),
    ],
)
def test_poison_is_recognised(failures: list[tuple[str, int, str, str]], part: str) -> None:
    assert part in (poison_of(history(*failures), PLAIN) or "")


@pytest.mark.parametrize(
    "failures",
    [
        [],
        [("a", 0, "nack", "no such id"), ("a", 90, "nack", "no such id")],  # one consumer may be the culprit
        [("http#1", 0, "nack", "db down"), ("http#2", 90, "nack", "db down")],  # the same one, which asked again
        [("a#1", 0, "timeout", ""), ("a#2", 100, "timeout", ""), ("a#3", 299, "timeout", "")],
        [("a", 0, "nack", "no such id"), ("b", 90, "nack", "db down")],
        [("a", 0, "nack", ""), ("b", 90, "nack", "")],  # no reason is not the same reason
        [("a", 0, "timeout", ""), ("b", 100, "timeout", ""), ("b", 200, "timeout", "")],
        [("a", 0, "timeout", ""), ("b", 100, "timeout", ""), ("c", 301, "timeout", "")],  # not within five minutes
        [("a", 0, "nack", "x"), ("a", 15, "nack", "y"), ("a", 31, "nack", "z")],
        [("a", 0, "returned", "gone"), ("b", 1, "returned", "gone"), ("c", 2, "returned", "gone")],  # nobody failed
    ],
)
def test_bad_luck_is_not_poison(failures: list[tuple[str, int, str, str]]) -> None:
    assert poison_of(history(*failures), PLAIN) is None


def test_large_messages_that_keep_timing_out_are_poison() -> None:
    twice = history(("a", 0, "timeout", ""), ("a", 100, "timeout", ""))
    assert poison_of(twice, PLAIN) is None
    assert "1 MiB" in (poison_of(twice, PLAIN._replace(large=True)) or "")


def test_a_consumer_is_judged_by_more_than_a_few_messages() -> None:
    assert not fails_too_often(10, 10)
    assert not fails_too_often(10, 20)
    assert fails_too_often(11, 20)

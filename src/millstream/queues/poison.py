"""Messages that will fail wherever they are tried, recognised before their retries are used up.  Off by default.

Each rule looks at the failures of one message (its last attempts, the newest of which has just failed) and says in
words why the message is given up, or nothing.
"""

from __future__ import annotations

from typing import Final

from millstream.foreign import in_a_sentence
from millstream.queues.records import Attempt, History, Terms

__all__ = ["LARGE_BYTES", "fails_too_often", "poison_of"]

#: A message above this that keeps timing out is probably too large for its consumers.
LARGE_BYTES: Final = 1024 * 1024

_TIMEOUTS_WITHIN_US: Final = 5 * 60 * 1_000_000
_TIMEOUT_CONSUMERS_MIN: Final = 3
_RAPID_WITHIN_US: Final = 30 * 1_000_000
_RAPID_FAILURES: Final = 3
_LARGE_TIMEOUTS: Final = 2
#: Below this a share says nothing about a consumer.
_SAMPLE_MIN: Final = 20


def poison_of(history: History, terms: Terms) -> str | None:
    """Why messages that have just failed are poison; None = they are not, as far as can be told."""
    failures = [attempt for attempt in history.attempts if attempt.kind in ("nack", "timeout")]
    if not failures:
        return None
    return (
        _same_reason(failures)
        or _timeouts_everywhere(failures)
        or (_large(failures) if terms.large else None)
        or _rapid(failures)
    )


def fails_too_often(failed: int, delivered: int) -> bool:
    """More than half of what a consumer was given failed: it is the consumer that should be served last."""
    return delivered >= _SAMPLE_MIN and 2 * failed > delivered


def _who(attempt: Attempt) -> str:
    """Without its number: who connects again, or asks over HTTP each time, is nobody else."""
    return attempt.consumer.rpartition("#")[0] or attempt.consumer


def _same_reason(failures: list[Attempt]) -> str | None:
    """One retry is enough if the next consumer finds the same fault."""
    last = failures[-1]
    if last.kind != "nack" or not last.reason:
        return None
    for attempt in failures[:-1]:
        if attempt.kind == "nack" and attempt.reason == last.reason and _who(attempt) != _who(last):
            both = f"{in_a_sentence(attempt.consumer)} and {in_a_sentence(last.consumer)}"
            return f"consumers {both} failed for the same reason: {last.reason}"
    return None


def _timeouts_everywhere(failures: list[Attempt]) -> str | None:
    since_us = failures[-1].ended_us - _TIMEOUTS_WITHIN_US
    late = {_who(attempt) for attempt in failures if attempt.kind == "timeout" and attempt.ended_us >= since_us}
    if failures[-1].kind == "timeout" and len(late) >= _TIMEOUT_CONSUMERS_MIN:
        return f"it timed out with {len(late)} different consumers within 5 minutes"
    return None


def _rapid(failures: list[Attempt]) -> str | None:
    if len(failures) < _RAPID_FAILURES:
        return None
    if failures[-1].ended_us - failures[-_RAPID_FAILURES].ended_us <= _RAPID_WITHIN_US:
        return f"it failed {_RAPID_FAILURES} times within 30 seconds"
    return None


def _large(failures: list[Attempt]) -> str | None:
    timeouts = sum(attempt.kind == "timeout" for attempt in failures)
    if failures[-1].kind == "timeout" and timeouts >= _LARGE_TIMEOUTS:
        return f"it is larger than 1 MiB and timed out {timeouts} times; see whether its consumers can take it"
    return None

"""What a worker's handler says by returning or raising, and how workers end.  Shared by both kinds of worker."""

from __future__ import annotations

import logging
from typing import Any, Final

from millstream.client.leases import QueueMessage
from millstream.client.settings import QueueSettings, is_count
from millstream.durations import Duration
from millstream.errors import InvalidArgument, ReceiptInvalid

__all__ = [
    "Reject",
    "Retry",
    "check_concurrency",
    "check_settles",
    "prefetch_for",
    "settle_failure",
    "settle_success",
]

_log = logging.getLogger("millstream.worker")

#: How many messages a worker leases for each thing it does at a time: enough to be busy, too few to hoard.
_PREFETCH_PER_TASK: Final = 4


class Reject(Exception):
    """Raise this in a handler when the message will never work.  It goes to the dead letters at once."""


class Retry(Exception):
    """Raise this in a handler to have the message tried again: after `after`, or as the retry policy says."""

    def __init__(self, reason: str = "", *, after: Duration | None = None) -> None:
        super().__init__(reason)
        self.after = after


def settle_success(message: QueueMessage) -> None:
    try:
        message.ack()
    except ReceiptInvalid as error:
        _log.warning("%r was handled, but will be delivered again: %s", message, error)


def settle_failure(message: QueueMessage, problem: BaseException) -> Any:
    """Settle a message whose handler has raised this."""
    try:
        try:
            _settle_as_said(message, problem)
        except ReceiptInvalid:
            raise
        except Exception as error:
            # A time that is none, an exception that cannot be shown: no reason to end the worker.
            _log.error("%r is nacked, as what its handler raised cannot be heeded: %r", message, error)
            message.nack(type(problem).__name__)
    except ReceiptInvalid as error:
        _log.warning("%r failed, and could not be settled: %s", message, error)


def _settle_as_said(message: QueueMessage, problem: BaseException) -> None:
    if isinstance(problem, Reject):
        _log.warning("%r is rejected: %s", message, problem)
        message.reject(str(problem))
    elif isinstance(problem, Retry):
        message.nack(str(problem), retry_after=problem.after)
    elif isinstance(problem, Exception):
        _log.error("the handler of %r failed", message, exc_info=problem)
        message.nack(repr(problem))
    else:  # the program is asked to end, or the task is cancelled: that is not the message's fault
        message.release()


def check_concurrency(concurrency: int) -> None:
    if not is_count(concurrency):
        raise InvalidArgument(f"concurrency must be 1 or more, not {concurrency!r}")


def prefetch_for(prefetch: int | None, concurrency: int) -> int:
    return concurrency * _PREFETCH_PER_TASK if prefetch is None else prefetch


def check_settles(settings: QueueSettings) -> None:
    if settings.auto_ack:
        raise InvalidArgument("a worker acks what its handler has done; take auto_ack from it, or use client.queue")

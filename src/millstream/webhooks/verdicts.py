"""What an answer to a delivery means for the message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

__all__ = ["RETRY_AFTER_MS_MAX", "Answer", "Verdict", "judge", "retry_after_ms"]

#: A receiver cannot make the broker hold a message longer than this.
RETRY_AFTER_MS_MAX: Final = 3_600_000
#: So much of an answer's body is quoted in an error.
_QUOTE_MAX: Final = 200
#: So much is said about why there was no answer; what a receiver sent instead of HTTP may be in it.
_WHY_MAX: Final = 500
#: Client errors that are about the moment and not about the message.
_TEMPORARY: Final = frozenset([HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS])


class Answer(NamedTuple):
    """What a receiver said; status 0 = it said nothing, and `text` is why."""

    status: int
    #: The beginning of the body.
    text: str = ""
    #: As the header Retry-After asks.
    wait_ms: int = 0

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def error(self) -> str:
        """One line about what went wrong."""
        if not self.status:
            return _in_one_line(self.text, _WHY_MAX)
        try:
            said = f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            said = str(self.status)
        if 300 <= self.status < 400:
            return f"{said}: redirects are not followed; the webhook needs the URL itself"
        quote = _in_one_line(self.text, _QUOTE_MAX)
        return f"{said}: {quote}" if quote else said


def _in_one_line(text: str, most: int) -> str:
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())[:most]


class Verdict(NamedTuple):
    #: `ack` delivered; `retry` after `wait_ms`; `reject` never again; `exhausted` never again, because all retries were
    #: made; `pause` give it back and send nothing more.
    kind: Literal["ack", "retry", "reject", "exhausted", "pause"]
    error: str = ""
    wait_ms: int = 0


def judge(answer: Answer, *, attempt: int, retry_delays_ms: Sequence[int], reject_client_errors: bool) -> Verdict:
    """What to do after the attempt of this number, counted from 1."""
    status, error = answer.status, answer.error
    if answer.is_success:
        return Verdict("ack")
    if status == HTTPStatus.GONE:
        return Verdict("pause", error)
    if 400 <= status < 500 and status not in _TEMPORARY and reject_client_errors:
        return Verdict("reject", error)
    if attempt > len(retry_delays_ms):
        return Verdict("exhausted", error)
    return Verdict("retry", error, max(retry_delays_ms[attempt - 1], answer.wait_ms))


def retry_after_ms(text: str, now_ms: int) -> int:
    """The header Retry-After, seconds or a date, as a length of time; 0 when it says nothing that can be understood."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        wait_ms = int(text[:10]) * 1000
    else:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return 0
        wait_ms = int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000) - now_ms
    return min(max(wait_ms, 0), RETRY_AFTER_MS_MAX)

"""What an answer means for the message."""

from __future__ import annotations

import pytest

from millstream.webhooks.verdicts import Answer, judge, retry_after_ms


def kind(status: int, *, attempt: int = 1, reject: bool = True) -> str:
    verdict = judge(Answer(status), attempt=attempt, retry_delays_ms=[10, 20], reject_client_errors=reject)
    return verdict.kind


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        *((status, "ack") for status in (200, 201, 202, 204, 299)),
        *((status, "retry") for status in (0, 408, 429, 500, 502, 503, 504, 599, 301, 302, 307, 999)),
        *((status, "reject") for status in (400, 401, 403, 404, 405, 413, 422, 451)),
        (410, "pause"),
    ],
)
def test_an_answer_has_one_meaning(status: int, meaning: str) -> None:
    assert kind(status) == meaning


def test_client_errors_are_retried_if_the_webhook_says_so() -> None:
    assert kind(404, reject=False) == "retry"
    assert kind(404, reject=False, attempt=3) == "exhausted"
    assert kind(410, reject=False) == "pause"


def test_after_the_last_delay_the_message_is_given_up() -> None:
    assert [kind(500, attempt=attempt) for attempt in (1, 2, 3)] == ["retry", "retry", "exhausted"]
    assert judge(Answer(500, "x"), attempt=1, retry_delays_ms=[], reject_client_errors=True).kind == "exhausted"


def test_the_longer_of_the_delay_and_retry_after_counts() -> None:
    def wait_ms(answer: Answer) -> int:
        return judge(answer, attempt=1, retry_delays_ms=[1000], reject_client_errors=True).wait_ms

    assert wait_ms(Answer(429, wait_ms=5000)) == 5000
    assert wait_ms(Answer(503, wait_ms=5)) == 1000


@pytest.mark.parametrize(
    ("text", "wait_ms"),
    [
        ("120", 120_000),
        (" 1 ", 1000),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90_000),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0),
        ("99999999999999999999", 3_600_000),
        *((text, 0) for text in ("", "soon", "-5", "1.5", "²", "Thu, 99 Jan 1970 00:00:00 GMT")),
        *((text, 0) for text in (f"Thu, {'9' * 30} Jan 1970 00:00:00 GMT", f"Thu, 01 Jan 1970 00:00:00 +{'9' * 30}")),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, wait_ms: int) -> None:
    assert retry_after_ms(text, now_ms=10_000) == wait_ms


def test_an_error_is_one_short_line() -> None:
    assert Answer(503, "data\nbase \x1b[31mdown").error == "503 Service Unavailable: data base [31mdown"
    assert len(Answer(500, "x" * 10_000).error) < 250
    assert len(Answer(0, "it does not speak HTTP: " + "x" * 100_000).error) <= 500
    assert Answer(799).error == "799"
    assert "redirects are not followed" in Answer(302).error

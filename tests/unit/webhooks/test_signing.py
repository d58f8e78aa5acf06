"""Signatures, and secrets that are replaced."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from millstream.errors import InvalidArgument
from millstream.webhooks.registration import Secret, Webhook, check_secret, check_webhook, rotated, valid_secrets
from millstream.webhooks.signing import signature

HOUR_MS = 3_600_000


def webhook(**changes: object) -> Webhook:
    made = Webhook(
        id="wh-1", namespace="default", topic="t", group="g", url="http://h/", created_ms=0, secrets=[Secret("a" * 16)]
    )
    return msgspec.structs.replace(made, **changes)


def test_a_signature_covers_the_time_and_the_body() -> None:
    expected = hmac.new(b"secret", b"1767225600.body", hashlib.sha256).hexdigest()
    assert signature(["secret"], 1_767_225_600, b"body") == f"t=1767225600,v1={expected}"


def test_while_a_secret_is_replaced_both_sign() -> None:
    both = signature(["new", "old"], 1, b"body").split(",")
    assert both == ["t=1", signature(["new"], 1, b"body")[4:], signature(["old"], 1, b"body")[4:]]


def test_an_old_secret_signs_until_its_time_is_over() -> None:
    changed = rotated(webhook(), "b" * 16, keep_ms=HOUR_MS, now_ms=1000)
    assert [secret.text[0] for secret in valid_secrets(changed, 1000 + HOUR_MS - 1)] == ["b", "a"]
    assert [secret.text[0] for secret in valid_secrets(changed, 1000 + HOUR_MS)] == ["b"]


def test_a_second_rotation_does_not_prolong_the_first_and_can_end_it() -> None:
    once = rotated(webhook(), "b" * 16, keep_ms=HOUR_MS, now_ms=0)
    twice = rotated(once, "c" * 16, keep_ms=2 * HOUR_MS, now_ms=0)
    assert [secret.until_ms for secret in twice.secrets] == [0, 2 * HOUR_MS, HOUR_MS]
    assert len(rotated(twice, "d" * 16, keep_ms=2 * HOUR_MS, now_ms=0).secrets) == 3
    assert [secret.text[0] for secret in rotated(twice, "e" * 16, keep_ms=0, now_ms=0).secrets] == ["e"]


@pytest.mark.parametrize("text", ["", "short", "x" * 257, "with a space in it", "späte Nachrichten!", "a\nb" * 9])
def test_a_weak_or_unprintable_secret_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(InvalidArgument, match="16 to 256 printable") as refused:
        check_secret(text)
    assert not text or text not in str(refused.value)


def test_no_representation_of_a_webhook_has_its_secrets() -> None:
    text = repr(webhook(headers={"Authorization": "Bearer token"}, url="http://h/?token"))
    assert text == "Webhook('wh-1')"
    assert repr(Secret("a" * 16)) == "Secret(...)"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"concurrency": 0}, "concurrency must be between 1 and 100, not 0"),
        ({"concurrency": 101}, "concurrency must be"),
        ({"rate": -1}, "rate must be 0"),
        ({"rate": float("nan")}, "rate must be 0"),
        ({"timeout_ms": 99}, "timeout_ms must be between"),
        ({"retry_delays_ms": [1] * 21}, "20 entries at most"),
        ({"retry_delays_ms": [-1]}, "an entry of retry_delays_ms"),
        ({"headers": {"Host": "x"}}, "set by the broker itself"),
        ({"headers": {"Upgrade": "websocket"}}, "set by the broker itself"),
        ({"headers": {"millstream-signature": "x"}}, "set by the broker itself"),
        ({"headers": {"X Y": "x"}}, "cannot be the name"),
        ({"headers": {"X": "a\r\nY: b"}}, "printable ASCII"),
        ({"headers": {"X": " padded "}}, "printable ASCII"),
        ({"headers": {f"X-{n}": "" for n in range(51)}}, "50 headers at most"),
    ],
)
def test_settings_that_are_not_allowed_are_named(changes: dict[str, object], complaint: str) -> None:
    check_webhook(webhook())
    with pytest.raises(InvalidArgument, match=complaint):
        check_webhook(webhook(**changes))

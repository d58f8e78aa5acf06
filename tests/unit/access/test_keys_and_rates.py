"""Keys as text and as they are kept; token buckets; quotas."""

from __future__ import annotations

import random

import msgspec
import pytest

from millstream.access.keys import Key, Secret, draw_id, draw_secret, key_text, parse_key
from millstream.access.quotas import Meter, Quota
from millstream.access.rates import Bucket, Buckets
from millstream.errors import InvalidArgument, InvalidName, QuotaExceeded, Throttled


def a_key(**changes: object) -> Key:
    fields: dict[str, object] = {
        "id": "0123456789ab", "name": "", "roles": ["read"], "scopes": [], "created_ms": 0, "secrets": [],
    }  # fmt: skip
    return Key(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_key_can_be_taken_apart_again() -> None:
    draw = random.Random(1).getrandbits
    key_id, secret = draw_id(draw), draw_secret(draw)
    text = key_text(key_id, secret)
    assert text.startswith("ms_")
    assert parse_key(text) == (key_id, secret)


@pytest.mark.parametrize("text", ["", "ms_", "ms_0123456789ab_", "ms_0123456789ab_" + "g" * 64, "x" * 10_000])
def test_what_is_not_a_key_is_none(text: str) -> None:
    assert parse_key(text) is None


def test_only_the_hash_of_a_secret_is_kept() -> None:
    secret = draw_secret(random.Random(2).getrandbits)
    kept = Secret.of(secret)
    assert secret not in repr(kept)
    assert secret.encode() not in msgspec.json.encode(kept)
    assert kept.matches(secret)
    assert not kept.matches(secret[:-1] + "z")


def test_a_secret_ends_with_its_grace_period_and_all_of_them_with_the_key() -> None:
    old, new = Secret(sha256="o", until_ms=100), Secret(sha256="n")
    key = a_key(secrets=[new, old], expires_ms=200)
    assert list(key.valid_secrets(50)) == [new, old]
    assert list(key.valid_secrets(100)) == [new]
    assert list(key.valid_secrets(200)) == []


@pytest.mark.parametrize(
    "wrong",
    [{"roles": []}, {"roles": ["boss"]}, {"scopes": ["a..b"]}, {"scopes": ["x"] * 101}, {"name": "n" * 201}],
)
def test_a_key_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        a_key(**wrong)


def test_a_bucket_lets_a_burst_in_and_then_the_rate() -> None:
    bucket = Bucket(10, 5, 0)
    for _ in range(5):
        assert bucket.wait_ms(0) == 0
        bucket.take(1)
    assert 0 < bucket.wait_ms(0) <= 100
    assert bucket.wait_ms(200) == 0


def test_an_overdrawn_bucket_is_shut_until_it_is_filled_again() -> None:
    bucket = Bucket(100, 100, 0)
    bucket.take(1000)
    assert bucket.wait_ms(0) == 9010
    assert bucket.wait_ms(9000) == 10
    assert bucket.wait_ms(9010) == 0


def test_a_clock_that_goes_back_opens_no_bucket() -> None:
    bucket = Bucket(1, 1, 10_000)
    bucket.take(1)
    assert bucket.wait_ms(5_000) > 0
    assert bucket.wait_ms(10_500) > 0
    assert bucket.wait_ms(11_000) == 0


def test_addresses_are_remembered_up_to_a_number() -> None:
    buckets = Buckets(1, 1, remembered_max=100)
    for number in range(1_000):
        assert buckets.admit(number, 0) == 0
    assert len(buckets) == 100
    assert buckets.admit(999, 0) > 0


def test_a_rate_of_zero_is_no_limit() -> None:
    buckets = Buckets(0, 0)
    assert not buckets.is_on
    assert all(buckets.admit("x", 0) == 0 for _ in range(1000))


def test_a_quota_counts_messages_and_bytes_by_the_batch() -> None:
    meter = Meter("team", Quota(publish_messages_per_s=100), 0)
    meter.publish(1000, 1, 0)  # one batch may be larger than a second's worth
    with pytest.raises(Throttled, match="more messages a second"):
        meter.publish(1, 1, 5000)
    meter.publish(1, 1, 10_010)
    meter = Meter("team", Quota(publish_bytes_per_s=100), 0)
    meter.publish(1, 101, 0)
    with pytest.raises(Throttled, match="more bytes a second"):
        meter.publish(1, 1, 0)
    assert meter.refused == 1


def test_a_full_namespace_takes_nothing_more() -> None:
    meter = Meter("team", Quota(storage_bytes=100), 0)
    meter.publish(1, 60, 0)
    with pytest.raises(QuotaExceeded, match="storage_bytes"):
        meter.publish(1, 60, 0)
    meter.publish(1, 40, 0)


def test_a_quota_is_not_negative() -> None:
    with pytest.raises(InvalidArgument, match="topics must be 0"):
        Quota(topics=-1)

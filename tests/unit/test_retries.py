from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.durations import DURATION_MS_MAX
from millstream.errors import ConfigInvalid
from millstream.retries import PROFILES, RetryPolicy, parse_retry, within_limits


def waits(profile: str, count: int) -> list[float]:
    return [PROFILES[profile].delay_ms(failures, lambda: 0.5) / 1000 for failures in range(1, count + 1)]


def test_the_profiles_wait_as_documented() -> None:
    assert waits("standard", 8) == [1, 2, 4, 8, 16, 32, 60, 60]
    assert waits("durable", 8) == [5, 10, 20, 40, 80, 160, 300, 300]
    assert waits("eager", 5) == [0, 1, 4, 16, 64]
    assert waits("simple", 3) == [0, 0, 0]


@given(st.integers(1, 50), st.floats(0, 1))
def test_jitter_only_shortens_a_wait_and_never_by_more_than_its_share(failures: int, drawn: float) -> None:
    plain = PROFILES["standard"].delay_ms(failures, lambda: drawn)
    jittered = parse_retry("standard,jitter=0.2").delay_ms(failures, lambda: drawn)
    assert plain * 0.8 - 1 <= jittered <= plain


@given(
    st.builds(
        RetryPolicy,
        max_retries=st.integers(0, 10_000),
        initial_ms=st.integers(0, 10**9),
        multiplier=st.integers(1, 100).map(float),
        max_ms=st.integers(0, 10**9),
        total_ms=st.integers(0, 10**10),
        first_immediate=st.booleans(),
        jitter=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    )
)
def test_the_text_of_a_policy_reads_back(policy: RetryPolicy) -> None:
    assert parse_retry(str(policy)) == policy


def test_a_profile_can_be_changed_in_its_text() -> None:
    policy = parse_retry("durable, max_retries=2, initial=250ms")
    assert (policy.max_retries, policy.initial_ms, policy.max_ms) == (2, 250, 300_000)
    assert parse_retry("max_retries=1") == RetryPolicy(max_retries=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("standart", "did you mean 'standard'"),
        ("", "profiles: standard"),
        ("standard,tries=3", "'tries' is unknown"),
        ("standard,initial=soon", "'initial=soon' does not fit"),
        ("standard,max_retries=-1", "max_retries must be between"),
        ("standard,multiplier=0.5", "multiplier must be between 1 and 1000, not 0.5"),
        ("standard,multiplier=nan", "multiplier must be between 1 and 1000, not nan"),
        ("standard,multiplier=inf", "multiplier must be between 1 and 1000, not inf"),
        ("standard,jitter=nan", "jitter must be between 0 and 1, not nan"),
        ("standard,initial=99999999999999999999d", "initial must be between 0 and 36500 days"),
        ("standard,max=36501d", "max must be between 0 and 36500 days"),
        ("standard,total=36501d", "total must be between 0 and 36500 days"),
        ("standard,first_immediate=maybe", "a bool is expected"),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        parse_retry(text)


@pytest.mark.parametrize(
    ("stored", "holds"),
    [
        ("durable,max_retries=5", "durable,max_retries=5"),
        ("standard,initial=99999999999999999999d,max=2m", "standard,initial=36500d,max=2m"),
        ("standard,multiplier=nan", "standard,multiplier=1"),
        ("standard,multiplier=inf,total=36501d", "standard,multiplier=1000,total=36500d"),
    ],
)
def test_what_an_earlier_version_stored_is_read_as_near_as_the_limits_allow(stored: str, holds: str) -> None:
    assert parse_retry(within_limits(stored)) == parse_retry(holds)


@given(
    st.builds(
        RetryPolicy,
        max_retries=st.integers(0, 10_000),
        initial_ms=st.integers(0, DURATION_MS_MAX),
        multiplier=st.floats(1, 1000),
        max_ms=st.integers(0, DURATION_MS_MAX),
        first_immediate=st.booleans(),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 10_001),
    st.floats(0, 1),
)
def test_every_wait_that_can_be_asked_for_has_an_end(policy: RetryPolicy, failures: int, drawn: float) -> None:
    assert 0 <= policy.delay_ms(failures, lambda: drawn) <= DURATION_MS_MAX

"""Whatever comes in from outside, the small parsers of the doors read it or refuse it: they never fail otherwise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.access.keys import key_text, parse_key
from millstream.errors import MillstreamError
from millstream.traceparent import check_trace_id, parse_traceparent
from millstream.values import from_json, to_json
from millstream.webhooks.targets import is_public, parse_target
from millstream.webhooks.verdicts import retry_after_ms

near_traceparents = st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", fullmatch=True)
near_urls = st.from_regex(r"https?://[^\s/]{0,40}(:[0-9]{0,7})?(/.*)?")


@given(st.binary(max_size=200) | near_traceparents)
def test_a_traceparent_is_read_or_ignored(content: bytes) -> None:
    context = parse_traceparent(content)
    assert context is None or len(context) >= 2


@given(st.text(max_size=100))
def test_a_trace_id_is_read_or_refused(text: str) -> None:
    try:
        assert len(check_trace_id(text)) == 32
    except MillstreamError as problem:
        assert str(problem)


@given(st.text(max_size=200))
def test_a_key_is_read_or_is_none(text: str) -> None:
    found = parse_key(text)
    assert found is None or key_text(*found) == text


@given(st.text(max_size=200) | near_urls)
def test_the_url_of_a_webhook_is_read_or_refused(url: str) -> None:
    try:
        target = parse_target(url)
    except MillstreamError as problem:
        assert str(problem)
    else:
        assert 1 <= target.port <= 65_535


@given(st.ip_addresses())
def test_every_address_is_public_or_not(address: object) -> None:
    assert is_public(str(address)) in (True, False)


@given(st.text(max_size=100), st.integers(0, 2**41))
def test_a_retry_after_is_never_in_the_past(text: str, now_ms: int) -> None:
    assert retry_after_ms(text, now_ms) >= 0


@given(st.binary(max_size=300), st.sampled_from(["auto", "text", "json", "base64"]))
def test_every_value_can_be_shown_and_base64_brings_it_back(data: bytes, encoding: str) -> None:
    shown, used = to_json(data, encoding)  # type: ignore[arg-type]
    if used in ("text", "base64"):
        assert from_json(shown, used) == data

"""Nobody exposes a broker to a network by accident."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.config import Settings
from millstream.errors import StartFailed
from millstream.server.exposure import check_exposure, check_keys


def settings(host: str = "127.0.0.1", **access: Any) -> Settings:
    certificate = access.pop("certificate", "")
    return Settings.model_validate({"server": {"host": host}, "access": access, "tls": {"certificate": certificate}})


@pytest.mark.parametrize(
    ("host", "access", "needs_keys"),
    [
        ("127.0.0.1", {}, False),
        ("127.1.2.3", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("10.0.0.5", {}, True),
        ("broker.example", {}, True),
        ("0.0.0.0", {"insecure": True}, False),
        ("0.0.0.0", {"insecure": True, "mode": "keys"}, True),
        ("127.0.0.1", {"mode": "keys"}, True),
    ],
)
def test_keys_are_asked_for_as_soon_as_others_can_connect(host: str, access: dict[str, Any], needs_keys: bool) -> None:
    assert settings(host, **access).needs_keys is needs_keys
    assert settings(host, **access).keeps_audit is needs_keys


@pytest.mark.parametrize(
    ("host", "access"),
    [
        ("127.0.0.1", {"mode": "off"}),
        ("0.0.0.0", {"certificate": "broker.pem"}),
        ("0.0.0.0", {"insecure": True}),
        ("0.0.0.0", {"insecure": True, "mode": "off"}),
    ],
)
def test_a_broker_that_is_safe_or_told_not_to_be_may_start(host: str, access: dict[str, Any]) -> None:
    check_exposure(settings(host, **access))


@pytest.mark.parametrize(
    ("access", "sentence"),
    [
        ({}, "there is no TLS"),
        ({"mode": "keys"}, "there is no TLS"),
        ({"mode": "off", "certificate": "broker.pem"}, "access.mode is off"),
    ],
)
def test_a_public_broker_without_keys_or_tls_says_what_to_do(access: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartFailed, match=sentence) as refusal:
        check_exposure(settings("0.0.0.0", **access))
    assert "--insecure" in str(refusal.value)


def test_a_broker_that_asks_for_keys_has_one() -> None:
    check_keys(settings(), has_keys=False)
    check_keys(settings(mode="keys"), has_keys=True)
    with pytest.raises(StartFailed, match="millstream key create --role admin --data"):
        check_keys(settings(mode="keys"), has_keys=False)

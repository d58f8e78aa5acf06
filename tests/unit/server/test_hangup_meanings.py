"""What SIGHUP means to a broker: reload, unless it takes the terminal away that the broker lives in."""

from __future__ import annotations

import signal

import pytest

from millstream.config import TlsSettings
from millstream.server import hangup
from millstream.server.tls import ServerTls


@pytest.mark.parametrize(
    ("before", "after", "ignored", "stops"),
    [
        (False, False, False, False),  # a service
        (True, True, False, False),  # `kill -HUP` by hand
        (True, False, False, True),  # the window was closed
        (True, False, True, False),  # the same, of a broker that was started with `nohup`
    ],
)
def test_a_broker_stops_only_with_its_terminal(
    monkeypatch: pytest.MonkeyPatch, before: bool, after: bool, ignored: bool, stops: bool
) -> None:
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    monkeypatch.setattr(signal, "getsignal", lambda _number: handler)
    monkeypatch.setattr(hangup.os, "isatty", lambda _number: False)
    monkeypatch.setattr(hangup, "_has_terminal", lambda: before)
    stopped: list[bool] = []
    on_hangup = hangup.Hangup(ServerTls(TlsSettings()), lambda: stopped.append(True))
    monkeypatch.setattr(hangup, "_has_terminal", lambda: after)
    on_hangup()
    assert bool(stopped) is stops

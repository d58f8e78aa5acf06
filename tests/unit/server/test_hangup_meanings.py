"""What SIGHUP means to a broker: reload, unless it takes the terminal away that the broker lives in."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from millstream.config import TlsSettings
from millstream.server import hangup
from millstream.server.tls import ServerTls


@pytest.mark.parametrize(
    ("before", "after", "later", "ignored", "stops"),
    [
        (False, False, False, False, False),  # a service
        (True, True, True, False, False),  # `kill -HUP` by hand
        (True, False, False, False, True),  # the window was closed
        (True, True, False, False, True),  # the shell has said goodbye, and was gone a moment later
        (True, False, False, True, False),  # the same, of a broker that was started with `nohup`
        (True, True, False, True, False),
    ],
)
def test_a_broker_stops_only_with_its_terminal(
    monkeypatch: pytest.MonkeyPatch, before: bool, after: bool, later: bool, ignored: bool, stops: bool
) -> None:
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    monkeypatch.setattr(signal, "getsignal", lambda _number: handler)
    monkeypatch.setattr(hangup.os, "isatty", lambda _number: False)
    monkeypatch.setattr(hangup, "_has_terminal", lambda: before)
    stopped: list[bool] = []
    looks: list[Callable[[], object]] = []
    on_hangup = hangup.Hangup(
        ServerTls(TlsSettings()), lambda: stopped.append(True), lambda _seconds, look: looks.append(look)
    )
    monkeypatch.setattr(hangup, "_has_terminal", lambda: after)
    on_hangup()
    monkeypatch.setattr(hangup, "_has_terminal", lambda: later)
    for look in looks:
        look()
    assert bool(stopped) is stops

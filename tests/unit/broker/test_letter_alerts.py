"""Alerts: tried a few times, counted, and never in anybody's way."""

from __future__ import annotations

import queue
import threading
import urllib.error
from typing import Any

import pytest

from millstream.broker.letters.alerts import Alert, LetterAlerts

ALERT = Alert("http://localhost/dead", {"queue": "orders"})


class Web:
    """Stands for the web: fails as often as it is told to."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked = 0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, request: Any, timeout: float) -> Web:
        self.open.wait(10)
        self.asked += 1
        if self.asked <= self.failures:
            raise urllib.error.URLError("nobody there")
        return self

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def alerts(web: Web, monkeypatch: pytest.MonkeyPatch) -> tuple[LetterAlerts, queue.Queue[bool]]:
    monkeypatch.setattr("urllib.request.urlopen", web)
    told: queue.Queue[bool] = queue.Queue()
    return LetterAlerts(told.put, pauses_s=(0.0, 0.0, 0.0)), told


@pytest.mark.parametrize(("failures", "delivered", "asked"), [(0, True, 1), (3, True, 4), (4, False, 4)])
def test_an_alert_is_tried_four_times(
    failures: int, delivered: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = Web(failures)
    sending, told = alerts(web, monkeypatch)
    sending.send(ALERT)
    assert told.get(timeout=10) is delivered
    assert web.asked == asked
    sending.close()


def test_a_slow_webhook_holds_up_nobody_and_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web(0)
    web.open.clear()
    sending, told = alerts(web, monkeypatch)
    for _ in range(1_100):
        sending.send(ALERT)
    dropped = told.qsize()
    assert 90 <= dropped <= 100
    web.open.set()
    results = [told.get(timeout=10) for _ in range(1_100)]
    assert results.count(True) == 1_100 - dropped
    sending.close()

"""Alerts: tried a few times, counted, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.letters.alerts import Alert, LetterAlerts
from millstream.broker.webhooks.sender import TargetForbidden
from millstream.webhooks.targets import Target
from millstream.webhooks.verdicts import Answer
from tests.waiting import eventually_async

ALERT = Alert("http://localhost/dead?token=x", {"queue": "orders"})


class Web:
    """Stands for the web: fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()
        self.forbidden = False

    async def post(self, target: Target, *_: Any, **__: Any) -> Answer:
        if target.host != "quick":
            await self.open.wait()
        self.asked += 1
        if self.forbidden:
            raise TargetForbidden("localhost has a private address")
        return Answer(0, "nobody there") if self.asked <= self.failures else Answer(200)


def run(work: Callable[[Web, LetterAlerts, list[bool]], Awaitable[None]], failures: int = 0) -> None:
    async def body() -> None:
        web = Web(failures)
        told: list[bool] = []
        alerts = LetterAlerts(
            web,  # type: ignore[arg-type]
            asyncio.get_running_loop(),
            told.append,
            pauses_s=(0.0, 0.0, 0.0),
        )
        await work(web, alerts, told)
        await alerts.close()

    asyncio.run(asyncio.wait_for(body(), 10))


@pytest.mark.parametrize(("failures", "delivered", "asked"), [(0, True, 1), (3, True, 4), (4, False, 4)])
def test_an_alert_is_tried_four_times(failures: int, delivered: bool, asked: int) -> None:
    async def work(web: Web, alerts: LetterAlerts, told: list[bool]) -> None:
        alerts.send(ALERT)
        await eventually_async(lambda: told)
        assert (told, web.asked) == ([delivered], asked)

    run(work, failures)


def test_a_slow_receiver_holds_up_nobody_and_what_is_too_much_is_counted() -> None:
    async def work(web: Web, alerts: LetterAlerts, told: list[bool]) -> None:
        web.open.clear()
        for _ in range(1_100):
            alerts.send(ALERT)
        assert told == [False] * 100
        web.open.set()
        await eventually_async(lambda: len(told) == 1_100)
        assert told.count(True) == 1_000

    run(work)


def test_a_receiver_that_does_not_answer_holds_up_no_other() -> None:
    async def work(web: Web, alerts: LetterAlerts, told: list[bool]) -> None:
        web.open.clear()
        for _ in range(1500):
            alerts.send(ALERT)
        refused = len(told)
        for _ in range(3):
            alerts.send(Alert("http://quick/dead", {"queue": "orders"}))
        await eventually_async(lambda: told[refused:] == [True] * 3)
        alerts.send(Alert("http://quick/dead", {"queue": "orders"}))
        await eventually_async(lambda: told[refused:] == [True] * 4)

    run(work)


def test_a_forbidden_or_impossible_target_is_not_tried_again() -> None:
    async def work(web: Web, alerts: LetterAlerts, told: list[bool]) -> None:
        web.forbidden = True
        alerts.send(ALERT)
        alerts.send(Alert("http://", {}))
        await eventually_async(lambda: len(told) == 2)
        assert (told, web.asked) == ([False, False], 1)

    run(work)


def test_nothing_is_sent_after_the_end() -> None:
    async def work(web: Web, alerts: LetterAlerts, told: list[bool]) -> None:
        web.open.clear()
        alerts.send(ALERT)
        await asyncio.sleep(0)
        await alerts.close()
        alerts.send(ALERT)
        assert (told, web.asked) == ([False], 0)

    run(work)

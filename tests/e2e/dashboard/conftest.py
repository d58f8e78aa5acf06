"""A real Chromium that looks at a real broker.  Without a Chromium, or without Playwright, these tests are skipped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.testing.broker import BrokerForTests
from tests.e2e.dashboard.screen import Screen
from tests.e2e.dashboard.world import connect_things, fill
from tests.e2e.mqtt.support import Borrowed, Wires

#: Nothing is downloaded, nothing is reported, nothing is drawn on a graphics card.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("MILLSTREAM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


#: What is shared by all tests of this directory: see tests/scheduling.py.
_open = ExitStack()
_launched: list[Any] = []


@pytest.fixture(scope="module")
def browser() -> Any:
    """Started by the first who asks; it ends with the last test of this directory."""
    program = chromium()
    if program is None:
        missing = "there is no Chromium: install one (`apt install chromium`), or name it in MILLSTREAM_CHROMIUM"
        (pytest.fail if os.environ.get("MILLSTREAM_NEEDS_CHROMIUM") else pytest.skip)(missing)
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: `make test` does that")
    if not _launched:
        running = _open.enter_context(playwright.sync_playwright())
        _launched.append(running.chromium.launch(executable_path=program, args=list(FLAGS)))
        _open.callback(_launched.pop)
        _open.callback(_launched[0].close)
    return _launched[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Not at the end of the session: Playwright keeps a loop running in this thread; other tests call `asyncio.run`."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _open.close()


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """Shared by the tests of a module: a new one loads everything anew, which takes longer than most of them."""
    context = browser.new_context(viewport={"width": 1360, "height": 860}, reduced_motion="reduce", locale="en-GB")
    context.set_default_timeout(8000)
    yield context
    context.close()


@pytest.fixture(scope="session")
def artefacts() -> Path | None:
    """Where screenshots are kept, if somebody wants to look at them."""
    given = os.environ.get("MILLSTREAM_ARTIFACTS")
    if not given:
        return None
    folder = Path(given) / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True, mqtt=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=10) as client:
        yield client


@pytest.fixture(scope="module")
def mqtt(broker: BrokerForTests) -> Iterator[Wires]:
    wires = Wires(Borrowed(broker))
    yield wires
    wires.close()


@pytest.fixture(scope="module")
def shop(broker: BrokerForTests, http: httpx.Client, mqtt: Wires) -> dict[str, str]:
    """A broker in which something of everything has happened; ids of some of it."""
    connect_things(mqtt)
    return fill(http, broker.connect(client_id="auditor"))


@pytest.fixture
def screen(
    window: Any, broker: BrokerForTests, artefacts: Path | None, request: pytest.FixtureRequest
) -> Iterator[Screen]:
    """A tab with the dashboard; a picture of how the test ended is kept, and nothing may have gone wrong unseen."""
    page = window.new_page()
    shown = Screen(page, broker.url, artefacts)
    yield shown
    shown.picture(re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()))
    page.evaluate("localStorage.clear()")  # the next one has chosen nothing yet
    page.close()
    assert not shown.troubles(), shown.troubles()

"""The page that the guide to WebSockets shows, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client import Client
from millstream.config import Settings
from millstream.testing.broker import BrokerForTests

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "websocket.md"


def example(broker: BrokerForTests) -> str:
    [html] = re.findall(r"```html\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert "localhost:8080" in html
    return "<!doctype html>" + str(html).replace("localhost:8080", broker.url.partition("//")[2])


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(8000)
    yield context.new_page()
    context.close()


def packs(page: Any, client: Client) -> None:
    """Whoever has the example open sees messages come, and settles them with a click."""
    client.publish("orders", json={"total": 25})
    page.get_by_text('{"total":25}').click()
    page.locator("#list:empty").wait_for(state="attached")
    client.publish("orders", json={"total": 7})
    page.get_by_text('{"total":7}').wait_for()
    page.wait_for_function("socket.bufferedAmount === 0")
    page.close()  # gives back what was not settled, at once
    [left] = client.queue("orders", group="packers").lease(max=10, wait="10s")
    assert left.json() == {"total": 7}


def test_the_example_works_on_a_page_of_the_broker_s_own_address(page: Any) -> None:
    with BrokerForTests(http=True) as broker:
        client = broker.connect()
        client.create_topic("orders")
        page.goto(f"{broker.url}/health/live")  # as behind a proxy that serves both under one address
        page.set_content(example(broker))
        packs(page, client)


def test_the_example_works_as_a_file_where_the_broker_does_not_mind(page: Any, tmp_path: Path) -> None:
    settings = {"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}, "access": {"insecure": True}}
    with BrokerForTests(settings=Settings.model_validate(settings), http=True) as broker:
        client = broker.connect()
        client.create_topic("orders")
        file = tmp_path / "orders.html"
        file.write_text(example(broker))
        page.goto(file.as_uri())
        packs(page, client)

"""A broker per module that speaks MQTT, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.mqtt.support import Server, Wires, running_server, unique


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


@pytest.fixture
def mqtt(server: Server) -> Iterator[Wires]:
    wires = Wires(server)
    yield wires
    wires.close()


@pytest.fixture
def topic() -> str:
    """A topic of this test's own, with two levels."""
    return f"conformance/{unique('t')}"

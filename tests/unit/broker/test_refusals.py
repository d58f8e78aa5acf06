"""A broker that refuses keeps nothing of those whom it has refused, however long that goes on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest

from millstream.broker.broker import Broker
from millstream.errors import ReadOnly
from millstream.testing.broker import BrokerForTests


class _Connection:
    """Somebody who asks, and is on the stack while he does."""


def _refused(ask: Callable[[], object]) -> weakref.ref[_Connection]:
    connection = _Connection()
    with suppress(ReadOnly):
        ask()
        raise AssertionError("it was not refused")
    return weakref.ref(connection)


@pytest.mark.parametrize("what", ["publish", "serve"])
def test_while_publishing_is_refused_no_memory_is_kept_of_who_was_refused(broker: BrokerForTests, what: str) -> None:
    """Found by the soak: on a full disk each refused publish stayed in memory with its whole stack."""
    with broker.connect() as client:
        client.set_mode("maintenance", "the disk is full")

    async def ask_often() -> int:
        of: Broker = broker.broker
        asks = {"publish": lambda: of.check_publish(None, "orders"), "serve": of.check_serving}  # type: ignore[arg-type]
        refused = [_refused(asks[what]) for _ in range(20)]
        await asyncio.sleep(0)
        gc.collect()
        return sum(connection() is not None for connection in refused)

    assert broker.run(ask_often()) == 0

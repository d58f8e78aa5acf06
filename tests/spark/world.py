"""What tests of the data source read from."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from millstream.client import Client
from millstream.testing.broker import BrokerForTests


class World:
    """A broker with its files, a client, and topics that no other test uses."""

    def __init__(self, broker: BrokerForTests, data: Path) -> None:
        self.broker = broker
        self.data = data
        self.client: Client = broker.connect()
        self._numbers = count(1)

    def topic(self, partitions: int = 1, **config: Any) -> str:
        name = f"topic{next(self._numbers)}"
        self.client.create_topic(name, partitions, config=config)
        return name

    def publish(self, topic: str, messages: Iterable[Any]) -> None:
        self.client.publish_many(topic, messages)

    def options(self, topic: str | None = None, **more: Any) -> dict[str, str]:
        """Of a read through the broker."""
        chosen = {} if topic is None else {"subscribe": topic}
        given = {name: str(value) for name, value in more.items()}
        return {"bootstrap.servers": self.broker.address, **chosen, **given}

    def in_files(self, topic: str, **more: Any) -> dict[str, str]:
        """Of the same read without the broker."""
        options = self.options(topic, path=self.data, **more)
        del options["bootstrap.servers"]
        return options

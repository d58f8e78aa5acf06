"""Dead letters to look at, and what tests look at them with."""

from __future__ import annotations

import millstream
from millstream.client import Client
from millstream.dead_letters import DeadLetter

__all__ = ["bury", "messages", "texts"]


def bury(
    client: Client,
    *values: str,
    topic: str = "orders",
    key: str | None = None,
    error: str = "db down",
    reason: str = "REJECTED",
    group: str = "billing",
    **headers: str,
) -> list[str]:
    """Publish messages and their dead letters, as the broker writes them; returns the ids of the letters."""
    ids = []
    for value in values:
        original = client.publish(topic, value, key=key)
        about = {
            "millstream-dead-reason": reason,
            "millstream-dead-error": error,
            "millstream-dead-group": group,
            "millstream-dead-topic": topic,
            "millstream-dead-partition": str(original.partition),
            "millstream-dead-offset": str(original.offset),
            "millstream-dead-id": original.id,
        }
        receipt = client.publish(f"{topic}.dlq", value, key=key, headers={**headers, **about})
        ids.append(receipt.id)
    return ids


def texts(letters: list[DeadLetter]) -> list[str]:
    return [letter.text for letter in letters]


def messages(client: Client, topic: str, count: int, start: int = 0) -> list[millstream.Message]:
    """The messages of a topic with one partition from an offset on; fails when there are more or fewer."""
    assert client.offsets(topic)[0] - start == count
    with client.stream(topic, partitions=[0], start=start, timeout_s=5) as stream:
        return [message for _, message in zip(range(count), stream, strict=False)]

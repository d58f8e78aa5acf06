"""The Python SDK: `millstream.connect` for threads, `millstream.aio.connect` for asyncio, the same words in both."""

from __future__ import annotations

from millstream.client.blocking.client import Client, connect
from millstream.client.blocking.producer import Producer
from millstream.client.blocking.stream import Stream
from millstream.client.messages import (
    BatchFailure,
    Message,
    Outgoing,
    ProducerStats,
    Receipt,
    TopicPartition,
)

__all__ = [
    "BatchFailure",
    "Client",
    "Message",
    "Outgoing",
    "Producer",
    "ProducerStats",
    "Receipt",
    "Stream",
    "TopicPartition",
    "connect",
]

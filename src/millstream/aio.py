"""The asynchronous SDK: `async with millstream.aio.connect(...) as client`."""

from __future__ import annotations

from millstream.client.asynchronous.client import AsyncClient as Client
from millstream.client.asynchronous.client import connect
from millstream.client.asynchronous.producer import AsyncProducer as Producer
from millstream.client.asynchronous.stream import AsyncStream as Stream
from millstream.client.messages import BatchFailure, Message, Outgoing, ProducerStats, Receipt, TopicPartition

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

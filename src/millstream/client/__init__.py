"""The Python SDK: `millstream.connect` for threads, `millstream.aio.connect` for asyncio, the same words in both."""

from __future__ import annotations

from millstream.client.blocking.client import Client, connect
from millstream.client.blocking.producer import Producer
from millstream.client.blocking.queue import Queue
from millstream.client.blocking.stream import Stream
from millstream.client.blocking.subscription import Subscription
from millstream.client.blocking.worker import Worker
from millstream.client.leases import QueueMessage
from millstream.client.leasing import QueueStats, Settled
from millstream.client.messages import (
    BatchFailure,
    Message,
    Outgoing,
    ProducerStats,
    Receipt,
    TopicPartition,
)
from millstream.client.outcomes import Reject, Retry
from millstream.client.spans import trace_headers

__all__ = [
    "BatchFailure",
    "Client",
    "Message",
    "Outgoing",
    "Producer",
    "ProducerStats",
    "Queue",
    "QueueMessage",
    "QueueStats",
    "Receipt",
    "Reject",
    "Retry",
    "Settled",
    "Stream",
    "Subscription",
    "TopicPartition",
    "Worker",
    "connect",
    "trace_headers",
]

"""The asynchronous SDK: `async with millstream.aio.connect(...) as client`."""

from __future__ import annotations

from millstream.client.asynchronous.client import AsyncClient as Client
from millstream.client.asynchronous.client import connect
from millstream.client.asynchronous.producer import AsyncProducer as Producer
from millstream.client.asynchronous.queue import AsyncQueue as Queue
from millstream.client.asynchronous.stream import AsyncStream as Stream
from millstream.client.asynchronous.subscription import AsyncSubscription as Subscription
from millstream.client.asynchronous.worker import AsyncWorker as Worker
from millstream.client.leases import AsyncQueueMessage as QueueMessage
from millstream.client.leasing import QueueStats, Settled
from millstream.client.messages import BatchFailure, Message, Outgoing, ProducerStats, Receipt, TopicPartition
from millstream.client.outcomes import Reject, Retry

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
]

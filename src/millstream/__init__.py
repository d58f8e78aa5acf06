"""Millstream: one durable log, read in many ways.

    with millstream.connect("localhost:9092") as client:
        client.publish("orders", b"...", key=b"customer-17")

The names below load the SDK when they are first used, so that the broker and the command line, which live in the same
package, do not pay for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from millstream.version import VERSION

if TYPE_CHECKING:
    import millstream.aio as aio
    import millstream.errors as errors
    from millstream.client import BatchFailure as BatchFailure
    from millstream.client import Client as Client
    from millstream.client import Message as Message
    from millstream.client import Outgoing as Outgoing
    from millstream.client import Producer as Producer
    from millstream.client import ProducerStats as ProducerStats
    from millstream.client import Queue as Queue
    from millstream.client import QueueMessage as QueueMessage
    from millstream.client import QueueStats as QueueStats
    from millstream.client import Receipt as Receipt
    from millstream.client import Reject as Reject
    from millstream.client import Retry as Retry
    from millstream.client import Settled as Settled
    from millstream.client import Stream as Stream
    from millstream.client import Subscription as Subscription
    from millstream.client import TopicPartition as TopicPartition
    from millstream.client import Worker as Worker
    from millstream.client import connect as connect
    from millstream.client import trace_headers as trace_headers
    from millstream.errors import MillstreamError as MillstreamError

__version__ = VERSION

_MODULES = ("aio", "errors", "spark")

__all__ = [
    "BatchFailure",
    "Client",
    "Message",
    "MillstreamError",
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
    "__version__",
    "aio",
    "connect",
    "errors",
    "trace_headers",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"millstream.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    home = importlib.import_module("millstream.errors" if name == "MillstreamError" else "millstream.client")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return __all__

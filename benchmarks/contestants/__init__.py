"""Everyone who takes part, Millstream first."""

from __future__ import annotations

from typing import Final

from benchmarks.contestants.beanstalkd import Beanstalkd
from benchmarks.contestants.contract import Client, ConcurrentClient, Contestant, Level, QueueClient, Sink
from benchmarks.contestants.kafka import Kafka
from benchmarks.contestants.millstream import Millstream
from benchmarks.contestants.mosquitto import Mosquitto
from benchmarks.contestants.nats_jetstream import NatsJetStream
from benchmarks.contestants.rabbitmq import RabbitMq
from benchmarks.contestants.rabbitmq_stream import RabbitMqStream
from benchmarks.contestants.redis_streams import RedisStreams

__all__ = ["CONTESTANTS", "Client", "ConcurrentClient", "Contestant", "Level", "Millstream", "QueueClient", "Sink"]

CONTESTANTS: Final[tuple[Contestant, ...]] = (
    Millstream("group"),
    Millstream("group", visible="written"),
    Millstream("interval"),
    Kafka(),
    RedisStreams(),
    NatsJetStream(),
    RabbitMq("quorum"),
    RabbitMq("classic"),
    RabbitMqStream(),
    Mosquitto(),
    Beanstalkd(),
)

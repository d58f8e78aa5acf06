"""RabbitMQ, classic and quorum queues, through pika's asynchronous connection."""

from __future__ import annotations

import importlib.util
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

if TYPE_CHECKING:
    import pika

__all__ = ["RabbitMq", "rabbitmq_missing", "rabbitmq_version", "start_node"]

# The packaged wrapper in /usr/sbin changes user when root runs it; this one starts as whoever we are.
_START_SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_UNCONFIRMED_MAX = 2000
_UNACKED_MAX = 2000


@dataclass(frozen=True, slots=True)
class RabbitMq:
    kind: str  # "classic" or "quorum"
    client: str = "pika"  # of four clients the one that acknowledges fastest
    leases: bool = True

    @property
    def name(self) -> str:
        return f"RabbitMQ {self.kind}"

    def missing(self) -> str | None:
        return rabbitmq_missing() or (None if importlib.util.find_spec("pika") else "pip install pika")

    def version(self) -> str:
        return rabbitmq_version()

    def promise(self, _level: Level) -> str:
        # At both levels and without a setting: seen with `python -m benchmarks.durability`.
        return f"fsync before confirm ({'write-ahead log' if self.kind == 'quorum' else 'persistent messages'})"

    def start(self, directory: Path, _level: Level) -> Server:
        server = Server(free_port())
        start_node(server, directory, amqp_port=server.port)
        return server

    def declare(self, port: int, queue: str) -> None:
        import pika

        with pika.BlockingConnection(_parameters(port)) as connection:
            arguments = {"x-queue-type": self.kind}
            connection.channel().queue_declare(queue, durable=True, arguments=arguments)

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


def start_node(
    server: Server, directory: Path, *, amqp_port: int, plugins: Sequence[str] = (), settings: Sequence[str] = ()
) -> None:
    """Start RabbitMQ and its name server; returns when it accepts AMQP, which it does last."""
    names_port = free_port()
    environment = {
        "HOME": str(directory),  # where Erlang keeps its cookie
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"bench{server.port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(amqp_port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
    }
    (directory / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
    lines = ["vm_memory_high_watermark.relative = 0.6", *settings]
    (directory / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
    # Erlang's name server would otherwise be left behind as a daemon.
    launch(server, ["epmd"], directory / "epmd.log", port=names_port, environment=environment)
    launch(server, [_START_SCRIPT], directory / "rabbitmq.log", port=amqp_port, environment=environment)


def rabbitmq_missing() -> str | None:
    installed = _START_SCRIPT.exists() and shutil.which("epmd") is not None
    return None if installed else "apt-get install rabbitmq-server"


def rabbitmq_version() -> str:
    return output_of("dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server").partition("-")[0]


def _parameters(port: int) -> pika.ConnectionParameters:
    import pika

    return pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)


class _Client:
    """Blocking for one at a time; for the rest pika's event-driven connection, which alone can pipeline."""

    def __init__(self, port: int, queue: str) -> None:
        import pika

        self._port = port
        self._queue = queue
        self._persistent = pika.BasicProperties(delivery_mode=2)
        self._blocking: Any = None
        self._channel: Any = None
        self._confirmed = 0
        self._published = 0
        self._abreast = 0  # so many producers, each of which waits for its confirmations; 0 for as fast as it goes
        self._waiting: deque[bytes] = deque()
        self._schedule = Schedule((), 1)

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        self._open_producer()
        self._waiting.extend(bodies)
        self._fill()
        self._channel.connection.ioloop.start()

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        self._abreast = producers
        self.publish_many(bodies)

    def publish_paced(self, schedule: Schedule) -> None:
        self._open_producer()
        self._schedule = schedule
        self._publish_due()
        self._channel.connection.ioloop.start()

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        import pika

        if self._blocking is None:
            self._blocking = pika.BlockingConnection(_parameters(self._port)).channel()
            self._blocking.confirm_delivery()
        for body in bodies:
            self._blocking.basic_publish("", self._queue, body, self._persistent)

    def consume(self, sink: Sink) -> None:
        self._consume(sink, each=False)

    def work(self, sink: Sink) -> None:
        self._consume(sink, each=True)

    def _consume(self, sink: Sink, *, each: bool) -> None:
        waiting: list[bytes] = []
        channel = self._channel = _open_channel(self._port)

        def take(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            waiting.append(body)
            if each:
                channel.basic_ack(method.delivery_tag)
            if len(waiting) < sink.chunk:
                return
            if not each:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if not sink(waiting[:]):
                channel.connection.ioloop.stop()
            waiting.clear()

        channel.basic_qos(prefetch_count=_UNACKED_MAX)
        channel.basic_consume(self._queue, take)
        channel.connection.ioloop.start()

    def close(self) -> None:
        if self._blocking is not None:
            self._blocking.connection.close()
        if self._channel is not None:
            self._channel.connection.close()
            self._channel.connection.ioloop.start()  # until the close handshake is through

    def _open_producer(self) -> None:
        if self._channel is None:
            self._channel = _open_channel(self._port)
            self._channel.confirm_delivery(lambda frame: self._settle(frame.method))

    def _settle(self, method: Any) -> None:
        if method.NAME != "Basic.Ack":
            raise RuntimeError(f"RabbitMQ refused message {method.delivery_tag}")
        self._confirmed = method.delivery_tag if method.multiple else self._confirmed + 1
        unconfirmed = self._published - self._confirmed
        if self._waiting and (self._abreast or unconfirmed <= _UNCONFIRMED_MAX // 2):
            self._fill()
        elif unconfirmed == 0 and not self._waiting and not self._schedule:
            self._channel.connection.ioloop.stop()

    def _fill(self) -> None:
        room = (self._abreast or _UNCONFIRMED_MAX) - (self._published - self._confirmed)
        for _ in range(min(room, len(self._waiting))):
            self._send(self._waiting.popleft())

    def _publish_due(self) -> None:
        """Publish the next body if it is due, and come back for the one after it."""
        if self._schedule.wait_seconds() <= 0:
            self._send(self._schedule.take())
        if self._schedule:
            self._channel.connection.ioloop.call_later(self._schedule.wait_seconds(), self._publish_due)

    def _send(self, body: bytes) -> None:
        self._channel.basic_publish("", self._queue, body, self._persistent)
        self._published += 1


def _open_channel(port: int) -> Any:
    """An open channel of a new connection, whose loop the caller starts and stops."""
    import pika

    opened: list[Any] = []

    def ready(channel: Any) -> None:
        opened.append(channel)
        connection.ioloop.stop()

    def closed(connection: Any, reason: BaseException) -> None:
        connection.ioloop.stop()
        if not isinstance(reason, pika.exceptions.ConnectionClosedByClient):
            raise reason

    connection = pika.SelectConnection(
        _parameters(port),
        on_open_callback=lambda connection: connection.channel(on_open_callback=ready),
        on_open_error_callback=closed,
        on_close_callback=closed,
    )
    connection.ioloop.start()
    return opened[0]

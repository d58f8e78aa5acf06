"""The brokers, as they are started: on loopback, without keys, with limits that nothing here reaches."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.contestants.kafka import PEERS_DIRECTORY
from benchmarks.servers import Server, free_port, launch, output_of

__all__ = ["BROKERS", "CONTESTANTS", "LIVE", "STORED", "Broker", "Contestant", "install_amqtt"]

#: A topic that exists, so that Millstream stores what is published there, and one that does not.
STORED: Final = "bench/stored"
LIVE: Final = "bench/live"

_AMQTT: Final = PEERS_DIRECTORY / "amqtt"
_MOSQUITTO_CONFIG: Final = """
listener {port} 127.0.0.1
allow_anonymous true
max_queued_messages 0
max_inflight_messages 0
set_tcp_nodelay true
user root
log_type error
"""
_AMQTT_CONFIG: Final = """
listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{port}
    max_connections: 50000
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""


class Broker(Protocol):
    """One kind of process."""

    name: str
    #: Idle connections to measure with, at most.
    clients_max: int

    def missing(self) -> str | None:
        """How to install it, if it is not."""

    def version(self) -> str: ...

    def start(self, directory: Path) -> Server: ...


class _Millstream:
    name = "Millstream"
    clients_max = 10_000

    def missing(self) -> str | None:
        return None if _command() else "pip install ."

    def version(self) -> str:
        return importlib.metadata.version("millstream")

    def start(self, directory: Path) -> Server:
        import millstream

        server, native = Server(free_port()), free_port()
        command = [str(_command()), "serve", "--data", str(directory / "data"), "--fsync", "group"]
        command += ["--port", str(native), "--http-port", "0", "--mqtt-port", str(server.port)]
        command += ["--set", "server.max_connections=20000"]
        launch(server, command, directory / "log")
        with millstream.connect(f"127.0.0.1:{native}") as client:
            client.create_topic(STORED.replace("/", "."), config={"fsync": "group"})
        return server


class _Mosquitto:
    name = "Mosquitto"
    clients_max = 10_000

    def missing(self) -> str | None:
        return None if _mosquitto() else "apt-get install mosquitto"

    def version(self) -> str:
        return output_of(str(_mosquitto()), "-h").split()[2]

    def start(self, directory: Path) -> Server:
        server = Server(free_port())
        config = directory / "mosquitto.conf"
        config.write_text(_MOSQUITTO_CONFIG.format(port=server.port))
        launch(server, [str(_mosquitto()), "-c", config], directory / "log")
        return server


class _Amqtt:
    name = "amqtt"
    clients_max = 1_000  # each takes longer to let in than the one before: ten thousand need minutes

    def missing(self) -> str | None:
        return None if _amqtt().exists() else "python -m benchmarks.mqtt --install-peers"

    def version(self) -> str:
        return output_of(str(_amqtt()), "--version").split()[-1]

    def start(self, directory: Path) -> Server:
        server = Server(free_port())
        config = directory / "amqtt.yaml"
        config.write_text(_AMQTT_CONFIG.format(port=server.port))
        launch(server, [_amqtt(), "-c", config], directory / "log")
        return server


def _command() -> str | None:
    return shutil.which("millstream", path=str(Path(sys.executable).parent)) or shutil.which("millstream")


def _mosquitto() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _amqtt() -> Path:
    return _AMQTT / "bin/amqtt"


def install_amqtt() -> None:
    """In an environment of its own: it wants other versions of libraries than we do."""
    subprocess.run([sys.executable, "-m", "venv", _AMQTT], check=True)
    pip = [str(_AMQTT / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(Path(__file__).with_name("requirements.txt"))], check=True)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A broker and what it is asked to do with messages."""

    name: str
    broker: Broker
    topic: str
    #: What the answer to a publish is worth.
    promise: str


_MILLSTREAM: Final = _Millstream()
BROKERS: Final[tuple[Broker, ...]] = (_MILLSTREAM, _Mosquitto(), _Amqtt())
CONTESTANTS: Final = (
    Contestant("Millstream, stored", _MILLSTREAM, STORED, "fsync before confirm (group commit)"),
    Contestant("Millstream, live", _MILLSTREAM, LIVE, "passed on, not stored"),
    Contestant("Mosquitto", BROKERS[1], LIVE, "memory"),
    Contestant("amqtt", BROKERS[2], LIVE, "memory"),
)

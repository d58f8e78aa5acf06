"""Brokers for tests: one inside the test's process, for speed; one as a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millstream.broker.broker import Broker
from millstream.client import Client, connect
from millstream.config import Settings
from millstream.log.storage import DiskStorage, Storage
from millstream.server.http.listener import HttpListener
from millstream.server.mqtt.listener import MqttListener
from millstream.server.tcp import NativeListener
from millstream.server.tls import ServerTls
from millstream.testing.skipping import SkippingClock, SkippingLoop

__all__ = ["BrokerForTests", "BrokerProcess"]


class BrokerForTests:
    """A whole broker with a real socket, on a thread of this process.  It starts in milliseconds.

    Give it a data directory, or a storage of your own to inject faults; otherwise it keeps its data in a temporary
    directory.  `clock.advance("30s")` skips time for the broker.  With `http` it answers HTTP too, at `url`; with
    `mqtt` it speaks MQTT, on `mqtt_port` of 127.0.0.1.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        storage: Storage | None = None,
        settings: Settings | None = None,
        port: int = 0,
        http: bool = False,
        mqtt: bool = False,
    ) -> None:
        assert data is None or storage is None, "a broker for tests has a directory or a storage"
        # Where time can be skipped, silence on a connection says nothing: clients live in real time.
        base = settings or Settings.model_validate({"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}})
        self.settings = base.model_copy(
            update={
                "server": base.server.model_copy(update={"port": port}),
                "http": base.http.model_copy(update={"port": 0}),
                "mqtt": base.mqtt.model_copy(update={"port": 0}),
            }
        )
        self._http = http
        self._mqtt = mqtt
        self.clock = SkippingClock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if storage is None:
            if data is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="millstream-")
                data = Path(self._temporary.name)
            data.mkdir(parents=True, exist_ok=True)
            storage = DiskStorage(data)
        self._storage = storage
        self._clients: list[Client] = []
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="broker-for-tests", daemon=True)
        self.address = ""
        self.url = ""
        self.mqtt_port = 0
        self.broker: Broker

    def start(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            self.stop()
            raise self._failure
        return self

    def stop(self) -> None:
        """Stop as on SIGTERM.

        If closing a client raises an error, this raises it once everything has ended.
        """
        with ExitStack() as ends:
            ends.callback(self._end)
            for client in reversed(self._clients):
                ends.callback(client.close)

    def _end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self._temporary is not None:
            self._temporary.cleanup()

    def connect(self, **options: Any) -> Client:
        """Connect a client, as `millstream.connect` does; it is closed with the broker."""
        client = connect(self.address, **options)
        self._clients.append(client)
        return client

    def run(self, coroutine: object) -> object:
        """Run a coroutine on the broker's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: SkippingLoop(self.clock)) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.broker = Broker(self.settings, self._storage, clock=self.clock)
        await self.broker.start()
        async with AsyncExitStack() as opened:  # a door that cannot be opened leaves nothing else open
            opened.push_async_callback(self.broker.stop)
            tls = ServerTls(self.settings.tls)
            listener = NativeListener(self.broker, self.settings, self.clock.monotonic_ms, tls.context)
            await listener.open()
            opened.push_async_callback(listener.close)
            self.address = listener.address
            if self._http:
                web = HttpListener(self.broker, self.settings, tls.context)
                await web.open()
                opened.push_async_callback(web.close)
                self.url = web.url
            if self._mqtt:
                mqtt = MqttListener(self.broker, self.settings, tls.context)
                await mqtt.open()
                opened.push_async_callback(mqtt.close)
                self.mqtt_port = int(mqtt.address.rpartition(":")[2])
            self._ready.set()
            await self._stop.wait()


class BrokerProcess:
    """`millstream serve` as users run it, in a process of its own.  End it with SIGTERM or SIGKILL."""

    def __init__(self, data: Path, *, port: int = 0, arguments: Sequence[str] = ()) -> None:
        self._command = [
            *(sys.executable, "-m", "millstream", "serve"),
            *("--data", str(data), "--port", str(port), "--http-port", "0", "--mqtt-port", "0"),
            *("--log-level", "warning", *arguments),
        ]
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self._mqtt_port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        self._mqtt_port = 0
        self._process = self._spawn()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("listening on "):
                self.address = line.split()[2]
                return self
        self._process.stdout.close()
        raise RuntimeError(f"the broker ended with {self._process.wait()} before it listened")

    def _spawn(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)

    @property
    def mqtt_port(self) -> int:
        """The MQTT port on 127.0.0.1."""
        if not self._mqtt_port:
            assert self._process is not None
            assert self._process.stdout is not None
            line = next(line for line in self._process.stdout if line.startswith("MQTT on "))
            self._mqtt_port = int(line.rpartition(":")[2])
        return self._mqtt_port

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Send SIGKILL, as `kill -9` does; return the exit code."""
        return self._end(signal.SIGKILL)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()

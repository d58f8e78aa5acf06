"""MQTT clients that others wrote, each behind the same few verbs: a scenario is written once for all of them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiomqtt
import gmqtt
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from millstream.mqtt.packets import V4, V5

HOST = "127.0.0.1"
PATIENCE_S = 10.0
#: How long a durable session is kept while its client is away.
EXPIRY_S = 3600


class Message(NamedTuple):
    topic: str
    payload: bytes
    qos: int
    retain: bool = False


class LastWords(NamedTuple):
    topic: str
    payload: bytes


class Wish(NamedTuple):
    """What a reader asks for."""

    version: int
    topic_filter: str
    client_id: str
    durable: bool = False
    will: LastWords | None = None


class Reader(Protocol):
    """A client that has subscribed to something."""

    def next(self) -> Message: ...

    def close(self) -> None:
        """With a DISCONNECT."""

    def drop(self) -> None:
        """Without one."""


class Tool(Protocol):
    """A client library or program."""

    name: str

    def reader(self, port: int, wish: Wish) -> Reader:
        """Connect and subscribe with QoS 2; returns when the server has confirmed both."""

    def publish(self, port: int, version: int, *messages: Message) -> None:
        """Returns when the server has confirmed them."""


# --- paho-mqtt -------------------------------------------------------------------------------------------------------


def _paho_properties(version: int, durable: bool) -> PahoProperties | None:
    if version == V4 or not durable:
        return None
    properties = PahoProperties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = EXPIRY_S
    return properties


class _PahoReader:
    def __init__(self, client: paho.Client, found: queue.Queue[Message]) -> None:
        self._client = client
        self._found = found

    def next(self) -> Message:
        return self._found.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def drop(self) -> None:
        self._client._thread_terminate = True  # or it would connect again
        connection = self._client.socket()
        assert isinstance(connection, socket.socket)
        connection.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()


class Paho:
    name = "paho-mqtt"

    def _client(self, version: int, client_id: str, durable: bool) -> paho.Client:
        protocol = paho.MQTTv311 if version == V4 else paho.MQTTv5
        clean = None if version == V5 else not durable
        return paho.Client(paho.CallbackAPIVersion.VERSION2, client_id, clean, protocol=protocol)

    def reader(self, port: int, wish: Wish) -> Reader:
        version, topic_filter, client_id, durable, will = wish
        client = self._client(version, client_id, durable)
        found: queue.Queue[Message] = queue.Queue()
        ready = threading.Event()
        client.on_message = lambda _c, _u, it: found.put(Message(it.topic, it.payload, it.qos, bool(it.retain)))
        client.on_connect = lambda *_: client.subscribe(topic_filter, 2)
        client.on_subscribe = lambda *_: ready.set()
        if will is not None:
            client.will_set(will.topic, will.payload, 1)
        clean_start = {} if version == V4 else {"clean_start": not durable}
        client.connect(HOST, port, properties=_paho_properties(version, durable), **clean_start)
        client.loop_start()
        assert ready.wait(PATIENCE_S)
        return _PahoReader(client, found)

    def publish(self, port: int, version: int, *messages: Message) -> None:
        client = self._client(version, "", False)
        client.connect(HOST, port)
        client.loop_start()
        for message in messages:
            client.publish(*message).wait_for_publish(PATIENCE_S)
        client.disconnect()
        client.loop_stop()


# --- asyncio ---------------------------------------------------------------------------------------------------------


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all clients that need one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mqtt-clients", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(PATIENCE_S)


class _AsyncReader:
    def __init__(self, found: queue.Queue[Message], close: Callable[[], Any], drop: Callable[[], Any]) -> None:
        self._found = found
        self.close = close
        self.drop = drop

    def next(self) -> Message:
        return self._found.get(timeout=PATIENCE_S)


class AioMqtt:
    name = "aiomqtt"

    def _client(self, port: int, version: int, client_id: str, durable: bool, will: LastWords | None) -> aiomqtt.Client:
        return aiomqtt.Client(
            HOST,
            port,
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion.V311 if version == V4 else aiomqtt.ProtocolVersion.V5,
            clean_session=not durable if version == V4 else None,
            clean_start=not durable if version == V5 else paho.MQTT_CLEAN_START_FIRST_ONLY,
            properties=_paho_properties(version, durable),
            will=None if will is None else aiomqtt.Will(will.topic, will.payload, 1),
        )

    def reader(self, port: int, wish: Wish) -> Reader:
        version, topic_filter, client_id, durable, will = wish
        found: queue.Queue[Message] = queue.Queue()

        async def begin() -> tuple[aiomqtt.Client, asyncio.Task[None]]:
            client = self._client(port, version, client_id, durable, will)
            await client.__aenter__()
            await client.subscribe(topic_filter, 2)

            async def read() -> None:
                async for it in client.messages:
                    assert isinstance(it.payload, bytes)
                    found.put(Message(str(it.topic), it.payload, it.qos, it.retain))

            return client, asyncio.ensure_future(read())

        client, reading = _run(begin())

        async def end() -> None:
            reading.cancel()
            await client.__aexit__(None, None, None)

        async def lose() -> None:
            reading.cancel()
            connection = client._client.socket()
            assert isinstance(connection, socket.socket)
            connection.shutdown(socket.SHUT_RDWR)

        return _AsyncReader(found, lambda: _run(end()), lambda: _run(lose()))

    def publish(self, port: int, version: int, *messages: Message) -> None:
        async def work() -> None:
            async with self._client(port, version, "", False, None) as client:
                for message in messages:
                    await client.publish(*message)

        _run(work())


class GMqtt:
    name = "gmqtt"

    async def _connect(
        self, port: int, version: int, client_id: str, durable: bool, will: LastWords | None, **callbacks: Any
    ) -> gmqtt.Client:
        last_words = None if will is None else gmqtt.Message(will.topic, will.payload, qos=1)
        expiry = {"session_expiry_interval": EXPIRY_S} if durable and version == V5 else {}
        client = gmqtt.Client(client_id, clean_session=not durable, will_message=last_words, **expiry)
        for name, callback in callbacks.items():
            setattr(client, name, callback)
        await client.connect(HOST, port, version=version)
        return client

    def reader(self, port: int, wish: Wish) -> Reader:
        version, topic_filter, client_id, durable, will = wish
        found: queue.Queue[Message] = queue.Queue()

        def taken(_client: Any, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> int:
            found.put(Message(topic, bytes(payload), qos, bool(properties.get("retain"))))
            return 0

        async def begin() -> gmqtt.Client:
            ready = asyncio.Event()
            client = await self._connect(
                port,
                version,
                client_id,
                durable,
                will,
                on_message=taken,
                on_subscribe=lambda *_: ready.set(),
            )
            client.subscribe(topic_filter, qos=2)
            await asyncio.wait_for(ready.wait(), PATIENCE_S)
            return client

        client = _run(begin())

        async def lose() -> None:
            client.stop_reconnect()
            client._connection._transport.abort()

        return _AsyncReader(found, lambda: _run(client.disconnect()), lambda: _run(lose()))

    def publish(self, port: int, version: int, *messages: Message) -> None:
        async def work() -> None:
            client = await self._connect(port, version, f"gmqtt-{os.getpid()}-{threading.get_ident()}", False, None)
            for message in messages:
                client.publish(*message)
                await asyncio.wait_for(client._persistent_storage.wait_empty(), PATIENCE_S)
            await client.disconnect()

        _run(work())


# --- programs --------------------------------------------------------------------------------------------------------


class _ProgramReader:
    """mosquitto_sub, told to print a JSON object for each message."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
            elif line.startswith("Subscribed"):
                self._lines.put({"ready": True})
        self._lines.put(None)

    def _line(self) -> dict[str, Any]:
        line = self._lines.get(timeout=PATIENCE_S)
        assert line is not None, f"{self._process.args} ended"
        return line

    def wait_until_ready(self) -> None:
        """Messages may come before the confirmation; they keep their place."""
        early = []
        while "ready" not in (line := self._line()):
            early.append(line)
        for line in early:
            self._lines.put(line)

    def next(self) -> Message:
        it = self._line()
        return Message(it["topic"], bytes.fromhex(it["payload"]), it["qos"], bool(it["retain"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def drop(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


class MosquittoClients:
    name = "mosquitto_pub and mosquitto_sub"

    def _options(self, port: int, version: int) -> list[str]:
        return ["-h", HOST, "-p", str(port), "-V", "mqttv311" if version == V4 else "mqttv5"]

    def reader(self, port: int, wish: Wish) -> Reader:
        version, topic_filter, client_id, durable, will = wish
        line = '{"topic": "%t", "qos": %q, "retain": %r, "payload": "%x"}'
        # It tells that it has subscribed only when its buffer is full, or a line is.
        command = [
            "stdbuf",
            "-oL",
            "mosquitto_sub",
            *self._options(port, version),
            "-d",
            "-t",
            topic_filter,
            "-q",
            "2",
            "-F",
            line,
        ]
        command += ["-i", client_id]
        if durable:
            command += ["-c", *(("-x", str(EXPIRY_S)) if version == V5 else ())]
        if will is not None:
            command += ["--will-topic", will.topic, "--will-payload", will.payload.decode(), "--will-qos", "1"]
        reader = _ProgramReader(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        reader.wait_until_ready()
        return reader

    def publish(self, port: int, version: int, *messages: Message) -> None:
        for topic, payload, qos, retain in messages:
            command = ["mosquitto_pub", *self._options(port, version), "-t", topic, "-m", payload.decode()]
            command += ["-q", str(qos), *(["-r"] if retain else [])]
            subprocess.run(command, check=True, timeout=PATIENCE_S)


class _Node:
    """One process for all clients of MQTT.js, because it takes longer to start than they need to do their work."""

    def __init__(self) -> None:
        command = ["node", str(Path(__file__).with_name("client.js"))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NODE_PATH": _modules()},
        )
        self._numbers = itertools.count()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]].put(answer)

    def tell(self, what: str, number: int | None = None, **order: Any) -> int:
        """Returns the number under which it answers."""
        if number is None:
            number = next(self._numbers)
            self._answers[number] = queue.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "id": number, **order}) + "\n")
        self._process.stdin.flush()
        return number

    def answer(self, number: int) -> dict[str, Any]:
        answer = self._answers[number].get(timeout=PATIENCE_S)
        assert "error" not in answer, answer
        return answer

    def wait_for(self, number: int, what: str) -> None:
        """Messages that come before it keep their place."""
        early = []
        while what not in (answer := self.answer(number)):
            early.append(answer)
        for answer in early:
            self._answers[number].put(answer)


_node = functools.cache(_Node)


class _NodeReader:
    def __init__(self, number: int) -> None:
        self._number = number

    def next(self) -> Message:
        it = _node().answer(self._number)
        return Message(it["topic"], bytes.fromhex(it["payload"]), it["qos"], it["retain"])

    def close(self) -> None:
        _node().tell("close", self._number)
        _node().wait_for(self._number, "done")

    def drop(self) -> None:
        _node().tell("drop", self._number)
        _node().wait_for(self._number, "done")


class MqttJs:
    name = "MQTT.js"

    def reader(self, port: int, wish: Wish) -> Reader:
        version, topic_filter, client_id, durable, will = wish
        number = _node().tell(
            "read",
            port=port,
            version=version,
            filter=topic_filter,
            clientId=client_id,
            expiry=EXPIRY_S if durable else 0,
            will=None if will is None else [will.topic, will.payload.decode()],
        )
        _node().wait_for(number, "ready")
        return _NodeReader(number)

    def publish(self, port: int, version: int, *messages: Message) -> None:
        told = [[topic, payload.decode(), qos, retain] for topic, payload, qos, retain in messages]
        number = _node().tell("publish", port=port, version=version, messages=told)
        _node().wait_for(number, "done")


@functools.cache
def _modules() -> str:
    """Where packages of node that are there for everybody lie."""
    if "NODE_PATH" in os.environ:
        return os.environ["NODE_PATH"]
    if shutil.which("npm") is None:
        return ""
    return subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout.strip()


def why_not(tool: Tool) -> str:
    """What is missing on this machine; empty if nothing is."""
    if isinstance(tool, MosquittoClients) and shutil.which("mosquitto_sub") is None:
        return "mosquitto_sub is not installed (Debian: mosquitto-clients)"
    if isinstance(tool, MqttJs):
        if shutil.which("node") is None:
            return "node is not installed"
        if not any((Path(folder) / "mqtt").is_dir() for folder in _modules().split(os.pathsep)):
            return "MQTT.js is not installed (npm install -g mqtt)"
    return ""


TOOLS: tuple[Tool, ...] = (Paho(), AioMqtt(), GMqtt(), MosquittoClients(), MqttJs())


def every_tool(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with every client, where it is installed, and with both versions."""
    for_tools = pytest.mark.parametrize("tool", TOOLS, ids=[tool.name.split()[0] for tool in TOOLS])
    for_versions = pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        if missing := why_not(options["tool"]):
            pytest.skip(missing)
        test(*arguments, **options)

    return for_tools(for_versions(run))

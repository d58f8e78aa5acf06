"""What a client and a broker say to each other, as bytes on the wire, and what of it an SDK relies on."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any, Final

import msgspec

from millstream.wire.calls import Call
from millstream.wire.frames import FrameReader, FrameType, encode_frame

__all__ = ["Tap", "forms", "shape_of", "transcript"]

_CHUNK: Final = 1 << 16
#: So many frames of each type, and calls of each name, are kept; many are alike.
_KEPT: Final = 4
#: Of answers, by what the request was: those that are JSON.
_DOCUMENTS: Final = (FrameType.HELLO, FrameType.CALL)
_PACKED: Final = (FrameType.PUBLISH, FrameType.FETCH, FrameType.LEASE, FrameType.SETTLE)


class Tap:
    """A door in front of a broker that writes down what goes through it."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._broker = host, int(port)
        self._door = socket.create_server((host, 0))
        self.address = f"{host}:{self._door.getsockname()[1]}"
        #: Of each connection, what the client and what the broker has said.
        self.said: list[tuple[bytearray, bytearray]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._door.accept()
                broker = socket.create_connection(self._broker)
                there, back = bytearray(), bytearray()
                self.said.append((there, back))
                for source, target, heard in ((client, broker, there), (broker, client, back)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass, args=(source, target, heard), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                heard += data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def transcript(tap: Tap) -> dict[str, Any]:
    """What was said: some frames of each type, some calls of each name, and the shapes of their answers."""
    calls: dict[str, list[Any]] = defaultdict(list)
    frames: dict[str, list[str]] = defaultdict(list)
    answers: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for there, back in list(tap.said):
        asked: dict[int | None, deque[tuple[int, str]]] = defaultdict(deque)  # a client may use a number again
        for kind, correlation, payload in _frames(there):
            name = FrameType(kind).name
            if kind in _DOCUMENTS:
                document = json.loads(payload)
                name = document.get("op", name)
                _keep(calls[name], document)
            elif kind in _PACKED:
                _keep(frames[name], encode_frame(kind, payload, correlation).hex())
            asked[correlation].append((kind, name))
        for kind, correlation, payload in _frames(back):
            if kind != FrameType.RESPONSE:
                continue
            asked_kind, name = asked[correlation].popleft()
            if payload[:2] != b"\0\0":
                continue  # an error, which is a number and a text
            if asked_kind in _DOCUMENTS:
                shape_of(json.loads(payload[2:]), answers[name])
            elif asked_kind in _PACKED:
                _keep(frames[f"{name} answered"], payload.hex())
    shapes = {name: {path: sorted(kinds) for path, kinds in shape.items()} for name, shape in answers.items()}
    return {"calls": dict(calls), "frames": dict(frames), "answers": shapes}


def forms() -> dict[str, dict[str, Any]]:
    """Every call that there is: its fields, each with what a client means that leaves it out; [] if it must not."""
    return {
        form.__struct_config__.tag: {
            field.name: [] if field.required else [msgspec.to_builtins(_default(field))]
            for field in msgspec.structs.fields(form)
        }
        for form in Call.__args__  # type: ignore[attr-defined]
    }


def _default(field: msgspec.structs.FieldInfo) -> Any:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _frames(data: bytearray) -> list[tuple[int, int | None, bytes]]:
    reader = FrameReader(shared=bytearray(1 << 20))
    return [(kind, correlation, bytes(payload)) for kind, correlation, payload in reader.feed(bytes(data))]


def _keep(kept: list[Any], one: Any) -> None:
    if len(kept) < _KEPT and one not in kept:
        kept.append(one)


def shape_of(document: Any, shape: dict[str, set[str]], at: str = "") -> None:
    """Which fields a document has, wherever they are in it, and of what kind."""
    if isinstance(document, dict):
        for name, part in document.items():
            shape_of(part, shape, f"{at}.{name}")
    elif isinstance(document, list):
        for part in document:
            shape_of(part, shape, f"{at}[]")
    elif document is not None:
        number = isinstance(document, int | float) and not isinstance(document, bool)
        shape.setdefault(at, set()).add("number" if number else type(document).__name__)

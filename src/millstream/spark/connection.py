"""The connector's own way to the broker: a blocking socket, the native protocol, and nothing of the SDK.

Executors load this for every task, so it stays small.  One connection serves a process; when it is lost it is opened
again, with growing pauses, and whoever asked for something asks again: reading by offset is the same the second time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    RequestTimeout,
    UnavailableError,
)
from millstream.spark.options import Target
from millstream.spark.sockets import open_socket
from millstream.version import VERSION
from millstream.wire.calls import Call
from millstream.wire.frames import PROTOCOL_VERSION, FrameReader, FrameType, encode_frame
from millstream.wire.messages import (
    FetchRequest,
    FetchResult,
    Hello,
    PublishResult,
    Welcome,
    decode_answer,
    decode_error,
    decode_fetch_result,
    decode_publish_result,
    encode_fetch,
    encode_publish_head,
)

__all__ = ["Answer", "BrokerConnection", "connect", "fetched", "published"]

T = TypeVar("T")

#: Room for what a fetch asks for by default; larger answers take memory of their own.
_RECEIVE_BYTES: Final = 5 * 1024 * 1024
#: From here on an answer stays where it was received, and what comes next goes elsewhere.
_LARGE_BYTES: Final = 256 * 1024
_CONNECT_S: Final = 10.0
#: How long the very first connection of a process is tried: an address that is wrong should be noticed soon.
_FIRST_CONNECT_S: Final = 5.0
_BACKOFF_S, _BACKOFF_S_MAX = 0.1, 5.0
_encode: Final = msgspec.json.Encoder().encode


class Answer:
    """An answer that is on its way."""

    __slots__ = ("_link", "correlation", "payload")

    def __init__(self, link: _Link, correlation: int) -> None:
        self._link = link
        self.correlation = correlation
        self.payload: bytes | memoryview | None = None

    @property
    def lost(self) -> bool:
        """Whether it can no longer come."""
        return self.payload is None and self._link.lost is not None

    def wait(self, deadline_s: float) -> bytes | memoryview:
        """What follows the correlation id.  Raises ConnectionLost, RequestTimeout."""
        self._link.receive_until(lambda: self.payload is not None, deadline_s)
        if self.payload is None:
            raise RequestTimeout(f"the broker at {self._link.address} did not answer in time")
        return self.payload

    def forget(self) -> None:
        """Nobody wants it any more."""
        self._link.forget(self)


class _Link:
    """One socket after its handshake.  Answers are handed to whoever waits for them, in whatever order they come."""

    def __init__(self, target: Target, address: str, deadline_s: float) -> None:
        self.address = address
        self._reader = _reader()
        self._correlations = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._lock = threading.RLock()
        self.lost: ConnectionLost | None = None
        self.goaway = False
        self._sock = open_socket(target, address, deadline_s)
        try:
            welcome = self.request(lambda number: [_hello(target, number)]).wait(deadline_s)
            self.welcome: Welcome = decode_answer(memoryview(welcome), Welcome)
        except RequestTimeout:
            self.close()
            raise ConnectionLost(f"{address} does not answer: is it the native port of a broker?") from None
        except BaseException:
            self.close()
            raise
        self._used_s = time.monotonic()

    @property
    def usable(self) -> bool:
        """The broker closes a connection on which it hears nothing for three heartbeats."""
        silent_s = time.monotonic() - self._used_s
        return self.lost is None and not self.goaway and silent_s * 1000 < 2 * self.welcome.heartbeat_ms

    def request(self, frames: Callable[[int], Sequence[bytes | memoryview]]) -> Answer:
        with self._lock:
            answer = Answer(self, next(self._correlations) & 0x7FFF_FFFF)
            self._answers[answer.correlation] = answer
            self.send(frames(answer.correlation))
            return answer

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            with self._lock:
                for part in parts:
                    self._sock.sendall(part)
        except OSError as problem:
            raise self._break(problem) from None
        self._used_s = time.monotonic()

    def forget(self, answer: Answer) -> None:
        self._answers.pop(answer.correlation, None)

    def receive_until(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Take in frames until something has come, or until a moment."""
        with self._lock:
            while not done():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not self._receive(remaining_s):
                    return

    def _receive(self, wait_s: float) -> bool:
        """Whether anything came in time."""
        if self.lost is not None:
            raise ConnectionLost(str(self.lost))
        try:
            self._sock.settimeout(wait_s)
            size = self._sock.recv_into(self._reader.buffer())
        except TimeoutError:
            return False
        except OSError as problem:
            raise self._break(problem) from None
        finally:
            with contextlib.suppress(OSError):
                self._sock.settimeout(_CONNECT_S)
        if not size:
            raise self._break(None)
        self._reader.received(size)
        refusal: MillstreamError | None = None
        came: list[tuple[Answer, memoryview]] = []
        try:
            for frame in self._reader.frames():
                if frame.type == FrameType.GOAWAY:
                    self.goaway = True
                elif frame.type == FrameType.RESPONSE and frame.correlation is None:
                    refusal = decode_error(frame.payload)  # the broker does not want us: without a key, for example
                elif frame.type == FrameType.RESPONSE and frame.correlation is not None:
                    answer = self._answers.pop(frame.correlation, None)
                    if answer is not None:
                        came.append((answer, frame.payload))
        except MillstreamError as problem:
            self.close()
            raise ConnectionLost(f"{self.address} is not a Millstream broker: {problem}") from None
        self._hand_out(came)
        if refusal is not None:
            self.close()
            raise refusal
        return True

    def _hand_out(self, came: list[tuple[Answer, memoryview]]) -> None:
        """Answers lie where the next frames will; large ones keep that memory, and small ones are copied out of it."""
        size = sum(len(payload) for _, payload in came)
        large = size >= _LARGE_BYTES and not self._reader.owned_bytes  # else part of the next frame is there already
        for answer, payload in came:
            answer.payload = payload if large else bytes(payload)
        if large:
            self._reader = _reader()

    def _break(self, problem: OSError | None) -> ConnectionLost:
        reason = "it was closed by the broker" if problem is None else problem.strerror or str(problem)
        self.lost = self.lost or ConnectionLost(f"the connection to {self.address} is lost: {reason}")
        self.close()
        return ConnectionLost(str(self.lost))

    def close(self) -> None:
        self.lost = self.lost or ConnectionLost("the connection was closed")
        self._sock.close()


class BrokerConnection:
    """A connection that is there when it is needed.  Threads may share it, but wait for each other."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._link: _Link | None = None

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- requests that are made again until they are answered --------------------------------------------------------

    def call(self, call: Call, kind: Any = Any) -> Any:
        """Make a call that may be made twice.  Raises the broker's error, or ConnectionLost when the time is up."""
        return self.persist(lambda deadline_s: self.begin_call(call).wait(deadline_s), kind)

    def calls(self, calls: Iterable[Call], kind: Any) -> list[Any]:
        """Many at once.  What the broker refuses stands as an error in its place."""
        wanted = list(calls)

        def attempt(deadline_s: float) -> list[Any]:
            answers = [self.begin_call(call) for call in wanted]
            return [_outcome(answer.wait(deadline_s), kind) for answer in answers]

        outcomes: list[Any] = self.persist(attempt)
        return outcomes

    def fetch(self, request: FetchRequest) -> FetchResult:
        result: FetchResult = self.persist(lambda deadline_s: fetched(self.begin_fetch(request).wait(deadline_s)))
        return result

    def persist(self, attempt: Callable[[float], Any], kind: Any = None) -> Any:
        """Try until it is done, or cannot be, or the time is up."""
        deadline_s = time.monotonic() + self.target.timeout_s
        pause_s = _BACKOFF_S
        while True:
            try:
                result = attempt(deadline_s)
                return result if kind is None else decode_answer(memoryview(result), kind)
            except UnavailableError:
                if self._link is None or time.monotonic() + pause_s >= deadline_s:
                    raise
                time.sleep(pause_s * (0.5 + random.random() / 2))
                pause_s = min(2 * pause_s, _BACKOFF_S_MAX)

    # --- requests whose answer is waited for later; a lost connection is the caller's business ------------------------

    def begin_call(self, call: Call) -> Answer:
        return self.link().request(lambda number: [encode_frame(FrameType.CALL, _encode(call), number)])

    def begin_fetch(self, request: FetchRequest) -> Answer:
        return self.link().request(lambda number: [encode_fetch(request, number)])

    def begin_publish(self, topic: str, partition: int, batch: bytes | memoryview) -> Answer:
        name = topic.encode()

        def frames(number: int) -> Sequence[bytes | memoryview]:
            head = encode_publish_head(name, partition, acks=1, fsync=0, batch_size=len(batch), correlation=number)
            return [head, batch]

        return self.link().request(frames)

    def wait_any(self, answers: Sequence[Answer], wait_s: float) -> bool:
        """Whether one of these answers came within a time.  Raises ConnectionLost."""
        link = self.link()
        link.receive_until(lambda: any(each.payload is not None for each in answers), time.monotonic() + wait_s)
        return any(each.payload is not None for each in answers)

    # --- the connection itself ---------------------------------------------------------------------------------------

    def link(self) -> _Link:
        link = self._link
        if link is not None:
            if link.usable:
                return link
            link.close()
            self._link = self._open(self.target.timeout_s)
        else:
            self._link = self._open(min(self.target.timeout_s, _FIRST_CONNECT_S))
        return self._link

    def _open(self, timeout_s: float) -> _Link:
        if not self.target.servers:
            raise InvalidArgument("there is no broker to connect to: give the option bootstrap.servers")
        deadline_s = time.monotonic() + timeout_s
        pause_s = _BACKOFF_S
        while True:
            for address in self.target.servers:
                try:
                    return _Link(self.target, address, min(deadline_s, time.monotonic() + _CONNECT_S))
                except UnavailableError as problem:
                    latest = problem
            if time.monotonic() + pause_s >= deadline_s:
                raise latest
            time.sleep(pause_s * (0.5 + random.random() / 2))
            pause_s = min(2 * pause_s, _BACKOFF_S_MAX)


#: Workers are used for many tasks; one that was forked must not talk on the connection of its parent.
_connections: Final[dict[tuple[int, Target], BrokerConnection]] = {}


def connect(target: Target) -> BrokerConnection:
    """The connection of this process to a broker."""
    return _connections.setdefault((os.getpid(), target), BrokerConnection(target))


def fetched(payload: bytes | memoryview) -> FetchResult:
    """The answer to a fetch, or the error in it, raised."""
    return decode_fetch_result(memoryview(payload))


def published(payload: bytes | memoryview) -> PublishResult:
    return decode_publish_result(memoryview(payload))


def _outcome(payload: bytes | memoryview, kind: Any) -> Any:
    error = decode_error(memoryview(payload))
    if isinstance(error, UnavailableError):
        raise error
    return error if error is not None else decode_answer(memoryview(payload), kind)


def _reader() -> FrameReader:
    """With memory of its own, which is not filled with zeros: that takes as long as copying what comes."""
    return FrameReader(shared=np.empty(_RECEIVE_BYTES, np.uint8).data)


def _hello(target: Target, correlation: int) -> bytes:
    hello = Hello(
        versions=[PROTOCOL_VERSION],
        client_id=f"spark-{socket.gethostname()}-{os.getpid()}",
        namespace=target.namespace,
        token=target.token,
        software=f"millstream-spark/{VERSION}",
    )
    return encode_frame(FrameType.HELLO, _encode(hello), correlation)

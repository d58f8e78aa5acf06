"""A broker that misbehaves on command: real sockets, real frames, messages in memory.

Faults are a plan per PUBLISH frame: `faults.append(Fault(...))` takes effect with the next one.  What is stored can be
looked at directly, so a test can say "no loss, no duplicate, no reordering" about the broker's side of the story.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream.errors import (
    MillstreamError,
    OffsetOutOfRange,
    OutOfSequence,
    ShuttingDown,
    Throttled,
    TopicNotFound,
    UnknownMember,
)
from millstream.ids import SCHEDULES, schedule_uid
from millstream.names import compile_pattern
from millstream.records import Batch, check_batch, stamp
from millstream.wire import calls
from millstream.wire.connection import ServerConnection
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.messages import (
    FetchRequest,
    Hello,
    PublishRequest,
    Welcome,
    encode_error,
    encode_fetch_result_head,
    encode_json_response,
    encode_publish_result,
)
from millstream.wire.subscription_calls import FlowNotice, OpenSubscription, Subscribed


@dataclass
class Fault:
    """What happens to one PUBLISH: stored or not; answered, refused, lost with the connection, or forgotten."""

    store: bool = True
    error: MillstreamError | None = None
    drop: bool = False
    silent: bool = False
    #: Send only this many bytes of the answer, then drop the connection.
    cut_at: int | None = None
    #: Send the answer in two pieces, divided here, with a moment in between.
    split_at: int | None = None
    #: Frames that travel in one piece with the answer, in front of it and behind it.
    before: bytes = b""
    after: bytes = b""
    delay_s: float = 0.0


#: After none of these anything is lost or stored twice.
FAULTS = {
    "lost before storing": Fault(store=False, drop=True),
    "lost after storing": Fault(drop=True),
    "lost inside the answer's header": Fault(cut_at=5),
    "lost inside the answer": Fault(cut_at=20),
    "lost one byte before the end": Fault(cut_at=35),
    "refused for now": Fault(error=Throttled("slow down")),
    "refused by a broker that stops": Fault(error=ShuttingDown("bye")),
    "forgotten by the broker": Fault(error=OutOfSequence("expected 0")),
}


@dataclass
class FakePartition:
    uid: int
    batches: list[bytes] = field(default_factory=list)
    next_offset: int = 0
    start_offset: int = 0  # retention took what was before
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    #: producer -> stored ranges, newest last
    sequences: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    damaged: tuple[int, int] | None = None
    #: The log of what is scheduled for it.
    schedules: FakePartition | None = None


@dataclass
class FakeMember:
    """What the fake tells a member, and what the member last said."""

    member_id: str
    allowed: list[tuple[str, int]] = field(default_factory=list)
    owned: set[tuple[str, int]] = field(default_factory=set)
    generation: int = 1
    heartbeats: int = 0
    connection: _Peer | None = None


def flow_notice(topic: str, delay_ms: int) -> bytes:
    """A frame that asks for a pause before every publish."""
    notice = FlowNotice(topic=topic, level="critical", delay_ms=delay_ms, reason="behind")
    return encode_frame(FrameType.FLOW, msgspec.json.encode(notice))


class _Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.Lock()
        self.is_cut_off = False

    def send(self, data: bytes) -> None:
        if self.is_cut_off:
            return
        with self.lock, contextlib.suppress(OSError):
            self.sock.sendall(data)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class FakeBroker:
    """Serves in threads until `close`.  `changed` is notified whenever anything happens."""

    def __init__(self, *, partitions: int = 1, heartbeat_ms: int = 30_000, max_message_bytes: int = 1 << 20) -> None:
        self.partitions_default = partitions
        self.heartbeat_ms = heartbeat_ms
        self.max_message_bytes = max_message_bytes
        self.faults: deque[Fault] = deque()
        self.publishes: list[tuple[str, int, int, int]] = []  # topic, partition, first sequence, count
        self.acks_seen: list[int] = []
        self.topics: dict[str, list[FakePartition]] = {}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.commits: list[calls.CommitOffsets] = []
        self.members: dict[str, FakeMember] = {}
        self.grant: list[tuple[str, int]] = []  # what the next member that joins may hold
        self.call_errors: dict[str, deque[MillstreamError]] = {}
        self.before: dict[
            str, Callable[[], None]
        ] = {}  # runs once, before a call of this kind (or "Hello") is answered
        self.lost_answers: deque[str] = deque()  # calls that are carried out, then the connection is gone
        self.connections = 0
        self.heartbeat_frames = 0
        self.refusing = False
        self.hold_answers = threading.Event()
        self.hold_answers.set()
        self.changed = threading.Condition()
        self._peers: set[_Peer] = set()
        self._next_producer = 1
        self._listener: socket.socket | None = None
        self.port = 0
        self.listen()

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._accepting.start()
        threading.Thread(target=self._beat, args=(listener,), daemon=True).start()

    def _beat(self, listener: socket.socket) -> None:
        while self._listener is listener:
            for peer in list(self._peers):
                peer.send(encode_frame(FrameType.HEARTBEAT, b""))
            with self.changed:
                self.changed.wait_for(lambda: self._listener is not listener, self.heartbeat_ms / 1000)

    def vanish(self) -> None:
        """Everybody who is connected hears nothing any more, and nobody tells them."""
        for peer in list(self._peers):
            peer.is_cut_off = True

    def stop_listening(self) -> None:
        """As a broker that is down: nobody can connect, everybody is cut off."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            # Before its number is another socket's: the thread could be about to accept from that one.
            self._accepting.join(5)
            self._listener.close()
            self._listener = None
            self._note()
        self.drop_all()

    def close(self) -> None:
        self.hold_answers.set()
        self.stop_listening()

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drop_all(self) -> None:
        for peer in list(self._peers):
            peer.drop()

    def say_goodbye(self) -> None:
        for peer in list(self._peers):
            peer.send(encode_frame(FrameType.GOAWAY, b"{}"))

    def push_rebalance(self, group: str) -> None:
        for member in self.members.values():
            if member.connection is not None:
                member.connection.send(encode_frame(FrameType.REBALANCE, b'{"group":"%s"}' % group.encode()))

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "the fake broker waited in vain"

    def _note(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # --- what is stored ------------------------------------------------------------------------------------------

    def topic(self, name: str, create: bool = True) -> list[FakePartition]:
        if name not in self.topics:
            if not create:
                raise TopicNotFound(f"topic {name!r} does not exist")
            self.topics[name] = [FakePartition(uid=100 + number) for number in range(self.partitions_default)]
        return self.topics[name]

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return self.topics[topic][partition].values

    # --- serving -------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if self.refusing:
                sock.close()
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            peer = _Peer(sock)
            self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            self._note()

    def _serve(self, peer: _Peer) -> None:
        wire = ServerConnection()
        wire.reader = FrameReader(shared=bytearray(1 << 20))  # threads: the default buffer is for one of them
        try:
            while True:
                size = peer.sock.recv_into(wire.reader.buffer())
                if not size:
                    return
                wire.reader.received(size)
                for correlation, body in wire.requests():
                    self._handle(peer, correlation, body)
        except (OSError, _Dropped):
            pass
        finally:
            self._peers.discard(peer)
            peer.sock.close()
            self._note()

    def _handle(self, peer: _Peer, correlation: int, body: Any) -> None:
        if isinstance(body, Hello):
            self.before.pop("Hello", lambda: None)()
            peer.send(
                encode_json_response(
                    Welcome(
                        version=1,
                        node_id="fake",
                        software="fake",
                        heartbeat_ms=self.heartbeat_ms,
                        frame_bytes_max=10 << 20,
                    ),
                    correlation,
                )
            )
        elif isinstance(body, PublishRequest):
            self._publish(peer, correlation, body)
        elif isinstance(body, FetchRequest):
            request = body
            threading.Thread(target=self._fetch, args=(peer, correlation, request), daemon=True).start()
        elif type(body).__name__ == "Heartbeat":
            self.heartbeat_frames += 1
            self._note()
        elif not self.handle_other(peer, correlation, body):
            self._call(peer, correlation, body)

    def handle_other(self, peer: _Peer, correlation: int, body: Any) -> bool:
        """For fakes that know more kinds of request: True when it was one."""
        return False

    def _publish(self, peer: _Peer, correlation: int, request: PublishRequest) -> None:
        fault = self.faults.popleft() if self.faults else Fault()
        header = check_batch(request.batch, 0, len(request.batch))
        self.publishes.append((request.topic, request.partition, header.first_sequence, header.count))
        self.acks_seen.append(request.acks)
        if fault.delay_s:
            time.sleep(fault.delay_s)
        answer = b""
        try:
            if fault.error is not None:
                raise fault.error
            if fault.store:
                now_us = time.time_ns() // 1000  # read once: ids of receipts and of messages are made of it
                base, duplicate = self._store(request, now_us)
                answer = encode_publish_result(correlation, 3, base, now_us, duplicate=duplicate)
        except MillstreamError as error:
            answer = encode_error(error, correlation)
        self._note()
        self.hold_answers.wait()
        if fault.cut_at is not None:
            peer.send(answer[: fault.cut_at])
        if fault.drop or fault.cut_at is not None:
            peer.drop()
            raise _Dropped
        if request.acks and not fault.silent:
            answer = fault.before + answer + fault.after
            if fault.split_at is not None:
                peer.send(answer[: fault.split_at])
                time.sleep(0.02)
                answer = answer[fault.split_at :]
            peer.send(answer)

    def _store(self, request: PublishRequest, now_us: int) -> tuple[int, bool]:
        partition = self.topic(request.topic)[request.partition & ~SCHEDULES]
        if request.partition & SCHEDULES:
            partition.schedules = partition.schedules or FakePartition(uid=schedule_uid(partition.uid))
            partition = partition.schedules
        data = bytearray(request.batch)
        header = check_batch(data, 0, len(data))
        if header.producer:
            first, after = header.first_sequence, header.first_sequence + header.count
            known = partition.sequences.get(header.producer)
            if known is not None:
                for begin, end, base in known:
                    if (begin, end) == (first, after):
                        return base, True
                if known[-1][1] != first:
                    raise OutOfSequence(f"expected {known[-1][1]}, got {first}")
            partition.sequences.setdefault(header.producer, []).append((first, after, partition.next_offset))
        base = partition.next_offset
        stamp(memoryview(data), 0, base_offset=base, append_time_us=now_us, leader_epoch=0)
        stored = bytes(data)
        batch = Batch.parse(stored)
        partition.batches.append(stored)
        partition.values += batch.values()
        partition.keys += batch.keys() or [None] * batch.count
        partition.next_offset = batch.next_offset
        return base, False

    def _fetch(self, peer: _Peer, correlation: int, request: FetchRequest) -> None:
        try:
            partition = self.topic(request.topic, create=False)[request.partition]
            first, end = partition.start_offset, partition.next_offset
            if not first <= request.offset <= end:
                raise OffsetOutOfRange(f"offset {request.offset} is not in {first}..{end}")
        except MillstreamError as error:
            peer.send(encode_error(error, correlation))
            return
        with self.changed:
            self.changed.wait_for(
                lambda: partition.next_offset > request.offset or peer not in self._peers, request.wait_ms / 1000
            )
        chosen, size, next_offset = [], 0, request.offset
        for stored in list(partition.batches):
            batch = Batch.parse(stored)
            if batch.next_offset > request.offset and (not chosen or size + len(stored) <= request.max_bytes):
                chosen.append(stored)
                size += len(stored)
                next_offset = batch.next_offset
        damaged = partition.damaged if chosen else None
        partition.damaged = None if chosen else partition.damaged
        head = encode_fetch_result_head(
            correlation,
            size=size,
            next_offset=next_offset,
            high_watermark=partition.next_offset,
            start_offset=0,
            damaged=damaged,
        )
        peer.send(head + b"".join(chosen))

    # --- calls ---------------------------------------------------------------------------------------------------

    def _call(self, peer: _Peer, correlation: int, call: Any) -> None:
        name = type(call).__name__
        self.before.pop(name, lambda: None)()
        try:
            errors = self.call_errors.get(name)
            if errors:
                raise errors.popleft()
            answer = encode_json_response(self._answer(peer, call), correlation)
        except MillstreamError as error:
            answer = encode_error(error, correlation)
        if name in self.lost_answers:
            self.lost_answers.remove(name)
            peer.drop()
            raise _Dropped
        peer.send(answer)
        self._note()

    def _answer(self, peer: _Peer, call: Any) -> Any:
        match call:
            case calls.Metadata(topics=topics, create=create):
                return [
                    calls.TopicMetadata(
                        name=name,
                        partition_uids=[partition.uid for partition in self.topic(name, create)],
                        max_message_bytes=self.max_message_bytes,
                    )
                    for name in topics
                ]
            case calls.ListTopics(pattern=pattern, after=after, limit=limit):
                matches = compile_pattern(pattern or "#").fullmatch
                return [
                    calls.TopicInfo(name=name, partition_count=len(found), created_ms=found[0].uid, config={})
                    for name, found in sorted(self.topics.items())
                    if matches(name) and name > after
                ][:limit]
            case calls.NewProducer():
                self._next_producer += 1
                return calls.ProducerIdentity(producer_id=self._next_producer, epoch=0)
            case calls.ListOffsets(topic=topic, partitions=numbers):
                partitions = self.topic(topic, create=False)
                return [
                    calls.OffsetEntry(topic=topic, partition=number, offset=_offset(partitions[number], call))
                    for number in (range(len(partitions)) if numbers is None else numbers)
                ]
            case calls.CommittedOffsets(group=group):
                return [
                    calls.OffsetEntry(topic=topic, partition=partition, offset=offset)
                    for (name, topic, partition), offset in self.committed.items()
                    if name == group
                ]
            case calls.CommitOffsets(group=group, offsets=entries):
                self.commits.append(call)
                for entry in entries:
                    self.committed[group, entry.topic, entry.partition] = entry.offset
                return None
            case calls.JoinGroup():
                member_id = call.member_id or f"member-{len(self.members) + 1}"
                if call.start == "latest":
                    for topic, number in self.grant:
                        end = self.topics[topic][number].next_offset
                        self.committed.setdefault((call.group, topic, number), end)
                self.members[member_id] = FakeMember(member_id, list(self.grant), connection=peer)
                return self._assignment(self.members[member_id])
            case calls.HeartbeatGroup(member_id=member_id):
                member = self.members.get(member_id)
                if member is None:
                    raise UnknownMember(f"{member_id} is not a member")
                member.owned = {(entry.topic, number) for entry in call.owned for number in entry.partitions}
                member.heartbeats += 1
                member.connection = peer
                return self._assignment(member)
            case calls.LeaveGroup(member_id=member_id):
                self.members.pop(member_id, None)
                return None
            case calls.DescribeBroker():
                return {"software": "fake"}
            case _:
                return None

    def _assignment(self, member: FakeMember) -> calls.Assignment:
        topics: dict[str, list[int]] = {}
        for topic, partition in member.allowed:
            topics.setdefault(topic, []).append(partition)
        return calls.Assignment(
            member_id=member.member_id,
            generation=member.generation,
            partitions=[calls.TopicPartitions(topic=topic, partitions=held) for topic, held in topics.items()],
        )


class _Dropped(Exception):
    """The connection is gone on purpose."""


class FakeSubscriptions(FakeBroker):
    """Takes every subscription, and sends nothing."""

    subscribed = 0

    def _answer(self, peer: Any, call: calls.Call) -> Any:
        if isinstance(call, OpenSubscription):
            self.subscribed += 1
            return Subscribed(subscription=self.subscribed)
        return super()._answer(peer, call)


def _offset(partition: FakePartition, call: calls.ListOffsets) -> int:
    if call.at == "earliest":
        return partition.start_offset
    for stored in partition.batches if call.at == "timestamp" else ():
        header = Batch.parse(stored).header
        if header.append_time_us >= (call.timestamp_ms or 0) * 1000:
            return header.base_offset
    return partition.next_offset

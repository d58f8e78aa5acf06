"""A stream and its group: what it owns it reads, what it does not own it does not read, whatever fails in between.

Each scenario runs with both kinds of stream.  They share following.py, but not what waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from fake_broker import FakeBroker, FakeMember

import millstream
from millstream.client import following
from millstream.client.messages import Message, TopicPartition
from millstream.errors import (
    ConnectionLost,
    GroupNotFound,
    InvalidArgument,
    MillstreamError,
    RequestTimeout,
    StaleGeneration,
    Throttled,
    TopicNotFound,
    Unauthorized,
)
from millstream.wire.messages import Hello, encode_error
from tests.either import EitherClient
from tests.waiting import eventually

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture(autouse=True)
def _look_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was missed at once is found by looking again, which is a matter of a second."""
    monkeypatch.setattr(following, "_LOOK_AGAIN_S", 0.1)


class Reader:
    """One stream of a group, of either kind."""

    def __init__(self, fake: FakeBroker, *, asynchronous: bool) -> None:
        self._either = EitherClient(fake.address, asynchronous=asynchronous)
        self._do = self._either.do
        self.client = self._either.client
        self.stream: Any = None

    def open(self, topic: str = "t", **options: object) -> None:
        self.stream = self._do(self.client.stream(topic, group="g", session_ms=1000, **options))

    def next(self, timeout_s: float = 5) -> Message | None:
        return self._either.next(self.stream, timeout_s)

    def values(self, count: int) -> list[bytes | None]:
        return self._either.values(self.stream, count)

    def commit(self, message: Message | None = None) -> None:
        self._do(self.stream.commit(message))

    def replace_call(self, wrap: Callable[[Callable[[], Any]], Any]) -> None:
        """Let `wrap` decide what becomes of the stream's calls."""
        original = self.stream._call
        if self._either.loop is None:
            self.stream._call = lambda call, kind: wrap(lambda: original(call, kind))
        else:

            async def later(call: object, kind: object) -> Any:
                made: Coroutine[Any, Any, Any] = wrap(lambda: original(call, kind))
                return await made

            self.stream._call = later

    def close(self) -> None:
        self._do(self.stream.close())
        self._either.end()


@pytest.fixture(params=["blocking", "asynchronous"])
def reader(request: pytest.FixtureRequest, fake: FakeBroker) -> Iterator[Reader]:
    """Two partitions of `t` with a message each, granted to whoever joins."""
    fake.partitions_default = 2
    with millstream.connect(fake.address) as client:
        for partition in range(2):
            client.publish("t", b"%d" % partition, partition=partition)
    fake.grant = [("t", 0), ("t", 1)]
    made = Reader(fake, asynchronous=request.param == "asynchronous")
    yield made
    made.close()


def member(fake: FakeBroker) -> FakeMember:
    (only,) = fake.members.values()
    return only


def reassign(fake: FakeBroker, *partitions: int) -> None:
    who = member(fake)
    who.generation += 1
    who.allowed = [("t", number) for number in partitions]
    fake.push_rebalance("g")


# --- where to begin --------------------------------------------------------------------------------------------------


def test_a_partition_revoked_while_its_start_is_looked_up_is_not_read(fake: FakeBroker, reader: Reader) -> None:
    """It was released at once, as nothing of it was read; from then on it belongs to somebody else."""
    assigned: list[list[TopicPartition]] = []
    reader.open(on_assigned=assigned.append)

    def revoke() -> None:
        reassign(fake, 1)
        # Another thread serves the member's own connection.
        fake.wait_for(lambda: member(fake).owned == {("t", 1)})

    fake.before["ListOffsets"] = revoke
    assert reader.values(1) == [b"1"]
    assert reader.next(0.3) is None
    assert reader.stream.assignment() == [T1]
    assert assigned == [[T1]]


def test_a_partition_that_left_and_came_back_during_the_lookup_is_looked_up_again(
    fake: FakeBroker, reader: Reader
) -> None:
    reader.open()

    def elsewhere() -> None:
        reassign(fake, 1)
        fake.wait_for(lambda: member(fake).owned == {("t", 1)})
        fake.committed["g", "t", 0] = 1  # by whoever had it
        reassign(fake, 0, 1)
        fake.wait_for(lambda: member(fake).owned == {("t", 0), ("t", 1)})

    fake.before["ListOffsets"] = elsewhere
    assert reader.values(1) == [b"1"]
    assert reader.next(1.5) is None, "what another member has done is not done again"
    assert reader.stream.assignment() == [T0, T1]


def test_after_a_failed_lookup_the_partitions_are_read_nevertheless(fake: FakeBroker, reader: Reader) -> None:
    """They are listed in heartbeats, so nobody else reads them."""
    reader.open()
    failures = deque([ConnectionLost("the broker is away for longer than timeout_s")])

    def call(original: Callable[[], Any]) -> Any:
        if failures:
            raise failures.popleft()
        return original()

    reader.replace_call(call)
    with pytest.raises(ConnectionLost):
        reader.next(2)
    assert reader.values(2) == [b"0", b"1"]


@pytest.mark.parametrize("error", [TopicNotFound("not yet"), Throttled("later")])
def test_a_refused_lookup_is_repeated(fake: FakeBroker, reader: Reader, error: MillstreamError) -> None:
    reader.open()
    fake.call_errors["ListOffsets"] = deque([error])
    if error.retriable:
        with pytest.raises(type(error)):
            reader.next(2)
    assert reader.values(2) == [b"0", b"1"]


def test_a_topic_that_is_gone_does_not_stop_the_others(fake: FakeBroker, reader: Reader) -> None:
    fake.grant = [("a", 0), ("t", 0), ("z", 0)]
    fake.topic("a")
    fake.topic("z")
    reader.open("*")
    fake.before["CommittedOffsets"] = lambda: (fake.topics.pop("a"), fake.topics.pop("z"), None)[-1]
    assert reader.values(1) == [b"0"]
    assert reader.stream.assignment() == [T0]


def test_a_callback_that_fails_once_does_not_keep_partitions_from_moving(fake: FakeBroker, reader: Reader) -> None:
    problems = deque([ValueError("a bug in the handler")])

    def on_revoked(partitions: list[TopicPartition], lost: bool) -> None:
        if problems:
            raise problems.popleft()

    reader.open(on_revoked=on_revoked)
    assert reader.values(2) == [b"0", b"1"]
    fake.wait_for(lambda: len(member(fake).owned) == 2)
    reassign(fake, 1)
    with pytest.raises(ValueError, match="a bug"):
        reader.next(5)
    reader.next(1.5)
    fake.wait_for(lambda: member(fake).owned == {("t", 1)})


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_join_whose_answer_is_lost_leaves_no_ghost(fake: FakeBroker, reader: Reader) -> None:
    """It would hold its share of the partitions, unread, until its session ends."""
    fake.lost_answers.append("JoinGroup")
    reader.open()
    assert reader.values(2) == [b"0", b"1"]
    assert list(fake.members) == [reader.stream._membership.member_id]


def test_who_gives_up_on_joining_leaves_in_case_it_was_admitted(fake: FakeBroker) -> None:
    fake.topic("t")
    fake.lost_answers += ["JoinGroup"] * 100
    with millstream.connect(fake.address, timeout_s=0.3) as client, pytest.raises(RequestTimeout):
        client.stream("t", group="g")
    fake.wait_for(lambda: not fake.members)


@pytest.mark.parametrize("error", [GroupNotFound("deleted"), StaleGeneration("never heard of it")])
def test_a_member_whose_group_is_gone_joins_again_under_a_new_name(
    fake: FakeBroker, reader: Reader, error: MillstreamError
) -> None:
    revoked: list[tuple[list[TopicPartition], bool]] = []
    reader.open(on_revoked=lambda partitions, lost: revoked.append((partitions, lost)))
    assert reader.values(2) == [b"0", b"1"]
    before = reader.stream._membership.member_id
    fake.committed = {("g", "t", 0): 1, ("g", "t", 1): 0}
    fake.call_errors["HeartbeatGroup"] = deque([error])
    fake.members.clear()
    fake.wait_for(lambda: len(fake.members) == 1)
    assert reader.values(1) == [b"1"]
    assert revoked == [([T0, T1], True)]
    assert list(fake.members) == [reader.stream._membership.member_id] != [before]


def test_what_ended_a_membership_is_raised_every_time(fake: FakeBroker, reader: Reader) -> None:
    reader.open()
    assert reader.next() is not None
    fake.call_errors["HeartbeatGroup"] = deque([Unauthorized("not any more")])
    fake.push_rebalance("g")
    fake.wait_for(lambda: not fake.call_errors["HeartbeatGroup"])
    eventually(lambda: reader.stream._membership.failure)
    for _ in range(2):
        with pytest.raises(Unauthorized):
            reader.values(3)


def test_progress_in_a_topic_that_is_gone_does_not_end_the_membership(fake: FakeBroker, reader: Reader) -> None:
    refusal = InvalidArgument("there is no partition t/1 to commit an offset for")
    fake.call_errors["CommitOffsets"] = deque([refusal, refusal])
    reader.open(commit_interval_s=0.05)
    assert reader.values(2) == [b"0", b"1"]
    assert reader.next(0.3) is None
    fake.wait_for(lambda: sorted(fake.committed) == [("g", "t", 0), ("g", "t", 1)])
    assert reader.stream._membership.failure is None


# --- commits of what is no longer ours -------------------------------------------------------------------------------


def test_a_message_of_a_partition_that_left_and_came_back_is_not_committed(fake: FakeBroker, reader: Reader) -> None:
    """Its handler took longer than the group waits.  Another member has read on: that must not be taken back."""
    fake.grant = [("t", 0)]
    with millstream.connect(fake.address) as client:
        client.publish_many("t", [millstream.Outgoing(value=b"more", partition=0)] * 3)
    reader.open(commit="manual", rebalance_ms=200)
    message = reader.next()
    assert message is not None
    assert message.offset == 0
    fake.wait_for(lambda: member(fake).owned == {("t", 0)})
    reassign(fake)
    fake.wait_for(lambda: not member(fake).owned)
    fake.committed["g", "t", 0] = 3  # by whoever had it
    reassign(fake, 0)
    fake.wait_for(lambda: member(fake).owned == {("t", 0)})
    with pytest.raises(StaleGeneration, match="has left this member"):
        reader.commit(message)
    with pytest.raises(StaleGeneration):
        reader.commit()
    again = reader.next()
    assert again is not None
    assert again.offset == 3
    with pytest.raises(StaleGeneration):  # although it is read again
        reader.commit(message)
    assert fake.committed["g", "t", 0] == 3
    reader.commit(again)
    assert fake.committed["g", "t", 0] == 4


def test_who_is_told_that_a_partition_goes_may_commit_it(fake: FakeBroker, reader: Reader) -> None:
    reader.open(commit="manual", on_revoked=lambda partitions, lost: reader.stream.commit())
    assert reader.values(2) == [b"0", b"1"]
    fake.wait_for(lambda: len(member(fake).owned) == 2)
    reassign(fake, 1)
    assert reader.next(0.5) is None
    assert fake.committed["g", "t", 0] == 1
    fake.wait_for(lambda: member(fake).owned == {("t", 1)})


class _Refusing(FakeBroker):
    """Asks those who connect to come again later, so many times."""

    refusals = 0

    def _handle(self, peer: Any, correlation: int, body: Any) -> None:
        if isinstance(body, Hello) and self.refusals:
            self.refusals -= 1
            peer.send(encode_error(Throttled("too many connect at once"), correlation))
        else:
            super()._handle(peer, correlation, body)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_stream_that_is_asked_to_connect_later_does_so(asynchronous: bool) -> None:
    """It ended, where queues and subscriptions went on."""
    with _Refusing() as fake:
        either = EitherClient(fake.address, asynchronous=asynchronous)
        for value in (b"first", b"second"):
            either.do(either.client.publish("t", value))
        stream = either.do(either.client.stream("t", max_bytes=1))
        assert either.values(stream, 1) == [b"first"]
        fake.refusals = 4
        fake.drop_all()
        assert either.values(stream, 1) == [b"second"]
        either.end()

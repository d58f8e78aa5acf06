"""Streams: every message once and in order, progress that never runs ahead of the user, groups that move partitions."""

from __future__ import annotations

import gc
import threading
from collections import deque
from datetime import UTC, datetime
from itertools import islice

import pytest
from fake_broker import FakeBroker, FakeMember, FakePartition

import millstream
from millstream.client.address import Target
from millstream.client.commits import Progress
from millstream.client.membership import Membership
from millstream.client.messages import TopicPartition
from millstream.client.settings import StreamSettings
from millstream.errors import (
    DataDamaged,
    InternalError,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotFound,
    ReadOnly,
    StaleGeneration,
    StorageFailed,
    TopicNotFound,
    Unauthorized,
)
from tests.waiting import eventually

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def fill(client: millstream.Client, count: int, topic: str = "t", batch: int = 10, start: int = 0) -> list[bytes]:
    values = [b"%05d" % number for number in range(start, start + count)]
    for at in range(0, count, batch):
        client.publish_many(topic, [millstream.Outgoing(value=value, partition=0) for value in values[at : at + batch]])
    return values


# --- reading ---------------------------------------------------------------------------------------------------------


def test_the_latest_message_is_handed_out_before_more_is_asked_for(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    fetch = FakeBroker._fetch
    monkeypatch.setattr(FakeBroker, "_fetch", lambda *them: (asked.append(them[-1].offset), fetch(*them))[1])
    values = fill(client, 20)
    with client.stream("t", max_bytes=200) as stream:  # one batch at a time
        messages = iter(stream)
        assert [next(messages).value for _ in range(20)] == values
        client.ping()
        assert asked == [0, 10], "the second while the first was handled, and then there was no more"
        client.publish("t", b"late")
        assert next(messages).value == b"late"
    assert asked[2] == 20


def test_what_a_stream_waits_for_is_said_once(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 10)
    refusals = 3
    topic = FakeBroker.topic

    def refusing(broker: FakeBroker, name: str, create: bool = True) -> list[FakePartition]:
        nonlocal refusals
        if not create and refusals:
            refusals -= 1
            raise ReadOnly("new disk")
        return topic(broker, name, create)

    with client.stream("t") as stream:
        monkeypatch.setattr(FakeBroker, "topic", refusing)
        assert next(iter(stream)).offset == 0
    assert [record.getMessage() for record in caplog.records] == [
        "stream: t/0 cannot be read now: new disk; trying again"
    ]


def test_a_stream_reads_everything_in_order_and_waits_for_more(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 100)
    with client.stream("t") as stream:
        messages = iter(stream)
        assert [next(messages).value for _ in range(100)] == values
        threading.Timer(0.05, lambda: client.publish("t", b"late", key=b"k", headers={"a": "b"})).start()
        late = next(messages)
    assert (late.value, late.key, late.headers, late.topic, late.partition, late.offset) == (
        b"late",
        b"k",
        {"a": "b"},
        "t",
        0,
        100,
    )
    assert abs((late.timestamp - datetime.now(UTC)).total_seconds()) < 10
    assert late.text == "late"
    assert len(late.id) == 26


def test_iteration_ends_when_nothing_came_for_a_while(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 30)
    with client.stream("t", timeout_s=0.5) as stream:
        assert [message.value for message in stream] == values
        fill(client, 5, start=30)
        assert len(list(stream)) == 5


def test_breaking_off_and_iterating_again_loses_nothing(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 30)
    seen = []
    with client.stream("t", timeout_s=0.5) as stream:
        for _ in range(4):
            for number, message in enumerate(stream):
                seen.append(message.value)
                if number == 6:
                    break
        last = stream.next(10)
        assert last is not None
        seen.append(last.value)
        for messages in stream.batches():
            seen += [message.value for message in messages]
    assert seen == values


def test_start_may_be_an_offset_an_offset_per_partition_or_the_end(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 30)
    with client.stream("t", start=13, timeout_s=10) as stream:
        assert [message.value for message in islice(stream, 17)] == values[13:]
    with client.stream("t", start={0: 28}, timeout_s=10) as stream:
        assert [message.value for message in islice(stream, 2)] == values[28:]
    with client.stream("t", start="latest", timeout_s=10) as stream:
        assert stream.next(0.05) is None
        client.publish("t", b"new")
        assert [message.value for message in islice(stream, 1)] == [b"new"]


def test_an_offset_the_user_gave_must_exist(fake: FakeBroker, client: millstream.Client) -> None:
    fill(client, 3)
    with client.stream("t", start=50) as stream, pytest.raises(OffsetOutOfRange):
        stream.next(10)


def test_seek_pause_resume_position_and_lag(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 30)
    with client.stream("t", timeout_s=10) as stream:
        seen = []
        for message in islice(stream, 15):
            seen.append(message.value)
            if message.offset == 4:
                assert stream.position() == {T0: 5}
                assert stream.lag() == {T0: 25}
                stream.seek("t", 0, 20)
                assert stream.position() == {T0: 20}
        assert seen == values[:5] + values[20:]

        stream.seek("t", 0, "earliest")
        first = stream.next(10)
        assert first is not None
        assert first.offset == 0
        stream.pause()
        assert stream.next(0.05) is None
        stream.resume([("t", 0)])
        assert [message.value for message in islice(stream, 29)] == values[1:]
        stream.seek("t", 0, "latest")
        assert stream.next(0.02) is None
        with pytest.raises(InvalidArgument):
            stream.seek("t", 9, 0)


def test_several_partitions_and_topics_are_read_fairly() -> None:
    with FakeBroker(partitions=3) as fake, millstream.connect(fake.address) as client:
        for topic in ("a", "b"):
            for partition in range(3):
                for number in range(5):
                    client.publish(topic, b"%s%d-%d" % (topic.encode(), partition, number), partition=partition)
        with client.stream(["a", "b"], timeout_s=10) as stream:
            seen = [(message.topic, message.partition, message.offset) for message in islice(stream, 30)]
            assert len(stream.assignment()) == 6
        assert sorted(seen) == [(t, p, o) for t in "ab" for p in range(3) for o in range(5)]
        with client.stream("a", partitions=[2], timeout_s=10) as stream:
            assert [message.partition for message in islice(stream, 5)] == [2] * 5
        with pytest.raises(PartitionNotFound):
            client.stream("a", partitions=[3])


def test_a_missing_topic_is_an_error_at_once(client: millstream.Client) -> None:
    with pytest.raises(TopicNotFound):
        client.stream("missing")
    with pytest.raises(TopicNotFound):
        client.stream("missing", group="g")


@pytest.mark.parametrize("group", [None, "g"])
def test_a_lost_connection_is_not_noticed(fake: FakeBroker, client: millstream.Client, group: str | None) -> None:
    fake.grant = [("t", 0)]
    values = fill(client, 60)
    seen = []
    with client.stream("t", group=group, max_bytes=300, timeout_s=1.0) as stream:
        for message in stream:
            seen.append(message.value)
            if len(seen) in (5, 25):
                fake.drop_all()
            if len(seen) == 40:
                fake.stop_listening()
                threading.Timer(0.2, fake.listen).start()
            if len(seen) == 60:
                break
    assert seen == values


def test_messages_received_before_the_connection_broke_are_not_skipped(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """The position is moved on before the next request is sent, and that may fail."""
    fake.grant = [("t", 0)]
    values = fill(client, 10, batch=1)
    with client.stream("t", group="g", max_bytes=1) as stream:
        first = stream.next(5)
        assert first is not None
        seen = [first.value]
        transport = stream._transport
        assert transport is not None

        def send(*_: bytes) -> None:
            raise transport._break("broken pipe")

        transport.send = send  # type: ignore[method-assign]
        while len(seen) < 10 and (message := stream.next(2)) is not None:
            seen.append(message.value)
    assert seen == values


def test_a_broker_that_says_goodbye_is_left_and_found_again(fake: FakeBroker, client: millstream.Client) -> None:
    fill(client, 3)
    with client.stream("t", timeout_s=10) as stream:
        assert stream.next(10) is not None
        fake.say_goodbye()
        fill(client, 1, start=3)
        assert [message.offset for message in islice(stream, 3)] == [1, 2, 3]


def test_close_from_another_thread_ends_the_iteration(fake: FakeBroker, client: millstream.Client) -> None:
    fill(client, 1)
    stream = client.stream("t")
    threading.Timer(0.1, stream.close).start()
    assert len(list(stream)) == 1


def test_damage_is_raised_once_and_reading_goes_on(fake: FakeBroker, client: millstream.Client) -> None:
    values = fill(client, 20)
    fake.topics["t"][0].damaged = (0, 5)
    with client.stream("t", timeout_s=10) as stream:
        with pytest.raises(DataDamaged, match="messages 0 to 4"):
            list(stream)
        assert [message.value for message in islice(stream, 20)] == values
    fake.topics["t"][0].damaged = (0, 5)
    with client.stream("t", timeout_s=10, on_damage="skip") as stream:
        assert [message.value for message in islice(stream, 20)] == values


def test_messages_do_not_keep_a_dropped_stream_alive(fake: FakeBroker, client: millstream.Client) -> None:
    fake.grant = [("t", 0)]
    fill(client, 3)
    message = client.stream("t", group="g").next(5)
    assert message is not None
    gc.collect()
    fake.wait_for(lambda: not fake.members)  # it left the group by itself
    with pytest.raises(InvalidArgument):
        message.commit()


def test_message_conveniences(client: millstream.Client) -> None:
    client.publish("t", json={"n": 1})
    client.publish("t", b"\xff")
    client.publish("t", None, key=b"gone")
    with client.stream("t") as stream:
        json, binary, nothing = (stream.next(10) for _ in range(3))
    assert json is not None
    assert binary is not None
    assert nothing is not None
    assert json.json() == {"n": 1}
    assert json.json(dict[str, int]) == {"n": 1}
    for bad in (lambda: json.json(list[int]), lambda: binary.text, lambda: binary.json(), lambda: nothing.text):
        with pytest.raises(InvalidArgument):
            bad()
    assert nothing.value is None
    with pytest.raises(InvalidArgument):
        json.commit()


@pytest.mark.parametrize(
    "options",
    [
        {"start": "middle"},
        {"start": -1},
        {"commit": "maybe"},
        {"on_damage": "cry"},
        {"group": "g", "partitions": [1]},
        {"max_bytes": 0},
    ],
)
def test_settings_are_checked(client: millstream.Client, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        client.stream("t", **options)  # type: ignore[arg-type]


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(fake: FakeBroker, client: millstream.Client) -> FakeBroker:
    """Two partitions of `t`, all granted to whoever joins."""
    fake.partitions_default = 2
    for partition in range(2):
        client.publish_many(
            "t", [millstream.Outgoing(value=b"%d-%d" % (partition, n), partition=partition) for n in range(10)]
        )
    fake.grant = [("t", 0), ("t", 1)]
    return fake


def member(fake: FakeBroker) -> FakeMember:
    (only,) = fake.members.values()
    return only


def reassign(fake: FakeBroker, *partitions: int) -> None:
    who = member(fake)
    who.generation += 1
    who.allowed = [("t", number) for number in partitions]
    fake.push_rebalance("g")


def test_a_callback_that_raises_does_not_keep_the_client_from_closing_the_rest(
    group: FakeBroker, client: millstream.Client
) -> None:
    def on_revoked(_: object, lost: bool) -> None:
        raise ValueError("no")

    stream = client.stream("t", group="g", on_revoked=on_revoked)
    assert stream.next(5) is not None
    producers = [client.producer(f"t{number}", partition=0, linger_ms=60_000) for number in range(8)]
    for producer in producers:
        producer.send(b"x")
    with pytest.raises(ValueError, match="no"):
        client.close()
    assert [len(group.values(f"t{number}")) for number in range(8)] == [1] * 8
    assert client._link.closed


def test_a_stream_that_is_closed_twice_at_a_time_is_revoked_once(group: FakeBroker, client: millstream.Client) -> None:
    """By another thread, or by the callback itself, which called itself for ever."""
    revoked: list[object] = []

    def on_revoked(partitions: object, lost: bool) -> None:
        revoked.append(partitions)
        assert len(revoked) == 1
        stream.close()
        other = threading.Thread(target=stream.close)
        other.start()
        other.join()

    stream = client.stream("t", group="g", on_revoked=on_revoked)
    assert stream.next(5) is not None
    stream.close()
    assert len(revoked) == 1


def test_progress_is_committed_at_the_end_up_to_what_is_finished(group: FakeBroker, client: millstream.Client) -> None:
    with client.stream("t", group="g", timeout_s=10) as stream:
        for number, _ in enumerate(stream):
            if number == 14:
                break
    # 15 handed out; the one in hand is not finished.
    assert sum(offset for (name, _, _), offset in group.committed.items() if name == "g") == 14
    with client.stream("t", group="g", timeout_s=1) as stream:
        assert len(list(stream)) == 6
    assert group.committed == {("g", "t", 0): 10, ("g", "t", 1): 10}


def test_a_stream_that_is_dropped_in_the_middle_of_its_membership_leaves(
    group: FakeBroker, client: millstream.Client
) -> None:
    """The garbage collector runs in any thread at any moment: also where the lock is held that the end asks for."""
    stream = client.stream("t", group="g")
    membership = stream._membership
    assert membership is not None
    streams = [stream]
    del stream

    def drop() -> None:
        with membership._lock:
            streams.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    group.wait_for(lambda: not group.members)


def test_progress_is_committed_while_a_handler_is_busy(group: FakeBroker, client: millstream.Client) -> None:
    with client.stream("t", group="g", commit_interval_s=0.02) as stream:
        for number, message in enumerate(stream):
            if number == 3:
                place = ("g", message.topic, message.partition)
                group.wait_for(lambda: group.committed.get(place) == 3)  # noqa: B023
                break


def test_start_counts_only_where_the_group_has_no_progress(group: FakeBroker, client: millstream.Client) -> None:
    group.committed["g", "t", 0] = 7
    with client.stream("t", group="g", start="latest", timeout_s=10) as stream:
        assert [(message.partition, message.offset) for message in islice(stream, 3)] == [(0, 7), (0, 8), (0, 9)]
    # Where it began is recorded too: whoever takes over must not skip what came since.
    assert group.committed["g", "t", 1] == 10


@pytest.mark.parametrize("commit", ["auto", "manual"])
def test_where_a_group_began_is_recorded_before_the_first_message_is_handed_out(
    group: FakeBroker, client: millstream.Client, commit: str
) -> None:
    """Or the message in hand would be lost with its reader: the next one would begin at the latest again."""
    with client.stream("t", group="g", start="latest", commit=commit, commit_interval_s=3600) as stream:
        assert stream.next(0.01) is None
        eventually(lambda: stream.assignment() or stream.next(0.01))
        assert group.committed == {("g", "t", 0): 10, ("g", "t", 1): 10}
        client.publish("t", b"in hand", partition=0)
        message = stream.next(10)
        assert message is not None
        assert message.offset == 10
        assert group.committed == {("g", "t", 0): 10, ("g", "t", 1): 10}


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_progress_that_retention_has_passed_goes_on_with_the_oldest_message_there_is(
    group: FakeBroker, client: millstream.Client, start: str
) -> None:
    group.committed |= {("g", "t", 0): 3, ("g", "t", 1): 10}
    group.topic("t")[0].start_offset = 6
    with client.stream("t", group="g", start=start, timeout_s=10) as stream:
        assert [message.offset for message in islice(stream, 4)] == [6, 7, 8, 9]


def test_progress_beyond_the_log_falls_back_to_start(group: FakeBroker, client: millstream.Client) -> None:
    group.committed["g", "t", 0] = 700
    with client.stream("t", group="g", timeout_s=10) as stream:
        assert len(list(islice(stream, 20))) == 20


def test_a_commit_of_a_membership_that_has_ended_does_not_count_for_the_next_one(
    group: FakeBroker, client: millstream.Client
) -> None:
    """Others have read on since: it would take their progress back, and the docs say that it is refused."""
    with client.stream("t", group="g", commit="manual", session_ms=1000) as stream:
        message = stream.next(10)
        assert message is not None
        (first,) = group.members
        group.members.clear()
        group.wait_for(lambda: group.members and first not in group.members)
        group.committed["g", "t", message.partition] = 9
        with pytest.raises(StaleGeneration):
            stream.commit(message)
        assert group.committed["g", "t", message.partition] == 9
        again = stream.next(10)
        assert again is not None
        with pytest.raises(StaleGeneration):
            stream.commit(message)
        stream.commit(again)
        assert group.committed["g", "t", again.partition] == again.offset + 1


def test_a_stream_whose_membership_fails_in_an_unknown_way_does_not_read_on(
    group: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would send heartbeats: its partitions go to others, and it would read them with them for ever."""
    with client.stream("t", group="g", session_ms=1000) as stream:
        assert stream.next(10) is not None

        def broken(_: Membership) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Membership, "_heartbeat", broken)
        assert stream._membership is not None
        stream._membership._thread.join(10)
        with pytest.raises(InternalError, match="a bug"):
            stream.next(10)
        with pytest.raises(InternalError, match="a bug"):
            stream.commit()


def test_manual_commits_happen_only_on_demand(group: FakeBroker, client: millstream.Client) -> None:
    with client.stream("t", group="g", commit="manual", timeout_s=10) as stream:
        for number, message in enumerate(stream):
            if number == 3:
                message.commit()
            if number == 5:
                break
    (commit,) = group.commits
    assert [entry.offset for entry in commit.offsets] == [4]
    assert commit.member_id
    with client.stream("t", group="g", commit="manual", timeout_s=10) as stream:
        consumed = [stream.next(10) for _ in range(16)]
        stream.commit()
    assert all(consumed)
    assert sum(group.committed.values()) == 20


def test_a_commit_by_hand_is_not_taken_back_by_the_next_automatic_one(
    group: FakeBroker, client: millstream.Client
) -> None:
    with client.stream("t", group="g", commit_interval_s=0.02) as stream:
        message = stream.next(5)
        assert message is not None
        message.commit()
        place = ("g", "t", message.partition)
        other = ("g", "t", 1 - message.partition)
        group.wait_for(lambda: other in group.committed)  # the automatic commit has been
        assert group.committed[place] == 1


def test_what_the_broker_has_against_a_commit_is_raised(group: FakeBroker, client: millstream.Client) -> None:
    with client.stream("t", group="g", commit="manual") as stream:
        message = stream.next(5)
        assert message is not None
        group.call_errors["CommitOffsets"] = deque([StaleGeneration("moved on")])
        with pytest.raises(StaleGeneration):
            message.commit()


def test_a_partition_is_committed_and_told_before_it_is_given_up(group: FakeBroker, client: millstream.Client) -> None:
    story: list[tuple[str, list[TopicPartition], object]] = []

    def on_revoked(partitions: list[TopicPartition], lost: bool) -> None:
        story.append(("revoked", partitions, lost))
        # Committed already, and not released yet.
        assert all(("g", *place) in group.committed for place in partitions)
        assert set(partitions) <= member(group).owned

    stream = client.stream(
        "t", group="g", on_assigned=lambda p: story.append(("assigned", p, None)), on_revoked=on_revoked
    )
    messages = iter(stream)
    first = next(messages)
    kept = 1 - first.partition
    group.wait_for(lambda: len(member(group).owned) == 2)
    reassign(group, kept)
    eventually(lambda: stream._attention)
    assert next(messages).partition == kept
    group.wait_for(lambda: member(group).owned == {("t", kept)})
    assert stream.assignment() == [TopicPartition("t", kept)]
    assert story[0] == ("assigned", [T0, T1], None)
    assert story[1][:2] == ("revoked", [TopicPartition("t", 1 - kept)])
    stream.close()


def test_a_slow_handler_keeps_its_partition_and_its_membership(group: FakeBroker, client: millstream.Client) -> None:
    """Heartbeats go on, the partition stays listed, nobody else gets it, until the handler is done."""
    stream = client.stream("t", group="g", session_ms=1000)
    messages = iter(stream)
    message = next(messages)
    who = member(group)
    group.wait_for(lambda: len(who.owned) == 2)
    reassign(group, 1 - message.partition)
    before = who.heartbeats
    group.wait_for(lambda: who.heartbeats >= before + 3)  # while we are "handling"
    assert ("t", message.partition) in who.owned
    assert member(group) is who
    assert next(messages).partition != message.partition
    group.wait_for(lambda: who.owned == {("t", 1 - message.partition)})
    assert group.committed["g", "t", message.partition] == 1
    stream.close()


def test_a_partition_is_given_up_in_time_although_its_progress_cannot_be_committed(
    group: FakeBroker, client: millstream.Client
) -> None:
    """Such as on a full disk: without heartbeats the whole member would be removed."""
    with client.stream("t", group="g", session_ms=1000, rebalance_ms=300) as stream:
        message = stream.next(10)
        assert message is not None
        who = member(group)
        group.call_errors["CommitOffsets"] = deque([StorageFailed("full")] * 1000)
        reassign(group, 1 - message.partition)
        group.wait_for(lambda: who.owned == {("t", 1 - message.partition)})
        group.call_errors["CommitOffsets"].clear()


def test_a_handler_that_takes_too_long_loses_the_partition_but_not_its_membership(
    group: FakeBroker, client: millstream.Client
) -> None:
    revoked: list[tuple[list[TopicPartition], bool]] = []
    stream = client.stream(
        "t",
        group="g",
        session_ms=1000,
        rebalance_ms=300,
        on_revoked=lambda partitions, lost: revoked.append((partitions, lost)),
    )
    messages = iter(stream)
    message = next(messages)
    message = next(messages)
    who = member(group)
    group.wait_for(lambda: len(who.owned) == 2)
    reassign(group, 1 - message.partition)
    group.wait_for(lambda: who.owned == {("t", 1 - message.partition)})  # given up behind the handler's back
    assert group.committed["g", "t", message.partition] == 1
    assert next(messages).partition != message.partition
    assert revoked == [([TopicPartition("t", message.partition)], True)]
    stream.close()


def test_a_member_the_broker_forgot_joins_again_and_rereads_its_progress(
    group: FakeBroker, client: millstream.Client
) -> None:
    revoked: list[tuple[list[TopicPartition], bool]] = []
    stream = client.stream(
        "t",
        group="g",
        session_ms=1000,
        on_revoked=lambda partitions, lost: revoked.append((partitions, lost)),
        timeout_s=1.0,
    )
    messages = iter(stream)
    next(messages)
    group.committed = {("g", "t", 0): 9, ("g", "t", 1): 9}  # somebody else went on meanwhile
    group.members.clear()
    group.wait_for(lambda: len(group.members) == 1)
    assert sorted((message.partition, message.offset) for message in messages) == [(0, 9), (1, 9)]
    assert revoked[0] == ([T0, T1], True)
    stream.close()


def test_a_refused_join_is_raised_by_stream(group: FakeBroker, client: millstream.Client) -> None:
    group.call_errors["JoinGroup"] = deque([Unauthorized("not you")])
    with pytest.raises(Unauthorized):
        client.stream("t", group="g")


def test_closing_leaves_the_group(group: FakeBroker, client: millstream.Client) -> None:
    stream = client.stream("t", group="g")
    assert len(group.members) == 1
    stream.close()
    stream.close()
    assert not group.members


def test_new_partitions_of_a_group_are_picked_up_between_messages(group: FakeBroker, client: millstream.Client) -> None:
    group.grant = [("t", 0)]
    stream = client.stream("t", group="g", timeout_s=2.0)
    messages = iter(stream)
    assert next(messages).partition == 0
    reassign(group, 0, 1)
    seen = [next(messages) for _ in range(19)]
    assert {message.partition for message in seen} == {0, 1}
    stream.close()


def test_membership_commits_one_by_one_what_is_partly_stale(group: FakeBroker) -> None:
    """One partition that moved on must not keep the progress of the others from being recorded."""
    group.call_errors["CommitOffsets"] = deque([StaleGeneration("one of them")])
    settings = StreamSettings(
        topics=("t",),
        group="g",
        start="earliest",
        partitions=None,
        commit="auto",
        commit_interval_s=0.02,
        strategy="sticky",
        protocol="cooperative",
        instance_id=None,
        session_ms=1000,
        rebalance_ms=1000,
        max_bytes=1000,
        timeout_s=None,
        on_assigned=None,
        on_revoked=None,
        on_damage="raise",
    )
    target = Target.of(group.address, client_id=None, key=None, timeout_s=5)
    progress = Progress(None, {T0: 3, T1: 4})
    membership = Membership(target, settings, on_change=lambda: None, progress=lambda: progress)
    membership.start()
    membership.wait_joined(5)
    membership.took(membership.changes(set(), 0).take)
    group.wait_for(lambda: group.committed == {("g", "t", 0): 3, ("g", "t", 1): 4})
    membership.stop()

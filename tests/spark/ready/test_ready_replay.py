"""`replay`: what an archive or a topic has, sent again."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millstream.client import Outgoing
from millstream.spark.pipelines.ready import replay
from millstream.spark.pipelines.ready.archive import dated
from millstream.spark.pipelines.ready.shelves import ParquetShelf
from tests.spark.ready.running import Ready
from tests.spark.world import World

MOMENT = datetime(2026, 11, 16, 8, tzinfo=UTC)


def fill(world: World, topic: str, count: int) -> None:
    """A message a minute, each with everything that it can have."""
    world.publish(
        topic,
        [
            Outgoing(
                value=b"%d" % n,
                key=b"k%d" % (n % 3),
                headers={"n": str(n)},
                priority=n % 5,
                timestamp=MOMENT + timedelta(minutes=n),
            )
            for n in range(count)
        ],
    )


def archived(ready: Ready, topic: str) -> None:
    options = {"bootstrap.servers": ready.address, "subscribe": topic}
    included = dict.fromkeys(("includeHeaders", "includePriority", "includeId"), "true")
    rows = ready.spark.read.format("millstream").options(**options, **included).load()
    ParquetShelf(str(ready.directory / "archive"), 0, 1_000_000).add(dated(rows), 0)


def sent(world: World, topic: str) -> list[Any]:
    """All that is there, without waiting for more to come."""
    there = sum(partition.next_offset - partition.start_offset for partition in world.client.topic(topic).partitions)
    with world.client.stream(topic, timeout_s=30) as stream:
        return list(islice(stream, there))


def test_a_time_of_an_archive_goes_out_in_its_order_with_all_it_had(ready: Ready, world: World) -> None:
    topic, again = world.topic(2), world.topic()
    fill(world, topic, 60)
    archived(ready, topic)
    since, until = MOMENT + timedelta(minutes=10), MOMENT + timedelta(minutes=40)
    count = ready.run("replay", archive="archive", since=since.isoformat(), until=until.isoformat(), to=again)
    assert count == 30
    messages = sent(world, again)
    assert [message.value for message in messages] == [b"%d" % n for n in range(10, 40)]
    message = messages[7]
    assert (message.key, message.headers["n"], message.timestamp) == (b"k2", "17", MOMENT + timedelta(minutes=17))
    read = ready.spark.read.format("millstream").options(**world.options(again, includePriority="true")).load()
    assert [row["priority"] for row in read.orderBy("offset").collect()] == [n % 5 for n in range(10, 40)]


@pytest.mark.parametrize("bursts", [12, pytest.param(1100, marks=pytest.mark.slow)])
def test_messages_stay_in_their_order_however_many_bursts_they_make(spark: Any, tmp_path: Path, bursts: int) -> None:
    replay._Plan(tmp_path).make(spark.range(bursts).coalesce(1), 1)
    plan = replay._Plan(tmp_path)
    assert [pq.read_table(file)["id"][0].as_py() for _, file, _ in plan.left()] == list(range(bursts))


def test_a_replay_notes_each_burst_by_a_line_and_reads_notes_of_every_form(tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    document = {"run": "r", "files": [[f"r/{n}", 10] for n in range(4)], "sent": [[0, 10, 1.5]]}
    progress.write_text(json.dumps(document))  # as earlier versions wrote it

    def left() -> list[int]:
        return [number for number, _, _ in replay._Plan(tmp_path).left()]

    assert left() == [1, 2, 3]
    plan = replay._Plan(tmp_path)
    plan.note(1, 10, 2.5)
    first = progress.read_text()
    plan.note(2, 10, 3.5)
    assert progress.read_text() == f"{first}[2, 10, 3.5]\n", "what is there is not written again"
    assert left() == [3]
    progress.write_text(progress.read_text()[:-5])  # the power was gone
    assert left() == [2, 3]
    replay._Plan(tmp_path).note(2, 10, 4.5)
    assert left() == [3]
    assert replay._Plan(tmp_path).sent == [(0, 10, 1.5), (1, 10, 2.5), (2, 10, 4.5)]
    assert replay._Plan(tmp_path).run == "r"


def test_files_are_in_the_order_of_their_numbers_which_have_a_digit_more_from_the_thousandth_on() -> None:
    """As Spark names them, which takes as long as to write them."""
    run = "3a0e5c1f-0d0f-4c66-9c8b-6d0b4e8a6f11"
    numbers = [(task, file) for task in (0, 2, 99_999, 100_000) for file in (0, 9, 10, 999, 1000, 1001, 10_000)]
    files = [Path(f"part-{task:05}-{run}-c{file:03}.snappy.parquet") for task, file in numbers]
    by_name = sorted(files)
    assert by_name != files
    assert sorted(by_name, key=replay._place_of) == files


def test_an_archive_in_delta_is_what_its_table_says(ready: Ready, world: World) -> None:
    topic, again = world.topic(), world.topic()
    for n in range(3):
        world.publish(topic, [Outgoing(value=b"%d" % n, timestamp=MOMENT + timedelta(minutes=n))])
        ready.run("archive", topics=topic, to="archive", format="delta", compact_files=3, checkpoint="archived")
    chosen = {"since": MOMENT.isoformat(), "where": "date = '2026-11-16'"}
    assert ready.run("replay", archive="archive", to=again, **chosen) == 3
    assert [message.value for message in sent(world, again)] == [b"0", b"1", b"2"]


def test_times_of_another_zone_choose_the_same_messages(ready: Ready, world: World) -> None:
    topic, again = world.topic(), world.topic()
    fill(world, topic, 24 * 60)
    archived(ready, topic)
    # In both zones it is another day than in UTC.
    early, late = timezone(timedelta(hours=5)), timezone(timedelta(hours=-5))
    midnight = MOMENT + timedelta(hours=16)
    since, until = (midnight - timedelta(hours=1)).astimezone(early), (midnight + timedelta(hours=1)).astimezone(late)
    count = ready.run("replay", archive="archive", since=since.isoformat(), until=until.isoformat(), to=again)
    assert count == 120
    assert [message.value for message in sent(world, again)] == [b"%d" % n for n in range(15 * 60, 17 * 60)]


def test_messages_that_came_before_the_time_they_have_are_chosen_by_that_time(ready: Ready, world: World) -> None:
    topic, again = world.topic(), world.topic()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    world.publish(topic, [Outgoing(value=b"%d" % n, timestamp=tomorrow + timedelta(hours=n)) for n in range(5)])
    since = tomorrow + timedelta(hours=2)
    assert ready.run("replay", topics=topic, since=since.isoformat(), to=again) == 3
    assert [message.value for message in sent(world, again)] == [b"2", b"3", b"4"]


def test_messages_beyond_the_year_9999_are_in_the_time_behind_every_other(ready: Ready, world: World) -> None:
    topic, again = world.topic(), world.topic()
    fill(world, topic, 2)
    world.publish(topic, [Outgoing(value=b"late", timestamp=MOMENT.timestamp() * 1000)])
    archived(ready, topic)
    since = MOMENT + timedelta(minutes=1)
    assert ready.run("replay", archive="archive", since=since.isoformat(), to=again) == 2
    assert [message.value for message in sent(world, again)] == [b"1", b"late"]


@pytest.mark.slow
def test_no_more_goes_out_than_the_rate_allows(ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, again = world.topic(), world.topic()
    fill(world, topic, 250)
    waits: list[float] = []
    monkeypatch.setattr(replay, "_wait_until", lambda moment_s, _: waits.append(moment_s - time.monotonic()))
    assert ready.run("replay", topics=topic, to=again, rate=20, where="priority < 5", report="report.html") == 250
    # Bursts of a hundred, which at 20 a second are five seconds each; the next one may begin while Spark gets ready.
    assert waits[0] == pytest.approx(5, abs=0.2)
    assert 2 < waits[1] < 5
    assert waits[2] < 2.5
    assert len(sent(world, again)) == 250
    assert "Messages sent" in ready.page


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(False, id="before it is published", marks=pytest.mark.slow),
        pytest.param(True, id="before it is written down"),
    ],
)
def test_a_replay_that_was_interrupted_goes_on_and_sends_nothing_twice(
    ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    topic, again = world.topic(), world.topic()
    fill(world, topic, 250)
    note = replay._Plan.note
    messages = replay.Replay._messages

    def crash(*arguments: Any) -> Any:
        if (published and arguments[1] == 1) or (not published and "done" in crashed):
            raise RuntimeError("the power is gone")
        crashed.append("done")
        return (note if published else messages)(*arguments)

    crashed: list[str] = []
    monkeypatch.setattr(replay, "_wait_until", lambda *_: None)
    options: dict[str, Any] = {"topics": topic, "to": again, "rate": 100, "checkpoint": "c"}
    with monkeypatch.context() as patch:
        owner, name = (replay._Plan, "note") if published else (replay.Replay, "_messages")
        patch.setattr(owner, name, crash)
        with pytest.raises(RuntimeError, match="the power is gone"):
            ready.run("replay", **options)
    assert ready.run("replay", **options) == 150
    assert [message.value for message in sent(world, again)] == [b"%d" % n for n in range(250)]
    assert ready.run("replay", **options) == 0  # it is over
    assert sum(rows for _, rows, _ in replay._Plan(ready.directory / "c/replay").sent) == 250


@pytest.mark.slow
def test_a_replay_that_is_stopped_ends_after_its_burst_and_goes_on_later(
    ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_wait_until", lambda *_: None)
    topic, again = world.topic(), world.topic()
    fill(world, topic, 250)

    def one_is_sent() -> bool:
        return bool(replay._Plan(ready.directory / "checkpoint" / "replay").sent)

    options = {"topics": topic, "to": again, "rate": 100}
    assert ready.run("replay", one_is_sent, **options) == 100
    assert ready.run("replay", **options, report="replay.html") == 150
    assert [message.value for message in sent(world, again)] == [b"%d" % n for n in range(250)]


def test_without_a_target_each_goes_where_it_came_from(ready: Ready, world: World) -> None:
    topic = world.topic(2)
    fill(world, topic, 10)
    archived(ready, topic)
    assert ready.run("replay", archive="archive", where="cast(value as string) < '3'", timestamps="now") == 3
    values = sorted(message.value for message in sent(world, topic))
    assert values == sorted([b"%d" % n for n in range(10)] + [b"0", b"1", b"2"])

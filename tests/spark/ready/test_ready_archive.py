"""`archive`: one row per offset, whatever happens on the way."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millstream.client import Outgoing
from millstream.ids import parse_message_id
from millstream.spark.pipelines.ready import shelves
from millstream.spark.pipelines.ready.archive import dated
from millstream.spark.pipelines.ready.shelves import DeltaShelf, ParquetShelf, Shelf
from tests.spark.ready.running import Ready
from tests.spark.world import World

MIDNIGHT = datetime(2026, 11, 16, tzinfo=UTC)
delta = pytest.mark.skipif(importlib.util.find_spec("deltalake") is None, reason="deltalake is not installed")


def messages(first: int, until: int) -> list[Outgoing]:
    """A minute apart, from ten minutes before midnight on."""
    return [
        Outgoing(
            value=None if n % 7 == 0 else b"value %d" % n,
            key=None if n % 5 == 0 else b"key %d" % n,
            headers={"n": str(n)},
            timestamp=MIDNIGHT + timedelta(minutes=n - 10),
        )
        for n in range(first, until)
    ]


def rows(ready: Ready, path: str = "archive") -> list[Any]:
    """As anybody reads it, who has never heard of us."""
    import pyarrow.dataset as dataset

    root = ready.directory / path
    if (root / "_delta_log").exists():
        import deltalake

        table = deltalake.DeltaTable(str(root)).to_pyarrow_table()
    else:
        table = dataset.dataset(root, format="parquet", partitioning="hive").to_table()
    found = table.to_pylist()
    return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def offsets(ready: Ready) -> Counter[tuple[int, int]]:
    return Counter((row["partition"], row["offset"]) for row in rows(ready))


def stand(ready: Ready, form: str = "parquet", compact_files: int = 0) -> Shelf:
    """The archive without the stream: batches come by hand, and as often as one likes."""
    kind = ParquetShelf if form == "parquet" else DeltaShelf
    return kind(str(ready.directory / "archive"), compact_files, 128_000_000)


def batch(ready: Ready, topic: str) -> Any:
    """Everything that is in a topic now."""
    options = {"bootstrap.servers": ready.address, "subscribe": topic}
    included = dict.fromkeys(("includeHeaders", "includePriority", "includeId"), "true")
    session = ready.spark.newSession()
    session.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
    return dated(session.read.format("millstream").options(**options, **included).load())


def files(ready: Ready, date: str = "*") -> list[Path]:
    return sorted((ready.directory / "archive").glob(f"date={date}/*.parquet"))


@pytest.mark.parametrize("form", ["parquet", pytest.param("delta", marks=[delta, pytest.mark.slow])])
def test_every_message_is_one_row_with_everything_it_has(ready: Ready, world: World, form: str) -> None:
    topic = world.topic(2)
    sent = messages(0, 20)
    world.publish(topic, sent)
    ready.run("archive", topics=topic, to="archive", format=form)
    found = rows(ready)
    assert len(found) == 20
    assert Counter((row["key"], row["value"], row["timestamp"]) for row in found) == Counter(
        (message.key, message.value, message.timestamp) for message in sent
    )
    for row in found:
        assert row["date"] == row["timestamp"].strftime("%Y-%m-%d")
        assert row["headers"][0]["key"] == "n"
        assert parse_message_id(row["id"]).offset == row["offset"]
    assert Counter(row["date"] for row in found) == {"2026-11-15": 10, "2026-11-16": 10}


@pytest.mark.parametrize("form", ["parquet", pytest.param("delta", marks=[delta, pytest.mark.slow])])
def test_a_second_run_adds_only_what_is_new_even_without_its_checkpoint(ready: Ready, world: World, form: str) -> None:
    topic = world.topic(2)
    for first, checkpoint in ((0, "one"), (10, "one"), (20, "another")):
        world.publish(topic, messages(first, first + 10))
        ready.run("archive", topics=topic, to="archive", format=form, checkpoint=checkpoint)
    assert len(rows(ready)) == 30
    assert set(offsets(ready).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", pytest.param("delta", marks=delta)])
def test_a_topic_that_is_made_again_begins_again(ready: Ready, world: World, form: str) -> None:
    topic = world.topic()
    world.publish(topic, [b"first life"])
    ready.run("archive", topics=topic, to="archive", format=form)
    world.client.delete_topic(topic)
    world.client.create_topic(topic)
    world.publish(topic, [b"second life"])
    ready.run("archive", topics=topic, to="archive", format=form, checkpoint="another")
    assert sorted(row["value"] for row in rows(ready)) == [b"first life", b"second life"]


@pytest.mark.parametrize(
    "point", [pytest.param("_stage", marks=pytest.mark.slow), "_commit", pytest.param("_apply", marks=pytest.mark.slow)]
)
def test_a_crash_at_any_point_loses_nothing_and_doubles_nothing(
    ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Before anything is decided; before it is written down; when it is written down and nothing is done yet."""
    topic = world.topic(2)
    world.publish(topic, messages(0, 20))

    def crash(*_: Any, **__: Any) -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(shelves.ParquetShelf, point, crash)
        with pytest.raises(RuntimeError, match="the power is gone"):
            stand(ready).add(batch(ready, topic), 0)
    assert files(ready) == []
    stand(ready).add(batch(ready, topic), 0)
    assert len(rows(ready)) == 20
    assert set(offsets(ready).values()) == {1}


@pytest.mark.slow
def test_a_crash_between_two_files_is_made_good(ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written down is done to the end, and once."""
    topic = world.topic(2)
    world.publish(topic, messages(0, 20))
    moved: list[Path] = []
    replace = Path.replace

    def once(self: Path, target: Path) -> Path:
        if self.suffix == ".parquet":
            moved.append(self)
            if len(moved) == 2:
                raise RuntimeError("the power is gone")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", once)
        with pytest.raises(RuntimeError, match="the power is gone"):
            stand(ready).add(batch(ready, topic), 0)
    assert len(files(ready)) == 1
    stand(ready).add(batch(ready, topic), 0)
    assert len(rows(ready)) == 20
    assert set(offsets(ready).values()) == {1}


@pytest.mark.slow
def test_small_files_become_few(ready: Ready, world: World) -> None:
    topic = world.topic()
    for first in range(10, 13):
        world.publish(topic, messages(first, first + 1))
        stand(ready, compact_files=3).add(batch(ready, topic), first)
        assert len(files(ready)) == (first - 9 if first < 12 else 1)
    assert [row["offset"] for row in rows(ready)] == list(range(3))
    assert {row["date"] for row in rows(ready)} == {"2026-11-16"}
    stand(ready, compact_files=3).add(batch(ready, topic), 13)
    assert len(rows(ready)) == 3


def test_a_crash_while_files_are_compacted_is_made_good(
    ready: Ready, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    world.publish(topic, messages(10, 12))
    stand(ready).add(batch(ready, topic), 0)
    world.publish(topic, messages(12, 14))
    apply = shelves.ParquetShelf._apply

    def crash(self: shelves.ParquetShelf, pending: Any) -> None:
        if pending["remove"]:
            raise RuntimeError("the power is gone")
        apply(self, pending)

    with monkeypatch.context() as patch:
        patch.setattr(shelves.ParquetShelf, "_apply", crash)
        with pytest.raises(RuntimeError, match="the power is gone"):
            stand(ready, compact_files=2).add(batch(ready, topic), 1)
    assert json.loads((ready.directory / "archive/_archive/pending.json").read_text())["remove"]
    stand(ready, compact_files=2).add(batch(ready, topic), 1)
    assert len(files(ready)) == 1
    assert [row["offset"] for row in rows(ready)] == [0, 1, 2, 3]


@delta
@pytest.mark.slow
def test_a_delta_table_is_compacted_too(ready: Ready, world: World) -> None:
    import deltalake

    topic = world.topic()
    for first in range(10, 14):
        world.publish(topic, messages(first, first + 1))
        ready.run("archive", topics=topic, to="archive", format="delta", compact_files=4)
    assert len(deltalake.DeltaTable(str(ready.directory / "archive")).file_uris()) == 1
    world.publish(topic, messages(14, 15))
    ready.run("archive", topics=topic, to="archive", format="delta", compact_files=4)
    assert [row["offset"] for row in rows(ready)] == [0, 1, 2, 3, 4]

"""What the broker knows, read as tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.client import Client, Outgoing
from millstream.errors import InvalidArgument
from millstream.spark import table_rows
from millstream.spark.connection import connect
from millstream.spark.options import Target
from millstream.spark.tables import TABLES, FilteringTableReader, TableReader
from millstream.testing.broker import BrokerForTests
from millstream.wire.calls import CommitOffsets, OffsetEntry
from tests.spark.reading import source
from tests.waiting import eventually

DAY = datetime(2040, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    """Two topics, each with letters, schedules, groups and a queue."""
    with BrokerForTests() as broker:
        fill(broker.connect(), broker.address)
        yield broker


def fill(client: Client, address: str) -> None:
    for topic in ("orders", "bills"):
        client.create_topic(topic, 2)
        client.publish_many(
            topic, [Outgoing(value=f"{topic} {n}", key=f"k{n}", headers={"n": str(n)}) for n in range(10)]
        )
        with client.queue(topic, group="workers", timeout_s=5) as queue:
            for message in queue.lease(10, wait="5s"):
                if message.text.endswith("7"):
                    message.reject(f"cannot work on {message.text}")
                elif not message.text.endswith("8"):
                    message.ack()
        wait_for_letters(client, topic)
        offsets = [OffsetEntry(topic=topic, partition=number, offset=1) for number in range(2)]
        connect(Target((address,))).call(CommitOffsets(group="readers", offsets=offsets))
        for n in range(5):
            client.publish(topic, f"later {n}", key=f"k{n}", deliver_at=DAY + timedelta(hours=n))


def wait_for_letters(client: Client, topic: str) -> None:
    """Letters are written after they are decided on."""
    eventually(lambda: client.dead_letters.list(topic=topic))


def reader(broker: BrokerForTests, table: str, *columns: str, **options: str) -> TableReader:
    made = source({"bootstrap.servers": broker.address, "table": table, **options})
    schema = from_arrow_schema(TABLES[table].arrow_schema(columns or TABLES[table].columns))
    found = made.reader(schema)
    assert isinstance(found, TableReader)
    return found


def rows_of(found: TableReader) -> list[dict[str, Any]]:
    return [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]


def rows(broker: BrokerForTests, table: str, *columns: str, **options: str) -> list[dict[str, Any]]:
    return rows_of(reader(broker, table, *columns, **options))


def test_dead_letters_come_with_their_story(broker: BrokerForTests) -> None:
    (row,) = rows(broker, "dead_letters", subscribe="orders")
    (letter,) = broker.connect().dead_letters.list(topic="orders")
    assert (row["id"], row["originalId"], row["topic"]) == (letter.id, letter.original_id, "orders")
    assert (row["value"], row["key"], row["headers"]) == (b"orders 7", b"k7", [{"key": "n", "value": b"7"}])
    assert (row["group"], row["reason"], row["error"]) == ("workers", "REJECTED", "cannot work on orders 7")
    assert (row["letterTopic"], row["deliveries"]) == ("orders.dlq", 1)
    assert row["keptUntil"] == datetime.fromtimestamp(letter.kept_until_ms / 1000, UTC)
    assert row["died"] == datetime.fromtimestamp(letter.dead_ms / 1000, UTC)
    (attempt,) = row["attempts"]
    assert (attempt["kind"], attempt["reason"]) == ("reject", "cannot work on orders 7")
    assert attempt["delivered"] <= attempt["ended"] <= row["died"]


def test_a_value_of_any_length_is_whole(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.publish("long", "x" * 100_000)
    with client.queue("long", timeout_s=5) as queue:
        queue.lease(1, wait="5s")[0].reject("too long")
    wait_for_letters(client, "long")
    (row,) = rows(broker, "dead_letters", "value", subscribe="long")
    assert row == {"value": b"x" * 100_000}


def test_pages_follow_each_other(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "_PAGE", 1)
    assert {row["topic"] for row in rows(broker, "dead_letters", "topic")} >= {"orders", "bills"}
    events = rows(broker, "passports", subscribe="orders")
    monkeypatch.undo()
    assert events == rows(broker, "passports", subscribe="orders")


def test_schedules_are_all_there_even_when_many_are_due_at_once(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = broker.connect()
    client.create_topic("crowd", 3)
    for due in (DAY, DAY + timedelta(hours=1)):
        client.publish_many("crowd", [Outgoing(value="x", key=f"k{n}", deliver_at=due) for n in range(50)])
    monkeypatch.setattr(table_rows, "_SCHEDULES_PAGE", 7)
    found = rows(broker, "schedules", "id", "due", "partition", subscribe="crowd")
    assert len({row["id"] for row in found}) == len(found) == 100
    assert {row["partition"] for row in found} == {0, 1, 2}
    assert [row["due"] for row in found] == [DAY] * 50 + [DAY + timedelta(hours=1)] * 50


def test_schedules_are_chosen_by_topic_and_time(broker: BrokerForTests) -> None:
    hour_ms = 3_600_000
    start = int(DAY.timestamp() * 1000)
    window = {"startingTimestamp": str(start + hour_ms), "endingTimestamp": str(start + 3 * hour_ms)}
    found = rows(broker, "schedules", "topic", "due", "key", subscribePattern="ord.*", **window)
    assert found == [{"topic": "orders", "due": DAY + timedelta(hours=n), "key": b"k%d" % n} for n in (1, 2)]


def test_groups_say_how_far_they_are(broker: BrokerForTests) -> None:
    found = rows(broker, "groups", subscribe="orders")
    assert [(row["group"], row["partition"]) for row in found] == [("readers", 0), ("readers", 1)]
    assert [row["committed"] for row in found] == [1, 1]
    assert sum(row["lag"] for row in found) == 8
    assert sum(row["end"] for row in found) == 10


def test_queues_say_what_became_of_their_messages(broker: BrokerForTests) -> None:
    (row,) = rows(broker, "queues", subscribe="orders")
    assert (row["topic"], row["group"], row["paused"]) == ("orders", "workers", False)
    assert (row["depth"], row["acked"], row["dead"], row["leased"]) == (1, 8, 1, 0)


def test_passports_say_what_happened(broker: BrokerForTests) -> None:
    found = rows(broker, "passports", subscribe="bills")
    (rejected,) = [row for row in found if row["event"] == "rejected"]
    assert (rejected["topic"], rejected["key"], rejected["group"]) == ("bills", b"k7", "workers")
    assert rejected["error"] == "cannot work on bills 7"
    assert {row["topic"] for row in found} == {"bills"}


def test_topics_say_what_they_hold(broker: BrokerForTests) -> None:
    found = rows(broker, "topics", subscribe="orders,bills")
    assert [(row["topic"], row["partition"]) for row in found] == [
        ("bills", 0),
        ("bills", 1),
        ("orders", 0),
        ("orders", 1),
    ]
    assert sum(row["messages"] for row in found) == 20
    assert all(row["endOffset"] - row["startOffset"] == row["messages"] for row in found)
    assert rows(broker, "topics", "topic", "partition", assign='{"orders": [1]}') == [
        {"topic": "orders", "partition": 1}
    ]


@pytest.mark.parametrize("table", TABLES)
def test_every_table_can_be_read_in_any_order_of_its_columns(broker: BrokerForTests, table: str) -> None:
    names = tuple(TABLES[table].columns)
    whole, turned = rows(broker, table), rows(broker, table, *reversed(names))
    assert whole
    steady = [name for name in names if name not in ("lagMs", "oldestMs")]
    assert [[row[name] for name in steady] for row in whole] == [[row[name] for name in steady] for row in turned]


@pytest.mark.parametrize("table", TABLES)
def test_a_broker_without_anything_has_empty_tables(table: str) -> None:
    with BrokerForTests() as empty:
        assert rows(empty, table) == []


def test_conditions_of_a_query_go_to_the_broker(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    letters = table_rows._letters
    monkeypatch.setattr(table_rows, "_letters", lambda c, wanted: asked.append(wanted) or letters(c, wanted))
    found = reader(broker, "dead_letters", pushdown="true")
    assert isinstance(found, FilteringTableReader)
    since, until = datetime(2020, 1, 1, tzinfo=UTC), DAY
    filters = [
        In(("topic",), ("orders", "bills")),
        EqualTo(("topic",), "orders"),
        EqualTo(("reason",), "REJECTED"),
        GreaterThanOrEqual(("died",), since),
        LessThan(("died",), until),
        EqualTo(("deliveries",), 1),
    ]
    assert list(found.pushFilters(filters)) == filters
    assert [row["value"] for row in rows_of(found)] == [b"orders 7"]
    (wanted,) = asked
    assert (wanted.topic, wanted.reason) == ("orders", "REJECTED")
    assert (wanted.since_ms, wanted.until_ms) == (1_577_836_800_000, int(until.timestamp() * 1000) + 1)


LONG_AGO, LONG_AFTER = datetime(1969, 7, 20, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("table", "condition", "some"),
    [
        *((table, In(("topic",), ("orders", None)), True) for table in TABLES),
        *((table, In(("topic",), ("orders", "gone", "orders.#", "no good")), True) for table in TABLES),
        *((table, EqualTo(("topic",), "gone"), False) for table in TABLES),
        ("dead_letters", EqualTo(("reason",), "foo"), False),
        ("dead_letters", In(("reason",), ("foo", "REJECTED", None)), True),
        ("dead_letters", EqualTo(("group",), "a b!"), False),
        ("dead_letters", In(("group",), ("", "workers")), True),
        *(
            (table, LessThan((time,), moment), moment is LONG_AFTER)
            for table, time in (("dead_letters", "died"), ("passports", "time"), ("schedules", "due"))
            for moment in (LONG_AGO, LONG_AFTER)
        ),
        ("schedules", GreaterThanOrEqual(("due",), LONG_AGO), True),
    ],
)
def test_conditions_that_go_to_the_broker_find_what_spark_would(
    broker: BrokerForTests, table: str, condition: Any, some: bool
) -> None:
    """Which is nothing where there is nothing, and no error."""
    (column,) = condition.attribute

    def holds(row: dict[str, Any]) -> bool:
        value = row[column]
        if isinstance(condition, LessThan):
            return bool(value is not None and value < condition.value)
        if isinstance(condition, GreaterThanOrEqual):
            return bool(value is not None and value >= condition.value)
        return value is not None and value in (condition.value if isinstance(condition, In) else (condition.value,))

    found = reader(broker, table, pushdown="true")
    assert isinstance(found, FilteringTableReader)
    list(found.pushFilters([condition]))
    shown = [name for name in TABLES[table].columns if name not in ("lagMs", "oldestMs", "attempts", "headers")]
    answered = [[row[name] for name in shown] for row in rows_of(found) if holds(row)]
    expected = [[row[name] for name in shown] for row in rows(broker, table) if holds(row)]
    assert sorted(answered, key=str) == sorted(expected, key=str)
    assert bool(answered) == some


def test_unless_spark_is_set_to_push_them_down_there_are_no_conditions() -> None:
    """A reader that could take them makes every query fail where that is off."""
    assert "pushFilters" not in vars(TableReader)


def test_mistakes_are_told_in_a_sentence(broker: BrokerForTests) -> None:
    made = source({"bootstrap.servers": broker.address, "table": "dead_leters"})
    with pytest.raises(InvalidArgument, match=r"there is no table 'dead_leters'; did you mean 'dead_letters'\?"):
        made.schema()
    topics = source({"bootstrap.servers": broker.address, "table": "topics"})
    schema = from_arrow_schema(TABLES["topics"].arrow_schema(["topic"]))
    with pytest.raises(InvalidArgument, match="read as a batch"):
        topics.streamReader(schema)
    schema.fields[0].name = schema.names[0] = "tpic"
    with pytest.raises(InvalidArgument, match=r"table 'topics' has no column 'tpic'; did you mean 'topic'\?"):
        topics.reader(schema)
    with pytest.raises(InvalidArgument, match="option table needs a broker"):
        source({"path": "/nowhere", "table": "topics"}).schema()


@pytest.mark.parametrize(
    ("table", "options", "sentence"),
    [
        ("groups", {"startingTimestamp": "5"}, "table 'groups' has no times: leave option startingTimestamp out"),
        ("topics", {"endingTimestamp": "5"}, "table 'topics' has no times: leave option endingTimestamp out"),
        ("dead_letters", {"startingOffsets": "latest"}, "a table has no offsets: rows are chosen by startingTimestamp"),
        ("dead_letters", {"endingOffsets": '{"a":{"0":5}}'}, "rows are chosen by endingTimestamp"),
        ("passports", {"startingOffsetsByTimestamp": '{"a":{"0":5}}'}, "rows are chosen by startingTimestamp"),
        ("schedules", {"claim": "billing"}, "option claim does not go with a table"),
        ("queues", {"groupId": "billing"}, "option groupId does not go with a table"),
    ],
)
def test_an_option_that_would_leave_nothing_out_is_a_mistake(
    table: str, options: dict[str, str], sentence: str
) -> None:
    made = source({"bootstrap.servers": "localhost:1", "table": table, **options})
    with pytest.raises(InvalidArgument, match=sentence):
        made.reader(from_arrow_schema(TABLES[table].arrow_schema(["topic"])))
    fine = source({"bootstrap.servers": "localhost:1", "table": table, "startingOffsets": "earliest"})
    fine.reader(from_arrow_schema(TABLES[table].arrow_schema(["topic"])))


def test_the_guide_has_every_column_of_every_table() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "spark-tables.md"
    sections = guide.read_text().split("## `")[1:]
    documented = {}
    for section in sections:
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        documented[section.split("`")[0]] = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert documented == {name: list(table.columns) for name, table in TABLES.items()}

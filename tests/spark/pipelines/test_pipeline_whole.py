"""Whole pipelines, from their files to what they leave behind, with a real Spark session and a real broker."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import pipeline_run
from millstream.cli.main import main
from millstream.errors import ConfigInvalid
from millstream.spark.pipelines import runner
from millstream.spark.pipelines.loading import load_pipeline
from millstream.spark.pipelines.progress import BatchDone, Standing
from tests.spark.world import World


@pytest.fixture(autouse=True)
def _session_stays(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session belongs to all tests, and none of them waits for the next look at a query or the next report."""
    monkeypatch.setattr(pipeline_run, "session", lambda *_, **__: spark)
    monkeypatch.setattr(pipeline_run, "_end", lambda _: None)
    monkeypatch.setattr(runner, "_LOOK_S", 0.05)
    monkeypatch.setattr(runner, "_REPORT_S", 0.2)


class Bench:
    """A directory with a pipeline in it."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.file = directory / "pipeline.yaml"

    def write(self, text: str) -> None:
        head = f"name: {self.name}\nbroker: {self.world.broker.address}\ncheckpoint: checkpoint\n"
        self.file.write_text(f"{head}restart: {{attempts: 0}}\n{text}")

    @property
    def name(self) -> str:
        return self.directory.name

    def run(self, until: Any = "available-now", **more: Any) -> Standing:
        checked = load_pipeline(self.file)
        return pipeline_run.run_pipeline(checked, until=until, master=None, conf={}, as_json=True, **more)

    def read(self, topic: str) -> list[Any]:
        """What is in a topic now, as JSON."""
        return [json.loads(message.value or b"null") for message in self.messages(topic)]

    def messages(self, topic: str) -> list[Any]:
        return self.world.client.browse(topic, limit=1000)


@pytest.fixture
def bench(world: World, tmp_path: Path) -> Bench:
    return Bench(world, tmp_path)


def test_a_pipeline_cleans_routes_and_archives_each_message_once(spark: Any, bench: Bench) -> None:
    world = bench.world
    orders, europe, rest = world.topic(2), world.topic(), world.topic()
    countries = spark.createDataFrame([("DE", "eu"), ("US", "us")], "code string, region string")
    countries.write.parquet(str(bench.directory / "countries"))
    bench.write(f"""
sources:
  orders: {{topic: {orders}, options: {{startingOffsets: earliest, maxOffsetsPerTrigger: 15}}}}
  countries: {{parquet: countries}}
steps:
  - name: parsed
    from: orders
    convert: {{from: json, to: columns, schema: "id bigint, country string"}}
    dead_letter: true
  - enrich: {{lookup: {{from: countries, match: {{country: code}}}}, headers: {{cleaned: "yes"}}}}
  - redact: {{fields: {{email: mask}}}}
  - name: routed
    route: {{topics: {{{europe}: "region = 'eu'"}}, otherwise: {rest}}}
sinks:
  - {{topic_column: route}}
  - {{parquet: archive, from: parsed, partition_by: country}}
""")

    def order(number: int) -> bytes:
        country = "DE" if number % 3 else "US"
        return b"broken" if number == 5 else json.dumps({"id": number, "country": country, "email": "a@b"}).encode()

    world.publish(orders, [order(number) for number in range(20)])
    standing = bench.run()
    assert (standing.state, standing.error) == ("finished", "")
    told = world.client.pipelines.show(bench.name)
    assert (told.state, told.sources[0], told.lag) == ("finished", orders, 0)
    assert told.rows == 40, "each of the two queries reads all of them"
    (letter,) = world.client.dead_letters.list(topic=orders)
    assert (letter.value, letter.error, letter.group) == (b"broken", "the value is not JSON of the schema", bench.name)

    world.publish(orders, [order(number) for number in range(20, 30)])
    assert bench.run().state == "finished"
    numbers = set(range(30)) - {5}
    assert Counter(order["id"] for order in bench.read(europe)) == Counter(number for number in numbers if number % 3)
    assert Counter(order["id"] for order in bench.read(rest)) == Counter(number for number in numbers if not number % 3)
    message = bench.messages(europe)[0]
    assert json.loads(message.value)["email"] == "***"
    assert ("cleaned", b"yes") in message.headers
    archived = spark.read.parquet(str(bench.directory / "archive"))
    assert Counter(row.id for row in archived.select("id").collect()) == Counter(numbers)


def test_sql_and_functions_are_steps_and_columns_become_json(spark: Any, bench: Bench) -> None:
    (bench.directory / "doubling.py").write_text(
        "from pyspark.sql import functions as F\n"
        "def times(number, by):\n    return number * by\n"
        "def double(rows, *, by):\n"
        "    # runs in workers, which find the module because the pipeline sends it to them\n"
        "    return rows.withColumn('total', F.udf(lambda number: times(number, by), 'bigint')(rows.total))\n"
    )
    source, target = bench.world.topic(), bench.world.topic()
    bench.write(f"""
sources:
  sales: {{topic: {source}, options: {{startingOffsets: earliest}}}}
steps:
  - name: parsed
    sql: SELECT get_json_object(cast(value AS string), '$.shop') AS shop, offset AS total FROM Sales
  - {{python: "doubling:double", arguments: {{by: 10}}}}
sinks:
  - {{topic: {target}, key: shop}}
""")
    bench.world.publish(source, [b'{"shop":"a"}', b'{"shop":"b"}'])
    assert bench.run().state == "finished"
    found = [(message.key, json.loads(message.value)) for message in bench.messages(target)]
    assert sorted(found) == [(b"a", {"shop": "a", "total": 0}), (b"b", {"shop": "b", "total": 10})]


DICE = """
import random
import pyspark.sql.functions as F

def throw(rows):
    bad = F.udf(lambda: "the die says no" if random.random() < 0.5 else None, "string").asNondeterministic()
    return rows.withColumn("_error", bad())
"""


def test_a_row_of_a_step_that_rolls_dice_is_published_or_a_dead_letter_and_never_both_or_neither(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.SparkContext.defaultParallelism", 3)
    source, odd, even = bench.world.topic(2), bench.world.topic(), bench.world.topic()
    (bench.directory / "dice.py").write_text(DICE)
    bench.write(f"""
sources:
  orders: {{topic: {source}, options: {{startingOffsets: earliest, maxOffsetsPerTrigger: 70, minPartitions: 5}}}}
steps:
  - {{python: "dice:throw", dead_letter: {{topic: {source}.dlq}}}}
  - {{name: odd, from: step_1, filter: "right(string(value), 1) IN ('1', '3', '5', '7', '9')"}}
  - {{name: even, from: step_1, filter: "right(string(value), 1) IN ('0', '2', '4', '6', '8')"}}
sinks:
  - {{topic: {odd}, from: odd}}
  - {{topic: {even}, from: even}}
""")
    bench.world.publish(source, [str(number).encode() for number in range(200)])
    standing = bench.run()
    assert (standing.state, standing.error) == ("finished", "")
    assert standing.rows == 200, "each row is read once"
    published, letters = bench.read(odd) + bench.read(even), bench.read(f"{source}.dlq")
    assert published
    assert letters
    assert Counter(published + letters) == Counter(range(200))
    partition = {int(message.value): message.partition for message in bench.messages(source)}
    for found in (bench.read(odd), bench.read(even), letters):
        for each in (0, 1):
            mine = [number for number in found if partition[number] == each]
            assert mine == sorted(mine), "in their order, although several tasks have read each partition"


@pytest.mark.slow
def test_sums_go_on_after_a_restart(bench: Bench) -> None:
    source, target = bench.world.topic(), bench.world.topic()
    bench.write(f"""
sources: {{sales: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
steps:
  - aggregate: {{by: topic, measures: {{n: count(*)}}}}
sinks: [{{topic: {target}, mode: update, key: topic}}]
""")
    for expected, until in ((2, "available-now"), (4, "once")):
        bench.world.publish(source, [b"x", b"y"])
        assert bench.run(until).state == "finished"
        assert bench.read(target)[-1] == {"topic": source, "n": expected}


def test_what_is_no_stream_is_written_once_and_ends(spark: Any, bench: Bench) -> None:
    target = bench.world.topic()
    spark.range(5).write.parquet(str(bench.directory / "numbers"))
    bench.write(f"""
sources: {{numbers: {{parquet: numbers}}}}
steps: [{{filter: id > 1}}]
sinks: [{{topic: {target}}}]
""")
    standing = bench.run("stopped")
    assert (standing.state, standing.rows) == ("finished", 3)
    assert sorted(row["id"] for row in bench.read(target)) == [2, 3, 4]


def test_a_stream_of_parquet_is_read_as_its_options_say(spark: Any, bench: Bench) -> None:
    target = bench.world.topic()
    spark.range(5).repartition(5).write.parquet(str(bench.directory / "numbers"))
    bench.write(f"""
sources: {{numbers: {{parquet: numbers, stream: true, options: {{pathGlobFilter: "part-0000[12]*"}}}}}}
sinks: [{{topic: {target}}}]
""")
    standing = bench.run()
    assert (standing.state, standing.rows) == ("finished", len(bench.read(target)))
    assert 0 < standing.rows < 5


def test_what_is_no_stream_and_fails_after_it_was_published_is_not_published_again(
    spark: Any, bench: Bench, faults: Path
) -> None:
    target = bench.world.topic()
    spark.range(5).write.parquet(str(bench.directory / "numbers"))
    bench.write(f"""
sources: {{numbers: {{parquet: numbers}}}}
sinks: [{{topic: {target}}}]
""")
    bench.file.write_text(bench.file.read_text().replace("{attempts: 0}", "{attempts: 1, pause: 0}"))
    (faults / "after_publish").write_text("raise")
    standing = bench.run("stopped")
    assert (standing.state, standing.restarts) == ("finished", 1)
    assert sorted(row["id"] for row in bench.read(target)) == [0, 1, 2, 3, 4]


def test_a_row_that_fails_without_dead_letters_fails_the_pipeline_in_one_sentence(bench: Bench) -> None:
    source = bench.world.topic()
    bench.write(f"""
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
steps: [{{redact: {{fields: {{email: drop}}}}}}]
sinks: [{{topic: {source}.clean}}]
""")
    bench.world.publish(source, [b"{}", b"broken"])
    standing = bench.run()
    assert standing.state == "failed"
    assert standing.error.startswith("a row fails in step 1: the value is not JSON")
    assert standing.error.endswith(f"it is {source}[0] at 1")
    assert bench.world.client.pipelines.show(bench.name).error == standing.error


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ("[{filter: nothing = 1}]", "with name `nothing` cannot be resolved"),
        ("[{name: bad, sql: SELEC 1}]", "step 1 (bad): Syntax error at or near 'SELEC'"),
        ("[{convert: {from: json, to: columns, schema: id number}}]", "step 1: Syntax error at or near 'number'"),
        ("[{enrich: {lookup: {from: orders2, match: shop}}}]", "step 1: there is no column 'shop'"),
    ],
)  # fmt: skip
def test_what_only_spark_can_find_is_said_about_the_step(bench: Bench, steps: str, sentence: str) -> None:
    sources = f"orders: {{topic: {bench.world.topic()}}}, orders2: {{topic: {bench.world.topic()}, stream: false}}"
    bench.write(f"sources: {{{sources}}}\nsteps: {steps}\nsinks: [{{topic: other}}]\n")
    with pytest.raises(ConfigInvalid) as caught:
        bench.run()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_claimed_messages_are_settled_when_all_that_was_made_of_them_is_there(bench: Bench) -> None:
    world = bench.world
    source = world.topic()
    world.client.create_topic(f"{source}.clean", 1)
    bench.write(f"""
sources: {{orders: {{topic: {source}, options: {{claim: billing}}}}}}
steps: [{{redact: {{fields: {{email: drop}}}}, dead_letter: true}}]
sinks: [{{topic: {source}.clean}}]
""")
    world.client.queue(source, group="billing").close()
    world.publish(source, [b"{}", b"broken", b'{"id": 1}'])
    assert bench.run().state == "finished"
    assert bench.read(f"{source}.clean") == [{}, {"id": 1}]
    assert [letter.value for letter in world.client.dead_letters.list(topic=source)] == [b"broken"]
    info = world.client.queues.describe(source, "billing")
    assert (info.ready, info.leased, info.settled) == (0, 0, {"acked": 3})


@pytest.mark.parametrize("until", ["once", "stopped"])
def test_claimed_messages_of_the_last_batch_are_settled_when_the_pipeline_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    """Spark asks for no other batch, which is when its reader would say so."""
    world = bench.world
    source = world.topic()
    bench.write(f"""
trigger: 1h
sources: {{orders: {{topic: {source}, options: {{claim: billing}}}}}}
sinks: [{{topic: {source}.copy}}]
""")
    world.publish(source, [b"1", b"2", b"3"])
    if until == "stopped":
        monkeypatch.setattr(pipeline_run.Screen, "batch", lambda *_: world.client.pipelines.stop(bench.name))
    assert bench.run(until).state == {"once": "finished"}.get(until, until)
    info = world.client.queues.describe(source, "billing")
    assert (info.ready, info.leased, info.settled) == (0, 0, {"acked": 3})
    assert bench.read(f"{source}.copy") == [1, 2, 3]


def test_a_pipeline_stops_when_the_broker_is_asked_to_and_goes_on_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bench.world
    source = world.topic()
    bench.write(f"""
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
sinks: [{{topic: {source}.copy}}]
""")
    world.publish(source, [b"1", b"2"])
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_run.Screen, "batch", lambda *_: world.client.pipelines.stop(bench.name))
        assert bench.run("stopped").state == "stopped"
    assert world.client.pipelines.show(bench.name).state == "stopped"
    world.publish(source, [b"3"])
    assert bench.run().state == "finished"
    assert bench.read(f"{source}.copy") == [1, 2, 3]


def test_the_command_prints_a_line_for_each_batch_and_ends_in_order_on_sigterm(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = bench.world.topic()
    bench.write(f"""
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
sinks: [{{topic: {source}.copy}}]
""")
    bench.world.publish(source, [b"1", b"2"])
    shown = pipeline_run.Screen.batch

    def batch(self: Any, standing: Standing, done: BatchDone) -> None:
        shown(self, standing, done)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(pipeline_run.Screen, "batch", batch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["pipeline", "run", str(bench.file), "--json"])
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before
    printed = capsys.readouterr()
    (line,) = [json.loads(line) for line in printed.out.splitlines() if line.startswith("{")]
    assert (line["pipeline"], line["query"], line["batch"], line["rows"], line["lag"]) == (
        bench.name,
        "topics",
        0,
        2,
        0,
    )
    assert "stopped" in printed.err


@pytest.mark.slow
def test_a_delta_table_takes_a_stream_and_knows_a_batch_that_comes_again(bench: Bench) -> None:
    deltalake = pytest.importorskip("deltalake", reason="Delta needs deltalake")
    source = bench.world.topic()
    bench.write(f"""
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
sinks: [{{delta: table}}]
""")
    bench.world.publish(source, [b"1", b"2"])
    assert bench.run().state == "finished"
    commits = bench.directory / "checkpoint" / "delta-orders" / "commits"
    shutil.rmtree(commits)  # as if it had died between Delta's commit and Spark's
    commits.mkdir()
    assert bench.run().state == "finished"
    table = deltalake.DeltaTable(str(bench.directory / "table")).to_pyarrow_table()
    assert sorted(table.column("value").to_pylist()) == [b"1", b"2"]

"""A pipeline's file: what it may say, and one clear sentence for everything that is wrong with it.  No Spark."""

from __future__ import annotations

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent

import pytest

from millstream.errors import ConfigInvalid
from millstream.spark.options import SourceOptions
from millstream.spark.pipelines.checkpoints import own_checkpoint
from millstream.spark.pipelines.definition import described
from millstream.spark.pipelines.loading import Checked, check_pipeline, load_pipeline

GOOD = """
name: clean-orders
broker: localhost:9092
sources:
  orders: {topic: orders, options: {startingOffsets: earliest, maxOffsetsPerTrigger: 1000}}
  countries: {parquet: countries}
steps:
  - name: parsed
    from: orders
    convert: {from: json, to: columns, schema: "id bigint, country string"}
    dead_letter: true
  - enrich: {lookup: {from: countries, match: {country: code}}, headers: {cleaned: "yes"}}
  - redact: {fields: {email: hash, "cards[].number": mask}}
  - name: routed
    route: {topics: {orders.eu: "country = 'DE'"}, otherwise: orders.world}
sinks:
  - {topic_column: route}
  - {parquet: archive, from: parsed, partition_by: country}
trigger: 10s
checkpoint: checkpoints
"""


def mistakes_in(text: str, directory: Path = Path("/nowhere")) -> list[str]:
    checked, mistakes = check_pipeline(dedent(text), directory)
    assert (checked is None) == bool(mistakes)
    return mistakes


def small(
    sources: str = "orders: {topic: orders}", steps: str = "[]", sinks: str = "[{topic: clean}]", more: str = ""
) -> str:
    return f"name: small\nsources: {{{sources}}}\nsteps: {steps}\nsinks: {sinks}\ncheckpoint: here\n{more}"


_MINUTELY, _HOURLY = (
    f"aggregate: {{measures: {{n: count(*)}}, window: {{size: {size}}}, watermark: 1m}}" for size in ("1m", "1h")
)
WINDOWS = f"[{{name: minutes, from: orders, {_MINUTELY}}}, {{name: hours, from: orders, {_HOURLY}}}]"
APART = (
    f"[{{name: minutes, from: orders, {_MINUTELY}}}, {{name: few, from: orders, filter: a = 1}}, "
    f"{{name: hours, from: few, {_HOURLY}}}]"
)


@pytest.mark.parametrize(
    ("steps", "sinks"),
    [
        (APART, "[{from: hours, topic: a}, {from: hours, topic: b}, {from: orders, topic: c}]"),
        (APART, "[{from: hours, topic: a}, {from: minutes, parquet: b}]"),
        (APART, "[{from: hours, topic: a, mode: update}, {from: minutes, topic: b, mode: update}]"),
        (WINDOWS, "[{from: hours, topic: a}, {from: minutes, topic: b}]"),
    ],
)
def test_windows_that_do_not_wait_for_each_other_go_together(steps: str, sinks: str) -> None:
    assert mistakes_in(small(steps=steps, sinks=sinks)) == []


def test_a_good_file_has_no_mistakes_and_every_default() -> None:
    checked, mistakes = check_pipeline(GOOD, Path("/pipelines"))
    assert mistakes == []
    assert checked is not None
    definition = checked.definition
    assert definition.interval_ms == 10_000
    assert definition.sources["orders"].is_stream
    assert not definition.sources["countries"].is_stream
    assert checked.topics_read() == ["orders", "/pipelines/countries"]
    assert checked.topics_written() == ["orders.eu", "orders.world", "/pipelines/archive"]
    assert definition.restart.attempts == 10
    assert [definition.restart.pause_ms(failures) for failures in (1, 2, 3, 50)] == [1000, 2000, 4000, 60_000]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the file is empty"),
        ("- a", "a pipeline is a mapping"),
        ("name: [", "line 1: this is not valid YAML: expected the node content"),
        ("name: \x0f", "this is not valid YAML: unacceptable character #x000f"),
        ("name: " + "[" * 1000, "too many lists and mappings are inside each other"),
        (
            small(more="checkpint: there"),
            "line 6, checkpint: there is no key 'checkpint' here; did you mean 'checkpoint'?",
        ),
        (small(more="name: other"), "line 6, name: this key is given twice"),
        (small(sources="a: {topics: orders}"), "sources.a.topics: this must be a list, not 'orders'"),
        (small(sources="a: {topc: orders}"), "sources.a.topc: there is no key 'topc' here; did you mean 'topic'?"),
        (small(sources="a: {stream: true}"), "a source says what it reads by exactly one of topic, topics, pattern"),
        (small(sources="a: {topic: x, table: y}"), "not by topic and table at once"),
        (small(sources="a: {topic: 'no way'}"), "sources.a.topic: topic 'no way' is not valid"),
        (small(sources="a-b: {topic: x}"), "'a-b' cannot be a table in SQL"),
        (small(sources="a: {topic: x, options: {subscribe: y}}"), "leave this option out: `topic:` says it"),
        (
            small(sources="a: {topic: x, options: {maxOffsetPerTrigger: 5}}"),
            "sources.a.options: there is no source option 'maxOffsetPerTrigger'; did you mean 'maxOffsetsPerTrigger'?",
        ),
        (small(sources="a: {topic: x, options: {minPartitions: []}}"), "an option is a text, a number, true or false"),
        (small(sources="a: {table: dead_letters, stream: true}"), "a table is read once"),
        (small(sources="a: {parquet: x, stream: true}"), "a stream of Parquet needs to know its columns"),
        (small(sources="a: {topic: x, columns: 'id int'}"), "only Parquet has columns to be declared"),
        (small(steps="[{from: orders}]"), "step 1: a step says what it does by exactly one of sql, python, enrich"),
        (small(steps="[{filter: a, sql: b}]"), "not by sql and filter at once"),
        (small(steps="[{filtr: a}]"), "step 1, filtr: there is no key 'filtr' here; did you mean 'filter'?"),
        (small(steps="[{sql: 'SELECT * FROM order'}]"), "there is no source or step 'order'; did you mean 'orders'?"),
        (small(steps="[{sql: 'SELECT (1 FROM orders'}]"), "step 1, sql: a '(' is never closed"),
        (small(steps="[{from: nothing, filter: 'true'}]"), "step 1, from: there is no source or step 'nothing'"),
        (small(steps="[{name: Orders, filter: 'true'}]"), "'Orders' is the name of source 'orders' already"),
        (
            small(steps="[{name: a, sql: 'SELECT * FROM b'}, {name: b, sql: 'SELECT * FROM a'}]"),
            "steps read each other in a circle: 'a' reads 'b' reads 'a'",
        ),
        (small(steps="[{name: a, from: a, filter: 'true'}]"), "in a circle: 'a' reads 'a'"),
        (
            small(steps="[{name: a, sql: 'SELECT * FROM b'}, {name: b, from: orders, filter: 'true'}]"),
            "step 1: it reads 'b', which comes later: put 'b' before it",
        ),
        (small(steps="[{from: [orders, orders], filter: 'true'}]"), "only SQL and Python functions read several"),
        (small(steps="[{from: orders, sql: 'SELECT 1'}]"), "leave this out: the SQL text says what it reads"),
        (small(steps="[{filter: 'true', arguments: {a: 1}}]"), "only a Python function takes arguments"),
        (small(steps="[{filter: 'true', dead_letter: true}]"), "in a step `filter` no single row fails"),
        (small(steps="[{dead_letter: {error: bad}}]"), "this goes with a condition"),
        (small(steps="[{redact: {fields: {}}}]"), "step 1, redact.fields: this must not be empty"),
        (small(steps="[{redact: {fields: {a: hide}}}]"), "this is one of drop, mask, hash, not 'hide'"),
        (small(steps="[{redact: {fields: {'a..b': drop}}}]"), "'a..b' is not the path of a field"),
        (small(steps="[{redact: {fields: {a: hash}, salt_variable: NOT_SET_HERE}}]"), "NOT_SET_HERE is not set"),
        (small(steps="[{convert: {from: json, to: json}}]"), "there is nothing to convert: both sides are json"),
        (small(steps="[{convert: {from: json, to: csv}}]"), "say what is in a value: `schema:"),
        (small(steps="[{split: {path: 'a[].b'}}]"), "goes through a list"),
        (small(steps="[{enrich: {}}]"), "there is nothing to add"),
        (
            small(steps="[{enrich: {lookup: {from: orders, match: id}}}]"),
            "a lookup reads a source that is no stream",
        ),
        (small(steps="[{route: {topics: {'a b': 'true'}}}]"), "topic 'a b' is not valid"),
        (
            small(steps="[{aggregate: {measures: {n: count(*)}, window: {size: 1m, slide: 2m}, watermark: 1m}}]"),
            "windows would leave gaps",
        ),
        (
            small(steps="[{aggregate: {measures: {n: count(*)}, window: {size: soon}}}]"),
            "'soon' is not a length of time",
        ),
        (small(steps="[{aggregate: {measures: {n: count(*)}}}]"), "when is a sum final?"),
        (
            small(steps=APART, sinks="[{from: hours, topic: a}, {from: minutes, topic: b}]"),
            "sink 2: windows of 'minutes' and of 'hours' would wait for each other: make two pipelines of it",
        ),
        (small(sinks="[]"), "sinks: this must not be empty"),
        (small(sinks="[{from: orders}]"), "a sink says where rows go by exactly one of topic, topic_column"),
        (small(sinks="[{topic: orders}]"), "it would read its own messages for ever"),
        (small(sources="a: {pattern: 'cle.*'}"), "it would read its own messages for ever"),
        (small(sinks="[{topic: a, from: missing}]"), "sink 1, from: there is no source or step 'missing'"),
        (small(sinks="[{topic: a, partition_by: b}]"), "keys decide about the partitions of a topic"),
        (
            small(sinks="[{topic: a, options: {delivry: x}}]"),
            "there is no sink option 'delivry'; did you mean 'delivery'?",
        ),
        (small(sinks="[{parquet: a, mode: update}]"), "parquet is only ever added to"),
        (small(sinks="[{parquet: a}, {parquet: b}]"), "there is another sink 'parquet-orders': give this one a `name`"),
        (
            small(sinks="[{topic: a}, {topic: b, options: {compression: lz4}}]"),
            "all sinks that are topics are written together",
        ),
        (small(sinks="[{topic_column: route}]"), "no step says to which topics rows go"),
        (
            small(
                sources="orders: {topic: a}, known: {parquet: }", steps="[{enrich: {lookup: {from: known, match: a}}}]"
            ),
            "sources.known: a source says what it reads by exactly one of",
        ),
        (
            small(steps="[{split: {}, dead_letter: orders}]"),
            "step 1, dead_letter: it writes to 'orders', which source 'orders' reads",
        ),
        (
            small(sources="orders: {topic: orders, options: {claim: g}}", sinks="[{topic: a}, {parquet: b}]"),
            "claimed messages go to one query, but 'topics' and 'parquet-orders' read them",
        ),
        (small(more="trigger: soon"), "line 6, trigger: 'soon' is not a length of time"),
        (small(more="restart: {attempts: -1}"), "restart.attempts: this must be greater than or equal to 0, not -1"),
        (small(sources="a: {parquet: x}", more="trigger: 10s"), "nothing here is a stream, so it runs once"),
        (
            small(sources="a: {parquet: x}, b: {topic: y}", sinks="[{topic: c, from: a}, {topic: d, from: b}]"),
            "two pipelines",
        ),
        ("name: a b\nsources: {a: {topic: b}}\nsinks: [{topic: c}]", "line 1, name: pipeline 'a b' is not valid"),
        ("name: a\nsources: {a: {topic: b}}\nsinks: [{topic: c}]", "`checkpoint: DIRECTORY`"),
        ("name: a\nsinks: [{topic: c}]", "the key 'sources' is missing"),
        ("name: a\nsources: {on: {topic: b}}\nsinks: [{topic: c}]", "a name is a text; put it in quotes"),
    ],
)
def test_every_mistake_is_one_sentence_with_its_place(text: str, sentence: str) -> None:
    found = mistakes_in(text)
    assert any(sentence in mistake for mistake in found), found
    assert all("\n" not in mistake for mistake in found)


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        ("orders.*|sales", "orders.eu"),
        ("orders.*|sales", "sales"),
        ("(?i)ORDERS.*", "orders.eu"),
        ("(?i)(?s)ORDERS.*", "orders.eu"),
        ("(?x) (?i) ORDERS.* # all", "orders.eu"),
    ],
)
def test_dead_letters_of_a_pipeline_are_not_read_by_its_pattern(pattern: str, read: str) -> None:
    def chosen(steps: str) -> str:
        checked, mistakes = check_pipeline(small(sources=f"orders: {{pattern: '{pattern}'}}", steps=steps), Path("/"))
        assert checked is not None, mistakes
        options = checked.source_options(checked.definition.sources["orders"])
        return str(SourceOptions.of(options, streaming=True).topics.pattern)

    assert chosen("[{split: {}, dead_letter: letters}]") == pattern
    with_letters = chosen("[{split: {}, dead_letter: true}]")
    assert re.fullmatch(with_letters, read)
    assert not re.fullmatch(with_letters, f"{read}.dlq")


def test_dead_letters_are_read_by_who_asks_for_them_and_by_who_makes_none() -> None:
    sources = "orders: {pattern: 'orders.*'}, letters: {pattern: '.*[.]dlq'}, all: {pattern: '.*'}"
    steps = "[{name: parts, from: orders, split: {}, dead_letter: true}, {from: letters, split: {}, dead_letter: true}]"
    sinks = "[{topic: clean, from: parts}, {parquet: letters, from: letters}, {parquet: all, from: all}]"
    checked, mistakes = check_pipeline(small(sources, steps, sinks), Path("/"))
    assert checked is not None, mistakes
    read = {
        name
        for name, source in checked.definition.sources.items()
        if re.fullmatch(checked.source_options(source)["subscribePattern"], "orders.dlq")
    }
    assert read == {"letters", "all"}


@pytest.mark.parametrize(
    ("steps", "sinks"),
    [
        ("[{route: {topics: {orders.retry: 'attempt < 3'}, otherwise: drop}}]", "[{topic_column: route}]"),
        ("[{route: {topics: {done: 'attempt > 3'}, otherwise: orders.retry}}]", "[{topic_column: route}]"),
        ("[{route: {topics: {done: 'attempt > 3', orders.retry: 'true'}}}]", "[{topic_column: route}]"),
        ("[{route: {topics: {orders.retry: 'attempt < 3'}}, dead_letter: true}]", "[{topic_column: route}]"),
        ("[{dead_letter: {topic: orders.retry, when: 'attempt < 3'}}]", "[{topic: done}]"),
        ("[{filter: 'attempt < 3'}, {route: {topics: {orders.retry: 'true'}}}]", "[{topic_column: route}]"),
        ("[{route: {topics: {orders.retry: 'true'}}}, {filter: 'attempt < 3'}]", "[{topic_column: route}]"),
        (
            "[{sql: SELECT * FROM orders WHERE attempt < 3}, {route: {topics: {orders.retry: 'true'}}}]",
            "[{topic_column: route}]",
        ),
        (
            "[{dead_letter: {topic: given.up, when: 'attempt > 3'}}, {route: {topics: {orders.retry: 'true'}}}]",
            "[{topic_column: route}]",
        ),
    ],
)
def test_what_is_sent_again_under_a_condition_comes_to_an_end(steps: str, sinks: str) -> None:
    assert mistakes_in(small("orders: {topics: [orders, orders.retry]}", steps, sinks)) == []


@pytest.mark.parametrize(
    ("source", "route"),
    [
        ("pattern: 'orders.*'", "{topics: {orders.eu: 'true'}}"),
        ("topics: [orders, orders.eu]", "{topics: {orders.eu: ' TRUE '}, otherwise: drop}"),
        ("pattern: 'orders.*'", "{topics: {orders.eu: eu, orders.us: us}, otherwise: orders.rest}"),
    ],
)
def test_a_route_without_a_way_out_of_its_own_source_is_a_mistake(source: str, route: str) -> None:
    found = mistakes_in(small(f"orders: {{{source}}}", f"[{{route: {route}}}]", "[{topic_column: route}]"))
    assert len(found) == 1
    assert "it writes to 'orders.eu', which source 'orders' reads: it would read its own messages for ever" in found[0]


def test_a_step_elsewhere_that_takes_rows_out_is_no_way_out_of_a_route() -> None:
    steps = "[{filter: 'attempt < 3', name: few}, {route: {topics: {orders: 'true'}}, name: back, from: orders}]"
    found = mistakes_in(small("orders: {topic: orders}", steps, "[{topic_column: route, from: back}]"))
    assert any("it would read its own messages for ever" in mistake for mistake in found)


def test_a_checkpoint_is_that_of_one_pipeline(tmp_path: Path) -> None:
    def checked(name: str, checkpoint: str, sinks: str = "[{topic: clean}]", more: str = "") -> Checked:
        text = small(sinks=sinks, more=more).replace("name: small", f"name: {name}")
        text = text.replace("checkpoint: here", f"checkpoint: {checkpoint}")
        found, mistakes = check_pipeline(text, tmp_path)
        assert found is not None, mistakes
        return found

    for _ in range(2):  # it goes on with its own
        own_checkpoint(checked("first", "checkpoints"))
        own_checkpoint(checked("second", "elsewhere/deep"))
    taken = "checkpoints/topics is that of pipeline 'first', and what that has read"
    for same in ("checkpoints", f"file:{tmp_path}/checkpoints", f"file://{tmp_path}/checkpoints"):
        with pytest.raises(ConfigInvalid, match=taken):
            own_checkpoint(checked("second", same, sinks="[{parquet: files}, {topic: clean}]"))
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == [".topics.pipeline"]
    own_checkpoint(checked("second", "checkpoints", sinks="[{parquet: files}]"))  # which is beside the other
    own_checkpoint(checked("second", "checkpoints", more="spark: {spark.hadoop.fs.defaultFS: 'hdfs://there'}"))
    own_checkpoint(checked("second", "checkpoints"), {"spark.hadoop.fs.defaultFS": "hdfs://there"})
    (tmp_path / "checkpoints" / ".topics.pipeline").unlink()
    own_checkpoint(checked("second", "checkpoints"))
    for name, sentence in (("third", None), ("fourth", "checkpoints/archive is that of pipeline 'third'")):
        text = f"name: {name}\nready: archive\noptions: {{topics: a, to: {name}}}\ncheckpoint: checkpoints\n"
        archive, mistakes = check_pipeline(text, tmp_path)
        assert archive is not None, mistakes
        with nullcontext() if sentence is None else pytest.raises(ConfigInvalid, match=sentence):
            own_checkpoint(archive)
    (tmp_path / "file").write_text("")
    for unknown in ("file", "s3a://bucket/checkpoints"):
        own_checkpoint(checked("third", unknown))


def test_a_definition_is_shown_without_secrets() -> None:
    settings = {"spark.hadoop.fs.s3a.secret.key": "x", "spark.ssl.keyPassword": "x", "spark.executor.memory": "2g"}
    settings["spark.hadoop.fs.azure.account.key.mill"] = "x"
    fields = [{"redact": {"fields": {"password": "drop"}}}]
    sinks = [{"topic": "a", "options": {"Token": "x", "delivery": "y"}}]
    assert described({"spark": settings, "steps": fields, "sinks": sinks}) == {
        "spark": {**dict.fromkeys(settings, "..."), "spark.executor.memory": "2g"},
        "steps": fields,
        "sinks": [{"topic": "a", "options": {"Token": "...", "delivery": "y"}}],
    }


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    found = mistakes_in("name: x\nsources:\n  a: {topc: b}\nsteps:\n  - {filtr: x}\nsinks:\n  - {topic: 5}\n")
    assert [mistake.split(",")[0] for mistake in found] == ["line 3", "line 5", "line 7"]


def test_a_file_with_mistakes_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    with pytest.raises(ConfigInvalid, match=r"broken\.yaml cannot be read: No such file"):
        load_pipeline(path)
    path.write_text("name: x\nsources: {a: {topc: b}}\nsinks: [{topik: c}]\n")
    with pytest.raises(ConfigInvalid, match=r"broken\.yaml has 2 mistakes:\n  line 2, sources\.a\.topc"):
        load_pipeline(path)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("python: nowhere:work", "there is no module 'nowhere' beside the file or installed; did you mean 'nowhere2'?"),
        ("python: work", "'work' does not name a function: write `module:function`"),
        ("python: nowhere2:wrok", "module 'nowhere2' has no function 'wrok'; did you mean 'work'?"),
        ("python: nowhere2:two", "function 'nowhere2:two' does not take 1 DataFrame: missing a required argument: 'b'"),
        ("python: nowhere2:work, arguments: {depth: 1}", "does not take 1 DataFrame and depth"),
        ("python: broken_work:work", "module 'broken_work' fails: ZeroDivisionError: division by zero"),
        ("python: needy_work:work", "module 'needy_work' needs 'not_there_at_all', which is not installed"),
    ],
)
def test_functions_are_looked_for_before_spark_starts(step: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "nowhere2.py").write_text("def work(rows): return rows\ndef two(a, b): return a\n")
    (tmp_path / "broken_work.py").write_text("1 / 0\n")
    (tmp_path / "needy_work.py").write_text("import not_there_at_all\n")
    assert sentence in mistakes_in(small(steps=f"[{{{step}}}]"), tmp_path)[0]


def test_a_function_beside_the_file_is_found_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "found_work.py").write_text("def work(rows, *, depth): return rows\n")
    assert mistakes_in(small(steps="[{python: 'found_work:work', arguments: {depth: 2}}]"), tmp_path) == []


@pytest.mark.parametrize(
    ("package", "text", "extra"),
    [
        ("deltalake", small(sinks="[{delta: table}]"), "delta"),
        (
            "fastavro",
            small(steps="[{convert: {from: avro, to: json, avro_schema: {type: record, fields: []}}}]"),
            "avro",
        ),
    ],
)
def test_what_is_not_installed_is_named(package: str, text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    assert f"needs the package {package}: `pip install 'millstream[{extra}]'`" in mistakes_in(text)[0]


def test_what_the_command_line_says_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(small(more="broker: file-1:1\n"))
    checked = load_pipeline(path, broker="given-1:2", namespace="shop", credentials={"token": "secret"})
    source = checked.definition.sources["orders"]
    assert checked.source_options(source) == {
        "bootstrap.servers": "given-1:2",
        "namespace": "shop",
        "token": "secret",
        "subscribe": "orders",
        "includeHeaders": "true",
    }
    assert checked.sink_options(None) == {"bootstrap.servers": "given-1:2", "namespace": "shop", "token": "secret"}


def test_segment_files_need_no_broker() -> None:
    checked, mistakes = check_pipeline(
        small(sources="a: {topic: x, options: {path: /data}}", sinks="[{parquet: out}]"), Path("/pipelines")
    )
    assert mistakes == []
    assert checked is not None
    options = checked.source_options(checked.definition.sources["a"])
    assert options == {"path": "/data", "subscribe": "x", "includeHeaders": "true"}

"""What a pipeline's file can say.  Only the shape is checked here; whether it makes sense, in checking.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millstream.durations import parse_ms
from millstream.errors import InvalidArgument

__all__ = [
    "AVAILABLE_NOW",
    "MESSAGE_COLUMNS",
    "STEP_KINDS",
    "Aggregate",
    "Convert",
    "DeadLetters",
    "Definition",
    "Enrich",
    "Lookup",
    "Redact",
    "Restart",
    "Route",
    "Sink",
    "Source",
    "Split",
    "Step",
    "Window",
    "described",
]

#: What a topic takes; everything else is left out, or becomes a value as JSON where there is none.
MESSAGE_COLUMNS: Final = ("key", "value", "headers", "priority", "deliverAt", "timestamp")

AVAILABLE_NOW: Final = "available-now"

#: Names of what nobody else should see, of ours and of Spark's (as its own `spark.redaction.regex` has it).
_SECRET: Final = re.compile(r"secret|password|token|credential|(?:access|account)[.]?key", re.IGNORECASE)
_SETTINGS: Final = ("spark", "options")


class Part(BaseModel):
    """A mapping of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, strict=True)


def _listed(value: Any) -> Any:
    """One thing may be written without a list around it."""
    return [value] if isinstance(value, str) else value


def _matched(value: Any) -> Any:
    """Columns that are called the same on both sides need not be said twice."""
    names = _listed(value)
    return {name: name for name in names if isinstance(name, str)} if isinstance(names, list) else names


def _trigger(value: Any) -> Any:
    if value is None or value == AVAILABLE_NOW:
        return value
    if _milliseconds(value) <= 0:
        raise ValueError(f"use a length of time such as 10s, or {AVAILABLE_NOW}")
    return str(value)


def _milliseconds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("use a length of time such as 500ms, 30s or 5m")
    try:
        return parse_ms(value)
    except InvalidArgument:
        raise ValueError(f"{value!r} is not a length of time: use one such as 500ms, 30s or 5m") from None


def _option(value: Any) -> Any:
    """As Spark takes options: as texts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return value
    raise ValueError("an option is a text, a number, true or false")


def _constant(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    raise ValueError("a constant is a text, a number, true or false")


Names = Annotated[list[str], BeforeValidator(_listed)]
Millis = Annotated[int, BeforeValidator(_milliseconds)]
Option = Annotated[str, BeforeValidator(_option)]
Constant = Annotated[Any, BeforeValidator(_constant)]


class Source(Part):
    """What is read, under the name by which steps refer to it."""

    KINDS: ClassVar = ("topic", "topics", "pattern", "parquet", "table")

    #: One topic.
    topic: str | None = None
    #: Several topics, by name.
    topics: list[str] | None = None
    #: Topics whose whole name matches a regular expression, including those that are created later.
    pattern: str | None = None
    #: A directory of Parquet files, or one file.
    parquet: str | None = None
    #: A table of the broker: `dead_letters`, `schedules`, `groups`...
    table: str | None = None
    #: Whether it is read continuously or once. By default topics are streams, and everything else is not.
    stream: bool | None = None
    #: The columns of a Parquet stream that has no file yet, such as `id bigint, total double`.
    columns: str | None = None
    #: Options of the data source, such as `startingOffsets`; for Parquet, options of Spark.
    options: dict[str, Option] = {}

    @property
    def kind(self) -> str:
        """Empty where the file does not say it, which is a mistake that is told elsewhere."""
        return next((kind for kind in self.KINDS if getattr(self, kind) is not None), "")

    @property
    def reads_topics(self) -> bool:
        return self.kind in ("topic", "topics", "pattern")

    @property
    def is_stream(self) -> bool:
        return self.reads_topics if self.stream is None else self.stream

    @property
    def topic_names(self) -> list[str]:
        return self.topics or ([self.topic] if self.topic else [])


class Lookup(Part):
    """Adds columns of another source to rows that have the same values in some columns."""

    #: A source that is not a stream: Parquet, a table, or a topic with `stream: false`.
    source: str = Field(alias="from")
    #: Columns that both sides have; or columns of the rows -> what the other side calls them.
    match: Annotated[dict[str, str], BeforeValidator(_matched)] = Field(min_length=1)
    #: Which columns to add. Without it, all.
    columns: Names | None = None
    #: What happens to rows without a match: `keep` them with nulls, `drop` them, or let them `fail`.
    missing: Literal["keep", "drop", "fail"] = "keep"


class Enrich(Part):
    """Adds columns and headers."""

    #: Name of a column -> its value in every row.
    columns: dict[str, Constant] = {}
    #: Name of a header -> its text. It replaces headers of the same name.
    headers: dict[str, Option] = {}
    #: Adds columns of another source.
    lookup: Lookup | None = None


class Redact(Part):
    """Removes or hides fields of JSON values."""

    #: Path of a field (`customer.email`, `items[].card`) -> what happens to it. A missing field is no mistake.
    fields: dict[str, Literal["drop", "mask", "hash"]] = Field(min_length=1)
    #: The environment variable with the key of the hashes. Without it, anybody who guesses a value can check the
    #: guess.
    salt_variable: str | None = None


class Convert(Part):
    """Turns values from one form into another; `columns` means separate columns."""

    #: The form that values have now.
    source: Literal["json", "csv", "avro", "columns"] = Field(alias="from")
    #: The form that they get.
    to: Literal["json", "csv", "avro", "columns"]
    #: The fields of JSON or CSV, as SQL writes them: `id bigint, total double`. From `columns`: which of them.
    columns: str | None = Field(default=None, alias="schema")
    #: For Avro only: the schema, or the path of a file that has it.
    avro_schema: str | dict[str, Any] | None = None
    #: The separator of CSV.
    separator: str = Field(default=",", min_length=1, max_length=1)


class Split(Part):
    """Makes a message of each element of an array in a JSON value."""

    #: Where the array is, such as `order.items`. Without it, the value is the array.
    path: str = ""


class Window(Part):
    """Groups rows by time."""

    #: The column with the time of a row.
    column: str = "timestamp"
    #: How long a window is.
    size: Millis = Field(gt=0)
    #: How far apart windows begin. Without it, windows do not overlap.
    slide: Millis | None = Field(default=None, gt=0)


class Aggregate(Part):
    """Counts, sums and the like, by columns and windows of time."""

    #: The columns to group by.
    by: Names = []
    #: The windows to group by. Without it, there is one sum for all of time.
    window: Window | None = None
    #: How late rows may be; used with a window. A window is written when it has been over for this long.
    watermark: Millis | None = None
    #: Name of the new column -> SQL, such as `count(*)` or `sum(total)`.
    measures: dict[str, str] = Field(min_length=1)


class Route(Part):
    """Chooses the topic of each row: the first whose condition holds."""

    #: Topic -> condition in SQL. Conditions are tried in this order.
    topics: dict[str, str] = Field(min_length=1)
    #: What happens to other rows: the name of a topic, or `drop`. Without it, they fail.
    otherwise: str | None = None

    @property
    def targets(self) -> list[str]:
        """The topics that rows may go to."""
        return [*self.topics, *([self.otherwise] if self.otherwise not in (None, "drop") else [])]

    @property
    def ways(self) -> list[str]:
        """As `targets`, if every row is sure to go to one of them; otherwise empty."""
        for number, condition in enumerate(self.topics.values()):
            if condition.strip().lower() == "true":
                return list(self.topics)[: number + 1]
        return self.targets if self.otherwise not in (None, "drop") else []


class DeadLetters(Part):
    """Takes out rows that failed and sends them to a dead letter topic with their error; the other rows go on."""

    #: The dead letter topic. Without it, `<topic>.dlq` of the topic that a row was read from.
    topic: str | None = None
    #: In a step of its own: a condition in SQL for rows that failed. Without it, rows with something in the column
    #: `_error` failed.
    when: str | None = None
    #: The error text for these rows; used with `when`.
    error: str | None = None


STEP_KINDS: Final = ("sql", "python", "enrich", "filter", "redact", "convert", "split", "aggregate", "route")


def _dead_letters(value: Any) -> Any:
    """`true`, or the name of a topic, or all there is to say."""
    if isinstance(value, bool):
        return {} if value else None
    return {"topic": value} if isinstance(value, str) else value


class Step(Part):
    """One thing that is done with rows."""

    #: The name by which others refer to it: letters, digits and `_`. Without it, only what comes next can read it.
    name: str | None = None
    #: What it reads. Without it, what came before. Only `python` can read several.
    inputs: Names | None = Field(default=None, alias="from")
    #: A query whose tables are the names of sources and steps.
    sql: str | None = None
    #: A function that takes DataFrames and returns one, as `module:function`, beside the file or installed.
    python: str | None = None
    #: Named arguments of the function.
    arguments: dict[str, Any] | None = None
    #: Adds columns and headers.
    enrich: Enrich | None = None
    #: A condition in SQL for the rows to keep.
    filter: str | None = None
    #: Removes or hides fields of JSON values.
    redact: Redact | None = None
    #: Turns values into another form.
    convert: Convert | None = None
    #: Makes a message of each element of an array.
    split: Split | None = None
    #: Makes sums and counts.
    aggregate: Aggregate | None = None
    #: Chooses the topic of each row.
    route: Route | None = None
    #: Where rows that fail go: `true`, the name of a topic, or a mapping. Without it, they fail the batch.
    dead_letter: Annotated[DeadLetters | None, BeforeValidator(_dead_letters)] = None

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in STEP_KINDS if getattr(self, kind) is not None]

    @property
    def kind(self) -> str:
        return next(iter(self.kinds), "dead_letter")


class Sink(Part):
    """Where rows go."""

    KINDS: ClassVar = ("topic", "topic_column", "parquet", "delta")

    #: For files: the name of its query, needed where two sinks would have the same one.
    name: str | None = None
    #: The step or source that it writes. Without it, the last step.
    source: str | None = Field(default=None, alias="from")
    #: A topic.
    topic: str | None = None
    #: The column that names the topic of each row. A step `route` fills the column `route`.
    topic_column: str | None = None
    #: A directory of Parquet files.
    parquet: str | None = None
    #: A directory that is a Delta table.
    delta: str | None = None
    #: For topics: the column to take as the key.
    key: str | None = None
    #: For topics: `update` writes sums whenever they change, `complete` writes all of them each time.
    mode: Literal["append", "update", "complete"] = "append"
    #: For files: columns that become directories.
    partition_by: Names = []
    #: Options of the data source, such as `compression`, the same for all topics of one mode. For Parquet, options of
    #: Spark.
    options: dict[str, Option] = {}

    @property
    def kind(self) -> str:
        """Empty where the file does not say it, which is a mistake that is told elsewhere."""
        return next((kind for kind in self.KINDS if getattr(self, kind) is not None), "")

    @property
    def writes_topics(self) -> bool:
        return self.kind in ("topic", "topic_column")


class Restart(Part):
    """What happens after a failure."""

    #: How many restarts in a row. A batch that works starts the count of its query anew. 0 = never restart.
    attempts: int = Field(default=10, ge=0, le=1_000_000)
    #: The pause before the first restart; it is twice as long before each further one.
    pause: Millis = Field(default=1000, ge=0)
    #: The longest pause.
    longest: Millis = Field(default=60_000, ge=0)

    def pause_ms(self, failures: int) -> int:
        """How long to wait after so many failures in a row."""
        return min(self.longest, self.pause << min(max(0, failures - 1), 30))


class Definition(Part):
    """A pipeline."""

    #: The name for the broker and for people. The rules for names of groups apply.
    name: str
    #: A description for people.
    description: str = ""
    #: The broker of topics and tables whose options do not name one. Without it, `localhost:9092`.
    broker: str | None = None
    #: The namespace of topics and tables whose options do not name one. Without it, `default`.
    namespace: str | None = None
    #: What is read: the name of a source -> the source.
    sources: dict[str, Source] = Field(min_length=1)
    #: What is done with the rows, in this order.
    steps: list[Step] = []
    #: Where the rows go.
    sinks: list[Sink] = Field(min_length=1)
    #: How often a batch is run, such as `10s`; or `available-now`, to process what is there and then end. Without it, a
    #: batch is run when there is something to read.
    trigger: Annotated[str | None, BeforeValidator(_trigger)] = None
    #: A directory in which Spark keeps how far it is. A pipeline that reads a stream needs one of its own.
    checkpoint: str | None = None
    #: What happens after a failure.
    restart: Restart = Restart()
    #: Settings of the Spark session.
    spark: dict[str, Option] = {}

    @property
    def interval_ms(self) -> int | None:
        trigger: str | None = self.trigger
        return None if trigger is None or trigger == AVAILABLE_NOW else parse_ms(trigger)

    def step_name(self, number: int) -> str:
        """What others, and Spark, call a step."""
        return self.steps[number].name or f"step_{number + 1}"

    def steps_with_letters(self) -> list[int]:
        """The numbers of the steps that send rows which fail to a dead letter topic."""
        return [number for number, step in enumerate(self.steps) if step.dead_letter is not None]

    def names(self) -> Iterator[str]:
        yield from self.sources
        for number in range(len(self.steps)):
            yield self.step_name(number)


def described(values: Mapping[str, Any], *, settings: bool = False) -> dict[str, Any]:
    """The document for people, without what only the broker may know; elsewhere a name says nothing about a value."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        inside = settings or name in _SETTINGS
        if isinstance(value, Mapping):
            shown[name] = described(value, settings=inside)
        elif isinstance(value, list):
            shown[name] = [described(each, settings=inside) if isinstance(each, Mapping) else each for each in value]
        else:
            shown[name] = "..." if settings and _SECRET.search(name) else value
    return shown

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
    """What is read, under the name that steps call it by."""

    KINDS: ClassVar = ("topic", "topics", "pattern", "parquet", "table")

    topic: str | None = None
    topics: list[str] | None = None
    #: A regular expression.
    pattern: str | None = None
    parquet: str | None = None
    #: A table of the broker: dead letters, schedules, groups...
    table: str | None = None
    #: Read on and on, or once; topics are streams unless said otherwise, everything else is not.
    stream: bool | None = None
    #: For Parquet that is a stream and has no file yet: `id bigint, total double`.
    columns: str | None = None
    #: Of the data source; see the guide.
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
    """Columns of another source, for rows that have the same in some columns."""

    source: str = Field(alias="from")
    #: Columns that both have; or those of the rows, and what the other side calls them.
    match: Annotated[dict[str, str], BeforeValidator(_matched)] = Field(min_length=1)
    #: Which to add; without it, all.
    columns: Names | None = None
    #: Rows of which nothing is known: `keep` them with nulls, `drop` them, or let them `fail`.
    missing: Literal["keep", "drop", "fail"] = "keep"


class Enrich(Part):
    """Adds columns and headers."""

    columns: dict[str, Constant] = {}
    headers: dict[str, Option] = {}
    lookup: Lookup | None = None


class Redact(Part):
    """Takes what is nobody's business out of JSON values."""

    #: Path of a field (`customer.email`, `items[].card`) -> what becomes of it.
    fields: dict[str, Literal["drop", "mask", "hash"]] = Field(min_length=1)
    #: The variable with the key of the hashes; without it anybody who guesses a value can check the guess.
    salt_variable: str | None = None


class Convert(Part):
    """Turns values from one form into another; `columns` are columns of their own."""

    source: Literal["json", "csv", "avro", "columns"] = Field(alias="from")
    to: Literal["json", "csv", "avro", "columns"]
    #: `id bigint, total double`; for Avro the schema itself, or the path of a file that has it.
    columns: str | None = Field(default=None, alias="schema")
    avro_schema: str | dict[str, Any] | None = None
    separator: str = Field(default=",", min_length=1, max_length=1)


class Split(Part):
    """Makes a message of each element of an array in a JSON value."""

    #: Where the array is: `order.items`; without it the value is the array.
    path: str = ""


class Window(Part):
    column: str = "timestamp"
    size: Millis = Field(gt=0)
    #: How far the next window is; without it windows do not overlap.
    slide: Millis | None = Field(default=None, gt=0)


class Aggregate(Part):
    """Counts, adds up and so on, by columns and windows of time."""

    by: Names = []
    window: Window | None = None
    #: How late rows may be.
    watermark: Millis | None = None
    #: Name of the new column -> SQL, such as `count(*)` or `sum(total)`.
    measures: dict[str, str] = Field(min_length=1)


class Route(Part):
    """Says to which topic each row goes: the first whose condition holds."""

    topics: dict[str, str] = Field(min_length=1)
    #: For the others: a topic, `drop`, or nothing, and then they fail.
    otherwise: str | None = None

    @property
    def targets(self) -> list[str]:
        """The topics that rows may go to."""
        return [*self.topics, *([self.otherwise] if self.otherwise not in (None, "drop") else [])]

    @property
    def ways(self) -> list[str]:
        """The same, if each row goes to one of them for sure; otherwise nothing."""
        for number, condition in enumerate(self.topics.values()):
            if condition.strip().lower() == "true":
                return list(self.topics)[: number + 1]
        return self.targets if self.otherwise not in (None, "drop") else []


class DeadLetters(Part):
    """Takes out rows that failed and sends them to a dead letter topic with their error; the rest goes on."""

    #: Without it `<topic>.dlq` of the topic that a row was read from.
    topic: str | None = None
    #: As a step of its own: what has failed; without it, rows with something in the column `_error`.
    when: str | None = None
    #: What is said about them.
    error: str | None = None


STEP_KINDS: Final = ("sql", "python", "enrich", "filter", "redact", "convert", "split", "aggregate", "route")


def _dead_letters(value: Any) -> Any:
    """`true`, or the name of a topic, or all there is to say."""
    if isinstance(value, bool):
        return {} if value else None
    return {"topic": value} if isinstance(value, str) else value


class Step(Part):
    """One thing that is done with rows."""

    #: Without it only the next one can read it.
    name: str | None = None
    #: Without it, what came before.
    inputs: Names | None = Field(default=None, alias="from")
    sql: str | None = None
    #: `module:function`, which takes DataFrames and returns one.
    python: str | None = None
    #: Named arguments of the function.
    arguments: dict[str, Any] | None = None
    enrich: Enrich | None = None
    #: What is kept: a condition in SQL.
    filter: str | None = None
    redact: Redact | None = None
    convert: Convert | None = None
    split: Split | None = None
    aggregate: Aggregate | None = None
    route: Route | None = None
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

    name: str | None = None
    source: str | None = Field(default=None, alias="from")
    topic: str | None = None
    #: The column that says it, as `route` does.
    topic_column: str | None = None
    parquet: str | None = None
    delta: str | None = None
    #: The column to take as the key.
    key: str | None = None
    mode: Literal["append", "update", "complete"] = "append"
    partition_by: Names = []
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

    #: In a row; a batch that works starts the count anew.  0: never restart.
    attempts: int = Field(default=10, ge=0, le=1_000_000)
    #: Before the first; twice as long before each further one.
    pause: Millis = Field(default=1000, ge=0)
    longest: Millis = Field(default=60_000, ge=0)

    def pause_ms(self, failures: int) -> int:
        """How long to wait after so many failures in a row."""
        return min(self.longest, self.pause << min(max(0, failures - 1), 30))


class Definition(Part):
    """A pipeline."""

    name: str
    description: str = ""
    #: For topics and tables whose options do not say it.
    broker: str | None = None
    namespace: str | None = None
    sources: dict[str, Source] = Field(min_length=1)
    steps: list[Step] = []
    sinks: list[Sink] = Field(min_length=1)
    #: A length of time, `available-now`, or nothing: as soon as there is something.
    trigger: Annotated[str | None, BeforeValidator(_trigger)] = None
    #: Where Spark keeps how far it is.
    checkpoint: str | None = None
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
        """Those that take out rows that fail."""
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

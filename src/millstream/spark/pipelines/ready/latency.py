"""`latency`: from publish to settle, by topic, group and hour, from the passports of messages.

Passports keep every message that failed once and a sample of all others, so what they say is weighed: a sampled message
stands for as many as it was chosen from.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field

from millstream.spark.pipelines.definition import Source
from millstream.spark.pipelines.ready.page import Figure, Html, Page, Tone, card, table
from millstream.spark.pipelines.ready.plots import lines, short
from millstream.spark.pipelines.ready.work import TopicReporting, Work, since_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Latency"]

_FAILED: Final = ("nacked", "timeout", "returned", "rejected")
_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_PLACE: Final = ("topic", "partition", "offset")
_PUBLISHED: Final = (
    "topic string not null, partition int not null, offset bigint not null, timestamp timestamp not null"
)
_HOUR_S: Final = 3600


class Latency(TopicReporting):
    ABOUT: ClassVar = "shows on a page how long messages take from publish to settle, by topic, group and hour"

    #: The same as the broker's `traces.sample`: one of a thousand messages is recorded.
    sample: float = Field(default=0.001, gt=0, le=1)

    def sources(self) -> dict[str, Source]:
        return {"events": Source(table="passports")}

    def work(self, work: Work) -> int:
        settled = self._settled(work)
        if settled is None:
            rows: list[Any] = []
        else:
            from pyspark.sql import functions as F  # noqa: N812

            hour = (F.floor(F.unix_timestamp("settled") / _HOUR_S) * _HOUR_S).cast("long")
            rows = _percentiles(settled.withColumn("hour", hour), "topic", "group", "hour").collect()
            rows += _percentiles(settled, "topic", "group").collect()
        facts = sorted(
            (_fact(row) for row in rows), key=lambda each: (each["topic"], each["group"], each["hour"] or "")
        )
        self.publish(work, self._page(work, facts), {"rows": facts})
        return sum(each["recorded"] for each in facts if each["hour"] is None)

    def _settled(self, work: Work) -> DataFrame | None:
        """A row for each message whose settling was recorded: since when it was there, and how many it stands for."""
        from pyspark.sql import functions as F  # noqa: N812

        # All of the past: a message that was settled in this time may have failed before it.
        chosen = {name: value for name, value in self.chosen(work.now).items() if name != "startingTimestamp"}
        events = work.read("events", **chosen).filter(F.col("id").isNotNull()).persist()
        acked = events.filter(F.col("event") == "acked").select(*_PLACE, "group", F.col("time").alias("settled"))
        if self.last is not None:
            acked = acked.filter(F.unix_millis("settled") >= F.lit(since_ms(work.now, self.last)))
        topics = [row["topic"] for row in acked.select("topic").distinct().collect()]
        if not topics:
            return None
        failed = events.filter(F.col("event").isin(*_FAILED)).select(*_PLACE, "group", F.lit(True).alias("failed"))
        published = work.other(_PUBLISHED, subscribe=",".join(topics), failOnDataLoss="false").select(
            *_PLACE, F.col("timestamp").alias("published")
        )
        joined = (
            acked.groupBy(*_PLACE, "group")
            .agg(F.max("settled").alias("settled"))
            .join(failed.distinct(), [*_PLACE, "group"], "left")
            .join(published, list(_PLACE))
        )
        micros = F.unix_micros("settled") - F.unix_micros("published")
        weight = F.when(F.col("failed").isNull(), F.lit(round(1 / self.sample))).otherwise(F.lit(1))
        return joined.withColumn("ms", F.greatest(micros / 1000, F.lit(0.0))).withColumn("weight", weight)

    def _page(self, work: Work, facts: list[dict[str, Any]]) -> Page:
        page = Page(
            f"From publish to settle: {self.scope}",
            "How long messages take from the time that their producer gave them until a consumer has acknowledged "
            "them, waiting and retries included.",
            work.now,
        )
        totals = [each for each in facts if each["hour"] is None]
        if not totals:
            page.section(
                "Nothing to see",
                card("No settled message was recorded then. The broker's setting traces.sample says how many are."),
            )
            return page
        recorded = sum(each["recorded"] for each in totals)
        slowest = max(totals, key=lambda each: float(each["p99"]))
        page.figures(
            [
                Figure("Recorded", short(recorded), f"for about {short(sum(each['messages'] for each in totals))}"),
                Figure("Slowest p99", _shown_ms(slowest["p99"]), f"{slowest['topic']} → {slowest['group']}"),
                Figure("Longest", _shown_ms(max(each["longest"] for each in totals)), "of those recorded"),
            ]
        )
        page.findings(_findings(totals))
        for each in totals:
            hours = [hour for hour in facts if hour["hour"] is not None and _of(hour, each)]
            times, series = _by_hour(hours)
            title = f"{each['topic']} → {each['group']}"
            page.section(title, card(lines(times, series, what=f"Percentiles of {title} by hour", unit="ms")))
        page.section(
            "All of it",
            table(
                ("topic", "group", "messages, about", "recorded", "after failures", *_PERCENTILES, "longest"),
                [
                    (
                        *(each["topic"], each["group"], each["messages"], each["recorded"], each["retried"]),
                        *(_shown_ms(each[name]) for name in (*_PERCENTILES, "longest")),
                    )
                    for each in totals
                ],
            ),
            note=f"Messages that failed once are all recorded; of the others one of {short(round(1 / self.sample))} "
            "is, and counts for as many.",
        )
        return page


def _percentiles(rows: DataFrame, *by: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812

    return rows.groupBy(*by).agg(
        F.sum("weight").alias("messages"),
        F.count("*").alias("recorded"),
        F.count("failed").alias("retried"),
        F.max("ms").alias("longest"),
        *[F.percentile("ms", share, F.col("weight")).alias(name) for name, share in _PERCENTILES.items()],
    )


def _fact(row: Any) -> dict[str, Any]:
    fact: dict[str, Any] = {"hour": None, **row.asDict()}
    if fact["hour"] is not None:
        fact["hour"] = datetime.fromtimestamp(fact["hour"], UTC).isoformat()
    for name in (*_PERCENTILES, "longest"):
        fact[name] = round(fact[name], 3)
    return fact


def _of(hour: dict[str, Any], total: dict[str, Any]) -> bool:
    return (hour["topic"], hour["group"]) == (total["topic"], total["group"])


def _by_hour(hours: list[dict[str, Any]]) -> tuple[list[datetime], dict[str, list[float | None]]]:
    by_time = {datetime.fromisoformat(each["hour"]): each for each in hours}
    first, last = min(by_time), max(by_time)
    count = int((last - first).total_seconds() // _HOUR_S) + 1
    times = [datetime.fromtimestamp(first.timestamp() + number * _HOUR_S, UTC) for number in range(count)]
    series = {name: [by_time[time][name] if time in by_time else None for time in times] for name in _PERCENTILES}
    return times, series


def _findings(totals: list[dict[str, Any]]) -> list[tuple[Tone, str]]:
    found: list[tuple[Tone, str]] = []
    for each in totals:
        if each["p50"] and each["p99"] / each["p50"] >= 20:
            said = f"<b>{escape(each['topic'])} → {escape(each['group'])}</b>: one message in a hundred takes "
            said += f"{each['p99'] / each['p50']:.0f} times as long as usual ({_shown_ms(each['p99'])})."
            found.append(("warn", Html(said)))
    return found


def _shown_ms(ms: float) -> str:
    for limit, size, unit in ((1000, 1, "ms"), (60_000, 1000, "s"), (3_600_000, 60_000, "min")):
        if ms < limit:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 3_600_000:.3g} h"

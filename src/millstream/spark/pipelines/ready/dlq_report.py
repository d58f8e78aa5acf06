"""`dlq-report`: what fails, why, where and since when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.spark.pipelines.definition import Names, Source
from millstream.spark.pipelines.ready.page import Figure, Html, Page, Tone, ago, card, table
from millstream.spark.pipelines.ready.plots import bars, buckets, short, sparkline, stacked
from millstream.spark.pipelines.ready.shapes import families, shape_column
from millstream.spark.pipelines.ready.work import TopicReporting, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["DeadLetterReport"]

#: Shapes of errors that come to the driver; what is beyond them is one line.
_SHAPES_MAX: Final = 2_000
_SERIES: Final = 5
_LISTED: Final = 8
_NEVER_YET: Final = datetime.max.replace(tzinfo=UTC)
_NOT_YET: Final = datetime.min.replace(tzinfo=UTC)


@dataclass
class Cluster:
    """One mistake: letters whose errors are alike."""

    error: str
    topic: str
    group: str
    reason: str
    letters: int = 0
    first: datetime = _NEVER_YET
    last: datetime = _NOT_YET
    #: A text of it as it was, and the letter that says it.
    example: str = ""
    example_id: str = ""
    keys: int = 0
    deliveries: float = 0.0
    times: list[int] = field(default_factory=list)


class DeadLetterReport(TopicReporting):
    ABOUT: ClassVar = "shows on a page, from the dead letters, what fails, why, where and since when"

    #: Only letters of these groups.
    groups: Names | None = None
    #: How many mistakes are listed one by one.
    limit: int = 40

    def sources(self) -> dict[str, Source]:
        return {"letters": Source(table="dead_letters")}

    def work(self, work: Work) -> int:
        letters = self._letters(work).persist()
        try:
            facts = _looked_at(letters, work)
        finally:
            letters.unpersist()
        self.publish(work, self._page(work, facts), facts)
        return int(facts["letters"])

    def _letters(self, work: Work) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        rows = work.read("letters", **self.chosen(work.now))
        if self.groups is not None:
            rows = rows.filter(F.col("group").isin(self.groups))
        return rows.select(
            *("id", "topic", "group", "reason", "error", "died", "deliveries", "key", "timestamp", "attempts"),
            shape_column(F.col("error")).alias("shape"),
        )

    # --- the page ----------------------------------------------------------------------------------------------------

    def _page(self, work: Work, facts: dict[str, Any]) -> Page:
        clusters: list[Cluster] = [Cluster(**each) for each in facts["clusters"]]
        page = Page(f"Dead letters: {self.scope}", _lead(facts, work.now), work.now)
        if not clusters:
            page.section("Nothing is dead", card("No message was given up on in this time. Enjoy the day."))
            return page
        total = facts["letters"]
        page.figures(_figures(facts, clusters, work.now))
        page.findings(_findings(facts, clusters, work.now))
        times = [datetime.fromisoformat(each) for each in facts["times"]]
        page.section("When messages died", card(stacked(times, _series(clusters), what="Dead letters over time")))
        page.section(
            "What fails, and why",
            _cluster_table(clusters[: self.limit]),
            note="Error texts that differ only in numbers, ids, times and addresses are one line; the text below it is "
            "the newest one as it was."
            + (f" The {self.limit} largest of {len(clusters)}." if len(clusters) > self.limit else ""),
        )
        page.beside(
            ("Where: topics and groups", bars(_bars(facts["places"], total), what="Dead letters by topic and group")),
            ("Why: reasons", bars(_bars(facts["reasons"], total), what="Dead letters by reason", colour="two")),
        )
        page.beside(
            ("Which keys", bars(_bars(facts["keys"], total), what="Dead letters by key", colour="three")),
            (
                "Failed deliveries by consumer",
                bars(_bars(facts["consumers"], facts["deliveries"]), what="By consumer", colour="four"),
            ),
        )
        page.section("What to do next", _next(clusters[0]))
        return page


def _looked_at(letters: DataFrame, work: Work) -> dict[str, Any]:
    """Everything that the page says, as numbers."""
    from pyspark.sql import functions as F  # noqa: N812

    (span,) = letters.agg(
        F.count("*").alias("letters"),
        F.min("died").alias("first"),
        F.max("died").alias("last"),
        F.sum(F.size("attempts")).alias("deliveries"),
    ).collect()
    if not span["letters"]:
        return {"letters": 0, "first": None, "last": None, "times": [], "clusters": []}
    first, last = _utc(span["first"]), _utc(span["last"])
    step_s, times = buckets(first, last)
    start_s = int(times[0].timestamp())
    named = ("topic", "group", "reason", "shape")
    shapes = (
        letters.groupBy(*named)
        .agg(
            F.count("*").alias("letters"),
            F.min("died").alias("first"),
            F.max("died").alias("last"),
            F.max_by("error", "died").alias("example"),
            F.max_by("id", "died").alias("example_id"),
            F.approx_count_distinct("key").alias("keys"),
            F.sum("deliveries").alias("deliveries"),
        )
        .orderBy(F.desc("letters"), *named)
        .limit(_SHAPES_MAX)
        .collect()
    )
    column = F.floor((F.unix_timestamp("died") - start_s) / step_s).cast("int")
    counts = letters.groupBy(*named, column.alias("column")).count().collect()
    clusters = _clusters(shapes, counts, len(times))
    return {
        "letters": span["letters"],
        # That failed, and of which the letters still know.
        "deliveries": span["deliveries"],
        "first": first,
        "last": last,
        "step_s": step_s,
        "times": [time.isoformat() for time in times],
        "clusters": [asdict(each) for each in clusters],
        "places": _counted(letters.select(F.concat_ws(" → ", "topic", "group").alias("name"))),
        "reasons": _counted(letters.select(F.col("reason").alias("name"))),
        "keys": _counted(letters.select(F.coalesce(F.col("key").cast("string"), F.lit("(no key)")).alias("name"))),
        "consumers": _counted(
            letters.select(F.explode("attempts").alias("attempt")).select(F.col("attempt.consumer").alias("name"))
        ),
        "made": work.now,
    }


def _clusters(shapes: list[Any], counts: list[Any], columns: int) -> list[Cluster]:
    """Rows of the same place and family are one, the largest first."""
    family = families(row["shape"] for row in shapes)
    found: dict[tuple[str, ...], Cluster] = {}
    for row in shapes:
        name = (row["topic"], row["group"], row["reason"], family[row["shape"]])
        cluster = found.get(name)
        if cluster is None:
            cluster = found[name] = Cluster(name[3], *name[:3], times=[0] * columns)
        if _utc(row["last"]) > cluster.last:
            cluster.last, cluster.example, cluster.example_id = (
                _utc(row["last"]),
                row["example"] or "",
                row["example_id"],
            )
        cluster.first = min(cluster.first, _utc(row["first"]))
        cluster.letters += row["letters"]
        cluster.keys += row["keys"]
        cluster.deliveries += row["deliveries"] or 0
    for row in counts:
        cluster = found.get((row["topic"], row["group"], row["reason"], family.get(row["shape"], row["shape"])))
        if cluster is not None:
            cluster.times[row["column"]] += row["count"]
    for cluster in found.values():
        cluster.deliveries = round(cluster.deliveries / cluster.letters, 1)
    return sorted(found.values(), key=lambda each: (-each.letters, each.error))


def _counted(names: DataFrame) -> list[tuple[str, int]]:
    from pyspark.sql import functions as F  # noqa: N812

    rows = names.groupBy("name").count().orderBy(F.desc("count"), "name").limit(_LISTED).collect()
    return [(row["name"] or "(unknown)", row["count"]) for row in rows]


def _utc(time: datetime) -> datetime:
    """PySpark gives times as the clock of this machine shows them, without a zone, whatever that of the session is."""
    return time.astimezone(UTC)


# --- words -----------------------------------------------------------------------------------------------------------


def _lead(facts: dict[str, Any], now: datetime) -> str:
    if not facts["letters"]:
        return "Messages that queue groups have given up on."
    return (
        f"{short(facts['letters'])} messages that queue groups have given up on, the first of them "
        f"{ago(now, facts['first'])}, the last {ago(now, facts['last'])}."
    )


def _figures(facts: dict[str, Any], clusters: list[Cluster], now: datetime) -> list[Figure]:
    places = {(each.topic, each.group) for each in clusters}
    largest = clusters[0].letters / facts["letters"]
    return [
        Figure(
            "Dead letters", short(facts["letters"]), f"in {len(places)} queue{'s' if len(places) > 1 else ''}", "bad"
        ),
        Figure("Different mistakes", short(len(clusters)), f"the largest is {largest:.0%} of all"),
        Figure("Since", ago(now, facts["first"]), facts["first"].strftime("%Y-%m-%d %H:%M:%S")),
        Figure("Last", ago(now, facts["last"]), facts["last"].strftime("%Y-%m-%d %H:%M:%S")),
    ]


def _findings(facts: dict[str, Any], clusters: list[Cluster], now: datetime) -> list[tuple[Tone, str]]:
    total = facts["letters"]
    top = clusters[0]
    found: list[tuple[Tone, str]] = [
        (
            "bad",
            Html(
                f"{top.letters / total:.0%} of all letters are one mistake in <b>{escape(top.topic)}</b> "
                f"(group {escape(top.group)}): <code>{escape(top.error)}</code>, first seen {ago(now, top.first)}."
            ),
        )
    ]
    span_s = (facts["last"] - facts["first"]).total_seconds()
    recent = [each for each in clusters if span_s and (facts["last"] - each.first).total_seconds() < span_s / 5]
    for each in recent[:2]:
        if each is not top:
            said = f"New: <code>{escape(each.error)}</code> in <b>{escape(each.topic)}</b> began {ago(now, each.first)}"
            found.append(("warn", Html(f"{said} and has {short(each.letters)} letters.")))
    over = [each for each in clusters if span_s and (facts["last"] - each.last).total_seconds() > span_s / 2]
    if over:
        letters = sum(each.letters for each in over)
        said = f"{len(over)} mistake{'s seem' if len(over) > 1 else ' seems'} to be over: nothing new of"
        them = "them" if len(over) > 1 else "it"
        found.append(("good", f"{said} {them} in the second half of this time ({short(letters)} letters)."))
    name, letters = facts["keys"][0]
    if name != "(no key)" and letters >= 5 and letters / total >= 0.2:
        said = f"Key <code>{escape(name)}</code> alone has {letters / total:.0%} of the letters."
        found.append(("warn", Html(said)))
    return found


def _series(clusters: list[Cluster]) -> dict[str, list[float]]:
    series: defaultdict[str, list[float]] = defaultdict(list)
    for number, each in enumerate(clusters):
        name = each.error if number < _SERIES or len(clusters) == _SERIES + 1 else "others"
        before = series.get(name) or [0.0] * len(each.times)
        series[name] = [one + other for one, other in zip(before, each.times, strict=True)]
    return dict(series)


def _cluster_table(clusters: list[Cluster]) -> str:
    rows = []
    for each in clusters:
        text = f"<b>{escape(each.error)}</b>"
        if each.example and each.example != each.error:
            text += f"<br><small>{escape(each.example[:300])}</small>"
        text += f"<br><small>newest <code>{escape(each.example_id)}</code></small>"
        where = f"{escape(each.topic)}<br><small>{escape(each.group)} · {escape(each.reason)}</small>"
        plot = sparkline(each.times, what=f"{each.letters} letters over time")
        rows.append(
            (
                Html(f"<div class='wide'>{text}</div>"),
                each.letters,
                Html(where),
                each.first,
                each.last,
                Html(plot),
                each.deliveries,
            )
        )
    return table(("mistake", "letters", "where", "since", "last", "over time", "deliveries each"), rows)


def _bars(counts: list[tuple[str, int]], total: int) -> list[tuple[str, float, str]]:
    """With their share of all, of which these are the largest."""
    return [(name, count, f"{count / total:.0%}") for name, count in counts]


def _next(top: Cluster) -> Html:
    """Commands for the largest mistake, as it would be typed."""
    lines = [
        f"millstream dlq show {top.example_id}",
        f"millstream dlq list --topic {top.topic} --group {top.group} --reason {top.reason}",
        f"millstream dlq replay --topic {top.topic} --group {top.group} --reason {top.reason} --dry-run",
    ]
    return card("".join(f"<div><code>{escape(line)}</code></div>" for line in lines))

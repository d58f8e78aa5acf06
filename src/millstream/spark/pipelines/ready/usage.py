"""`usage`: what each namespace stores and publishes, for those who plan, or pay."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from functools import reduce
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.errors import Forbidden
from millstream.spark.pipelines.definition import Millis, Names, Source
from millstream.spark.pipelines.ready.page import Figure, Html, Page, Tone, card, shown_bytes, table
from millstream.spark.pipelines.ready.plots import bars, midnight, short, stacked
from millstream.spark.pipelines.ready.work import Reporting, Work, since_ms
from millstream.wire.access_calls import QuotaInfo, ShowQuota
from millstream.wire.calls import ListNamespaces

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Usage"]

_SERIES: Final = 6
_ALMOST: Final = 0.8
_LISTED: Final = 10


class Usage(Reporting):
    ABOUT: ClassVar = "shows on a page what each namespace stores and publishes, by topic and day"

    #: Namespaces by name. Without it, all that there are.
    namespaces: Names | None = None
    #: How far to look back, such as `30d`. Without it, as far as there is something.
    last: Millis | None = None

    def sources(self) -> dict[str, Source]:
        return {"topics": Source(table="topics")}

    def work(self, work: Work) -> int:
        names = self.namespaces or work.connection.call(ListNamespaces(), list[str])
        topics = [each for name in names for each in _stored(work, name)]
        days = self._days(work, topics)
        facts = {
            "namespaces": [_namespace(name, topics, days, _quota(work, name)) for name in names],
            "topics": sorted(topics, key=lambda each: -each["bytes"]),
            "days": days,
        }
        facts["namespaces"].sort(key=lambda each: -each["bytes"])
        self.publish(work, _page(work, facts), facts)
        return sum(each["messages"] for each in days)

    def _days(self, work: Work, topics: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was published on each day and is still there."""
        from pyspark.sql import functions as F  # noqa: N812

        options = {"failOnDataLoss": "false"}
        if self.last is not None:
            options["startingTimestamp"] = str(since_ms(work.now, self.last))
            options["startingOffsetsByTimestampStrategy"] = "latest"
        by_namespace: defaultdict[str, list[str]] = defaultdict(list)
        for each in topics:
            if each["messages"]:
                by_namespace[each["namespace"]].append(each["topic"])
        size = F.coalesce(F.length("key"), F.lit(0)) + F.coalesce(F.length("value"), F.lit(0))
        counted: list[DataFrame] = [
            work.other(**options, namespace=name, subscribe=",".join(filled))
            .groupBy("topic", F.date_format("timestamp", "yyyy-MM-dd").alias("day"))
            .agg(F.count("*").alias("messages"), F.sum(size).alias("bytes"))
            .withColumn("namespace", F.lit(name))
            for name, filled in by_namespace.items()
        ]
        if not counted:
            return []
        rows = reduce(lambda one, other: one.unionByName(other), counted).orderBy("day", "namespace", "topic").collect()
        return [row.asDict() for row in rows]


def _stored(work: Work, namespace: str) -> list[dict[str, Any]]:
    from pyspark.sql import functions as F  # noqa: N812

    rows = (
        work.other(table="topics", namespace=namespace)
        .groupBy("topic")
        .agg(F.sum("messages").alias("messages"), F.sum("sizeBytes").alias("bytes"), F.count("*").alias("partitions"))
        .collect()
    )
    return [{"namespace": namespace, **row.asDict()} for row in rows]


def _quota(work: Work, namespace: str) -> QuotaInfo | None:
    try:
        quota: QuotaInfo = work.connection.call(ShowQuota(namespace=namespace), QuotaInfo)
        return quota
    except Forbidden:
        return None  # quotas are for administrators, usage is for everybody


def _namespace(
    name: str, topics: list[dict[str, Any]], days: list[dict[str, Any]], quota: QuotaInfo | None
) -> dict[str, Any]:
    own = [each for each in topics if each["namespace"] == name]
    published = [each for each in days if each["namespace"] == name]
    return {
        "namespace": name,
        "topics": len(own),
        "partitions": sum(each["partitions"] for each in own),
        "messages": sum(each["messages"] for each in own),
        "bytes": sum(each["bytes"] for each in own),
        "published": sum(each["messages"] for each in published),
        "published_bytes": sum(each["bytes"] for each in published),
        "quota_bytes": quota.storage_bytes if quota is not None else 0,
    }


def _page(work: Work, facts: dict[str, Any]) -> Page:
    spaces: list[dict[str, Any]] = facts["namespaces"]
    page = Page("Usage by namespace", "What each namespace stores, and what was published in it day by day.", work.now)
    page.figures(
        [
            Figure("Stored", shown_bytes(sum(each["bytes"] for each in spaces)), "on disk, all namespaces"),
            Figure("Messages", short(sum(each["messages"] for each in spaces)), "that are there"),
            Figure("Namespaces", short(len(spaces)), f"with {len(facts['topics'])} topics"),
        ]
    )
    page.findings(_findings(spaces))
    times, series = _by_day(facts["days"], [each["namespace"] for each in spaces])
    if times:
        page.section(
            "Messages by day",
            card(stacked(times, series, what="Messages by day and namespace")),
            note="By the time of the messages; those that retention has removed are not counted.",
        )
    stored = [(each["namespace"], each["bytes"], shown_bytes(each["bytes"])) for each in spaces]
    largest = [
        (f"{each['namespace']} / {each['topic']}", each["bytes"], shown_bytes(each["bytes"]))
        for each in facts["topics"][:_LISTED]
    ]
    page.beside(
        ("Stored by namespace", bars(stored, what="Stored", numbers=False)),
        ("Largest topics", bars(largest, what="Topics", colour="two", numbers=False)),
    )
    page.section(
        "Namespaces",
        table(
            ("namespace", "topics", "partitions", "messages", "stored", "quota", "published", "bytes published"),
            [
                (
                    *(each["namespace"], each["topics"], each["partitions"], each["messages"]),
                    shown_bytes(each["bytes"]),
                    shown_bytes(each["quota_bytes"]) if each["quota_bytes"] else "none",
                    each["published"],
                    shown_bytes(each["published_bytes"]),
                )
                for each in spaces
            ],
        ),
    )
    return page


def _by_day(days: list[dict[str, Any]], names: list[str]) -> tuple[list[datetime], dict[str, list[float]]]:
    found = [time for each in days if (time := midnight(each["day"])) is not None]
    if not found:
        return [], {}
    first, last = min(found), max(found)
    times = [datetime.fromtimestamp(first.timestamp() + n * 86_400, UTC) for n in range((last - first).days + 1)]
    place = {time.strftime("%Y-%m-%d"): number for number, time in enumerate(times)}
    shown = names if len(names) <= _SERIES else [*names[: _SERIES - 1], "others"]
    series = {name: [0.0] * len(times) for name in shown}
    for each in days:
        name = each["namespace"] if each["namespace"] in series else "others"
        if each["day"] in place:
            series[name][place[each["day"]]] += each["messages"]
    return times, series


def _findings(spaces: list[dict[str, Any]]) -> list[tuple[Tone, str]]:
    found: list[tuple[Tone, str]] = []
    for each in spaces:
        if each["quota_bytes"] and each["bytes"] >= _ALMOST * each["quota_bytes"]:
            share = each["bytes"] / each["quota_bytes"]
            found.append(("warn", Html(f"<b>{escape(each['namespace'])}</b> uses {share:.0%} of its storage quota.")))
    total = sum(each["bytes"] for each in spaces)
    if spaces and total and len(spaces) > 1:
        top = spaces[0]
        said = f"<b>{escape(top['namespace'])}</b> has {top['bytes'] / total:.0%} of what is stored."
        found.append(("", Html(said)))
    return found

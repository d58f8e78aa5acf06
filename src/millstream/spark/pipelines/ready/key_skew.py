"""`key-skew`: which keys and partitions have more than their share."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field

from millstream.spark.pipelines.definition import Source
from millstream.spark.pipelines.ready.page import Figure, Html, Page, Tone, card, shown_bytes, table
from millstream.spark.pipelines.ready.plots import bars, short
from millstream.spark.pipelines.ready.work import TopicReporting, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KeySkew"]

_EVERYTHING: Final = r"(?!.*\.dlq$).*"
#: A key that has so much of a topic can keep a partition, and a consumer, busy alone.
_HOT_SHARE: Final = 0.2
#: A partition that has so many times the mean.
_HOT_PARTITION: Final = 1.5
_NO_KEY: Final = "(no key)"


class KeySkew(TopicReporting):
    ABOUT: ClassVar = "shows on a page which keys and partitions have more than their share of messages"

    #: How many keys are listed for each topic.
    limit: int = Field(default=10, ge=1, le=100)

    def sources(self) -> dict[str, Source]:
        if self.topics is not None:
            return {"messages": Source(topics=self.topics, stream=False)}
        return {"messages": Source(pattern=self.pattern or _EVERYTHING, stream=False)}

    def work(self, work: Work) -> int:
        chosen = {name: value for name, value in self.chosen(work.now).items() if name == "startingTimestamp"}
        if chosen:
            chosen["startingOffsetsByTimestampStrategy"] = "latest"
        counts = work.other(table="topics").groupBy("topic").count().collect()
        facts = self._looked_at(work.read("messages", **chosen), {row["topic"]: row["count"] for row in counts})
        self.publish(work, self._page(work, facts), {"topics": facts})
        return sum(each["messages"] for each in facts)

    def _looked_at(self, messages: DataFrame, partitions: dict[str, int]) -> list[dict[str, Any]]:
        from pyspark.sql import Window
        from pyspark.sql import functions as F  # noqa: N812

        size = F.coalesce(F.length("key"), F.lit(0)) + F.coalesce(F.length("value"), F.lit(0))
        keys = (
            messages.groupBy("topic", "partition", "key")
            .agg(F.count("*").alias("messages"), F.sum(size).alias("bytes"))
            .persist()
        )
        try:
            topics = keys.groupBy("topic").agg(
                F.sum("messages").alias("messages"),
                F.sum("bytes").alias("bytes"),
                F.count_distinct("key").alias("keys"),
            )
            rank = F.row_number().over(Window.partitionBy("topic").orderBy(F.desc("messages"), "key"))
            by_key = keys.groupBy("topic", "key").agg(
                F.sum("messages").alias("messages"),
                F.sum("bytes").alias("bytes"),
                F.min("partition").alias("partition"),
            )
            # One more than is listed: messages without a key are none.
            ranked = by_key.withColumn("rank", rank).filter(F.col("rank") <= self.limit + 1)
            top = ranked.orderBy("topic", "rank").collect()
            parts = keys.groupBy("topic", "partition").agg(F.sum("messages").alias("messages")).collect()
            found = topics.orderBy(F.desc("messages"), "topic").collect()
            return [_topic(row, top, parts, partitions.get(row["topic"], 1), self.limit) for row in found]
        finally:
            keys.unpersist()

    def _page(self, work: Work, facts: list[dict[str, Any]]) -> Page:
        messages = sum(each["messages"] for each in facts)
        page = Page(
            f"Keys and partitions: {self.scope}",
            "A key goes to one partition, and with it all the work of that key. Where one has much more than the "
            "others, more partitions and more consumers do not help.",
            work.now,
        )
        if not facts:
            page.section("Nothing to see", card("There are no messages in this time."))
            return page
        hot = [each for each in facts if each["hot"]]
        page.figures(
            [
                Figure("Messages", short(messages), f"in {len(facts)} topics"),
                Figure("Keys", short(sum(each["keys"] for each in facts)), "different ones"),
                Figure("Topics with skew", str(len(hot)), "see below", "warn" if hot else "good"),
            ]
        )
        page.findings(_findings(facts))
        for each in facts:
            page.section(f"{each['topic']}: {short(each['messages'])} messages, {short(each['keys'])} keys")
            page.beside(
                ("Messages by partition", bars(_partition_bars(each), what="Messages by partition", colour="three")),
                ("Largest keys", bars(_key_bars(each), what="Messages by key")),
            )
        page.section(
            "All topics",
            table(
                ("topic", "messages", "keys", "bytes", "largest key", "its share", "largest partition / mean"),
                [
                    (
                        each["topic"],
                        each["messages"],
                        each["keys"],
                        shown_bytes(each["bytes"]),
                        each["largest"]["key"] if each["largest"] else _NO_KEY,
                        f"{each['largest']['share']:.1%}" if each["largest"] else "",
                        each["skew"],
                    )
                    for each in facts
                ],
            ),
        )
        return page


def _topic(row: Any, top: list[Any], parts: list[Any], partitions: int, limit: int) -> dict[str, Any]:
    messages: int = row["messages"]
    filled = {part["partition"]: part["messages"] for part in parts if part["topic"] == row["topic"]}
    own = [(number, filled.get(number, 0)) for number in range(max(partitions, max(filled) + 1))]
    keys = [_key(key, messages) for key in top if key["topic"] == row["topic"]]
    # What has no key is spread over all partitions, however much it is.
    largest = next(
        (_key(key, messages) for key in top if key["topic"] == row["topic"] and key["key"] is not None), None
    )
    skew = round(max(count for _, count in own) / (messages / len(own)), 2)
    hot_key = largest is not None and largest["share"] >= _HOT_SHARE and (row["keys"] > 1 or len(keys) > 1)
    return {
        "topic": row["topic"],
        "messages": messages,
        "bytes": row["bytes"],
        "keys": row["keys"],
        "partitions": own,
        "top": keys[:limit],
        "largest": largest,
        "skew": skew,
        "hot": hot_key or skew >= _HOT_PARTITION,
    }


def _key(row: Any, messages: int) -> dict[str, Any]:
    return {
        "key": _shown(row["key"]),
        "messages": row["messages"],
        "bytes": row["bytes"],
        "share": row["messages"] / messages,
        "partition": row["partition"],
    }


def _shown(key: bytes | None) -> str:
    return _NO_KEY if key is None else bytes(key).decode(errors="replace")[:80]


def _findings(facts: list[dict[str, Any]]) -> list[tuple[Tone, str]]:
    found: list[tuple[Tone, str]] = []
    for each in facts:
        if not each["hot"]:
            continue
        largest = each["largest"]
        said = f"<b>{escape(each['topic'])}</b>: "
        if largest is not None:
            said += f"key <code>{escape(largest['key'])}</code> has {largest['share']:.0%} of the messages; "
        found.append(("warn", Html(f"{said}the largest partition has {each['skew']} times the mean.")))
    return found or [("good", "No key and no partition has much more than its share.")]


def _partition_bars(topic: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [(f"partition {number}", count, f"{count / topic['messages']:.0%}") for number, count in topic["partitions"]]


def _key_bars(topic: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [(each["key"], each["messages"], f"{each['share']:.1%}") for each in topic["top"]]

"""Metrics as text: names, labels, and what is folded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from millstream.broker.latency import Latencies
from millstream.broker.metrics import Metrics
from millstream.broker.pipelines import PipelineRow
from millstream.broker.stats import families
from millstream.broker.stats.exposition import Collected, Exposition, fold, histograms_of
from millstream.broker.stats.survey import QueueRow, StreamRow, Survey, TopicRow
from millstream.queues.records import LaneStatistics

OPEN = "application/openmetrics-text; version=1.0.0"


def collected(survey: Survey | None = None, latency: Latencies | None = None) -> Collected:
    latency = latency or Latencies()
    numbers = {family.source: number for number, family in enumerate(families.BROKER, 1)}
    survey = survey or Survey(0, 0, 1)
    doors = {"native": 2, "mqtt": 3}
    pipeline = PipelineRow("default", "archive", 1, 5, 2.5, 7, 3, 120, 0, 900)
    return Collected("1.0", "n1", "normal", doors, numbers, survey, histograms_of(latency), [pipeline])


def full_survey() -> Survey:
    lanes = [LaneStatistics(lane, 1, 2, 3, 0) for lane in range(5)]
    return Survey(
        0,
        0,
        1,
        [TopicRow("default", "orders", published=5)],
        [QueueRow("default", "orders", "billing", ready=1, lanes=lanes)],
        [StreamRow("default", "orders", "audit", lag=7, oldest_ms=1500)],
    )


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(("accept", "parse"), [("", parse_text), (OPEN, parse_open)])
def test_every_family_of_the_catalogue_is_written_and_can_be_read(accept: str, parse: object) -> None:
    latency = Latencies()
    latency.http["topics"] = latency.publish
    text, media_type = Exposition(10).write(collected(full_survey(), latency), accept)
    assert media_type.startswith(accept.partition(";")[0] or "text/plain")
    found = {family.name: family for family in parse(text.decode())}  # type: ignore[operator]
    for _, some in families.all_families():
        for family in some:
            name = family.base_name if family.kind == "counter" else family.name
            assert found[name].type == family.kind, name
            assert found[name].documentation == family.help
            for sample in found[name].samples:
                assert set(sample.labels) - {"le"} == set(family.labels)
    assert "process_resident_memory_bytes" in found
    assert "python_gc_collections" in found


def test_no_two_families_have_the_same_name() -> None:
    names = [family.name for _, some in families.all_families() for family in some]
    assert len(names) == len(set(names))


def test_labels_are_escaped() -> None:
    awkward = 'back\\slash "quote"\nline'
    survey = Survey(0, 0, 1, [TopicRow("default", awkward, published=3)])
    text, _ = Exposition(10).write(collected(survey), "")
    assert values(text.decode())["millstream_published_total", (("namespace", "default"), ("topic", awkward))] == 3


def test_a_histogram_is_cumulative_and_in_seconds() -> None:
    latency = Latencies()
    latency.publish.observe(100, 3)
    latency.publish.observe(2_000_000, 1)
    latency.publish.observe(10**14, 1)  # longer than any bucket
    found = values(Exposition(10).write(collected(latency=latency), "")[0].decode())
    at = {
        dict(labels)["le"]: value
        for (name, labels), value in found.items()
        if name == "millstream_publish_seconds_bucket"
    }
    assert (at["6.4e-05"], at["0.000128"], at["2.097152"], at["+Inf"]) == (0, 3, 4, 5)
    assert found["millstream_publish_seconds_count", ()] == 5
    assert found["millstream_publish_seconds_sum", ()] == pytest.approx(10**8 + 2.0003)


def test_topics_beyond_the_limit_are_summed_up_and_counted() -> None:
    rows = [TopicRow("default", f"t{number}", published=number, throttle_ms=number) for number in range(10)]
    found = values(Exposition(4).write(collected(Survey(0, 0, 1, rows)), "")[0].decode())
    published = {
        dict(labels)["topic"]: value for (name, labels), value in found.items() if name == "millstream_published_total"
    }
    assert published == {"t0": 0, "t1": 1, "t2": 2, "t3": 3, "_other": 4 + 5 + 6 + 7 + 8 + 9}
    assert found["millstream_series_folded", (("of", "topics"),)] == 6
    delay = found["millstream_throttle_delay_seconds", (("namespace", ""), ("topic", "_other"))]
    assert delay == pytest.approx(0.009), "the longest, not the sum"


def test_what_is_summed_up_never_goes_back() -> None:
    """A topic that is deleted takes its count with it; Prometheus would take that for a restart."""
    exposition = Exposition(1)
    rows = [TopicRow("default", f"t{number}", published=100) for number in range(4)]

    def other() -> float:
        found = values(exposition.write(collected(Survey(0, 0, 1, rows)), "")[0].decode())
        return found["millstream_published_total", (("namespace", ""), ("topic", "_other"))]

    assert other() == 300
    del rows[2]
    assert other() == 300
    rows[1] = replace(rows[1], published=500)
    assert other() == 600


def test_priorities_of_folded_queues_are_summed_up() -> None:
    rows = [
        QueueRow("default", f"t{number}", "g", ready=1, oldest_ms=number, lanes=[LaneStatistics(2, 1, 2, 3, 0)])
        for number in range(5)
    ]
    kept, folded = fold(rows, 2)
    assert folded == 3
    assert kept[-1].lanes == [LaneStatistics(2, 3, 6, 9, 0)]
    assert (kept[-1].ready, kept[-1].oldest_ms) == (3, 4)


def test_what_is_summed_up_by_priority_never_goes_back() -> None:
    exposition = Exposition(1)
    lanes = [LaneStatistics(lane, 1, 2, 10 * lane, 0) for lane in range(5)]
    rows = [QueueRow("default", f"t{number}", "billing", lanes=lanes) for number in range(3)]

    def other() -> dict[str, float]:
        found = values(exposition.write(collected(Survey(0, 0, 1, [], rows)), "")[0].decode())
        name = "millstream_lane_delivered_total"
        shown = {frozenset(labels): value for (of, labels), value in found.items() if of == name}
        return {dict(labels)["lane"]: value for labels, value in shown.items() if ("topic", "_other") in labels}

    assert other() == {"0": 0, "1": 20, "2": 40, "3": 60, "4": 80}
    del rows[2]
    assert other() == {"0": 0, "1": 20, "2": 40, "3": 60, "4": 80}


#: Counted per topic, group or door instead, or part of a histogram.
ELSEWHERE = {
    "connections",
    "messages_published", "bytes_published", "messages_leased", "messages_acked", "messages_nacked",
    "messages_rejected", "messages_dead_lettered", "messages_expired", "deliveries", "sync_rounds", "sync_us",
}  # fmt: skip


def test_no_counter_of_the_broker_is_missing_from_the_catalogue() -> None:
    assert Metrics().as_dict().keys() - {family.source for family in families.BROKER} == ELSEWHERE

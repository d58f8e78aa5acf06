"""Files that name a ready pipeline: mistakes are told before Spark starts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from millstream.spark.pipelines.loading import check_pipeline, load_pipeline
from millstream.spark.pipelines.ready.kinds import KINDS, ReadyDefinition
from millstream.spark.pipelines.ready.latency import Latency

EXAMPLES = Path(__file__).parents[3] / "examples" / "pipelines"


def mistakes(text: str) -> list[str]:
    checked, found = check_pipeline(text, Path())
    assert (checked is None) == bool(found)
    return found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ready: achive\noptions: {}", "line 2, ready: there is no ready pipeline 'achive'; did you mean 'archive'?"),
        ("ready: archive\noptions: {topics: a}", "line 3, options.to: the key 'to' is missing"),
        (
            "ready: archive\ncheckpoint: c\noptions: {topics: a, to: b, formt: delta}",
            "line 4, options.formt: there is no key 'formt' here; did you mean 'format'?",
        ),
        ("ready: archive\noptions: {topics: a, to: b}", "say where to keep how far it is: `checkpoint: DIRECTORY`"),
        ("ready: archive\ncheckpoint: c\noptions: {to: b}", "say what to keep by `topics` or by `pattern`"),
        (
            "ready: dlq-report\noptions: {report: r.html}\nsinks: []",
            "line 4, sinks: leave this out: `ready: dlq-report` knows it by its options",
        ),
        (
            "ready: dlq-report\noptions: {report: r.html, topics: a, pattern: b}",
            "say which topics by `topics` or by `pattern`, not by both",
        ),
        (
            "ready: usage\noptions: {report: 's3a://bucket/usage.html'}",
            "line 3, options.report: s3a://bucket/usage.html is elsewhere",
        ),
        (
            "ready: archive\ncheckpoint: c\noptions: {topics: a, to: 'hdfs://name/orders'}",
            "line 4, options.to: hdfs://name/orders is elsewhere",
        ),
        (
            "ready: replay\ncheckpoint: s3a://bucket/c\noptions: {archive: a, to: b}",
            "line 3, checkpoint: s3a://bucket/c is elsewhere",
        ),
        (
            "ready: latency\noptions: {report: r.html, topics: [orders, a b]}",
            "line 3, options.topics: topic 'a b' is not valid",
        ),
        (
            "ready: dlq-report\noptions: {report: r.html, pattern: 'orders('}",
            "line 3, options.pattern: option subscribePattern is not a regular expression",
        ),
        ("ready: dlq-report\noptions: {report: r.html, topics: []}", "line 3, options.topics: say what to read"),
        (
            "ready: dlq-report\ntrigger: 10s\noptions: {report: r.html}",
            "nothing here is a stream, so it runs once: leave `trigger` out",
        ),
        (
            "ready: replay\ncheckpoint: c\noptions: {topics: a}",
            "say where to: the topic would get its own messages again",
        ),
        ("ready: replay\ncheckpoint: c\noptions: {to: b}", "say what to send by `archive` or by `topics`"),
        (
            "ready: replay\ncheckpoint: c\noptions: {archive: a, to: b, since: noon}",
            "'noon' is not a time: write one such as 2026-11-16T08:30:00Z",
        ),
        (
            "ready: archive\ncheckpoint: c\noptions: {topics: a, to: b, source: {maxOffsetPerTrigger: 5}}",
            "there is no source option 'maxOffsetPerTrigger'; did you mean 'maxOffsetsPerTrigger'?",
        ),
        (
            "ready: archive\ncheckpoint: c\noptions: {topics: a, to: b, source: {Claim: workers}}",
            "line 4, options.source.Claim: leave this out: an archive keeps one row per offset, in order, and a queue",
        ),
    ],
)
def test_mistakes_are_told_in_a_sentence(text: str, sentence: str) -> None:
    assert any(sentence in each for each in mistakes(f"name: it\n{text}")), mistakes(f"name: it\n{text}")


def test_paths_of_this_machine_may_be_uris() -> None:
    options = "{topics: a, to: 'file:///archive', report: 'file:///r.html'}"
    assert mistakes(f"name: it\nready: archive\ncheckpoint: 's3a://bucket/c'\noptions: {options}") == []


def test_a_report_may_look_back_as_far_as_anybody_likes() -> None:
    now = datetime(2026, 11, 16, tzinfo=UTC)
    for last, since in (("1d", "1794700800000"), ("5200w", "0")):
        reporting = Latency.model_validate({"report": "r.html", "last": last})
        assert reporting.chosen(now) == {"startingTimestamp": since}


def test_a_single_topic_needs_no_list() -> None:
    for kind in ("audit", "latency", "key-skew", "dlq-report"):
        assert mistakes(f"name: it\nready: {kind}\noptions: {{report: r.html, topics: orders}}") == []


def test_times_may_be_written_as_yaml_likes_them() -> None:
    text = "name: it\nready: replay\ncheckpoint: c\noptions: {archive: a, to: b, since: 2026-11-16, until: 2026-11-17}"
    checked, found = check_pipeline(text, Path())
    assert checked is not None, found
    assert isinstance(checked.definition, ReadyDefinition)
    assert str(getattr(checked.definition.options, "since")) == "2026-11-16 00:00:00+00:00"  # noqa: B009


def test_every_kind_has_an_example_that_is_right() -> None:
    found = {}
    for path in EXAMPLES.glob("*.yaml"):
        checked = load_pipeline(path, broker="elsewhere:1")
        found[yaml.safe_load(path.read_text()).get("ready")] = checked
        assert checked.definition.broker == "elsewhere:1"
    assert set(found) - {None} == set(KINDS)

"""`/metrics`, `/stats/overview` and `/stats/history` over a real socket, and what is made of them in deploy/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from millstream.broker.stats import families
from millstream.client import Client
from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from millstream.wire.pipeline_calls import PipelineWish, ReportPipeline
from tests.e2e.access_world import guarded, key_for
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as broker:
        yield broker


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url) as client:
        yield client


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


def samples(http: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(answer.text)
        for sample in family.samples
    }


def of(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[f"millstream_{name}", frozenset(labels.items())]


def work(client: Client, topic: str) -> None:
    """Ten messages: six acked, three nacked, one rejected; and the same ten read as a stream."""
    for number in range(10):
        client.publish(topic, f"{number}")
    with client.queue(topic, group="billing") as queue:
        for number, message in enumerate(queue):
            if number < 6:
                message.ack()
            elif number < 9:
                message.nack("no", retry_after="1h")
            else:
                message.reject("never", wait=True)
                break
    with client.stream(topic, group="audit", start="earliest", timeout_s=10) as stream:
        assert len(list(islice(stream, 10))) == 10


# --- metrics -----------------------------------------------------------------------------------------------------


def test_the_metrics_say_what_happened(http: httpx.Client, client: Client, broker: BrokerForTests) -> None:
    work(client, "orders")
    broker.clock.advance("10s")
    found = samples(http)
    topic = {"namespace": "default", "topic": "orders"}
    assert of(found, "published_total", **topic) == 10
    assert of(found, "messages", **topic) == 10
    assert of(found, "consumed_total", **topic) >= 20
    queue = {**topic, "group": "billing"}
    assert of(found, "acked_total", **queue) == 6
    assert of(found, "nacked_total", **queue) == 3
    assert of(found, "rejected_total", **queue) == 1
    assert of(found, "dead_lettered_total", **queue) == 1
    assert of(found, "waiting", **queue) == 3
    assert of(found, "ready", **queue) == of(found, "inflight", **queue) == 0
    assert 9 < of(found, "oldest_unsettled_age_seconds", **queue) < 60
    assert of(found, "dead_letters", namespace="default", topic="orders.dlq") == 1
    assert of(found, "group_lag", **topic, group="audit") in range(11)
    for name in ("publish", "fsync"):
        assert of(found, f"{name}_seconds_count") >= 10
    assert of(found, "processing_seconds_count") == 6
    assert of(found, "end_to_end_seconds_count", kind="queue") >= 10
    assert of(found, "end_to_end_seconds_count", kind="stream") >= 10
    assert of(found, "mode", mode="normal") == 1


def test_counters_never_go_back(http: httpx.Client, client: Client) -> None:
    counters = {family.name for _, some in families.all_families() for family in some if family.kind == "counter"}
    before = samples(http)
    for _ in range(3):
        client.publish("steady", "x")
        now = samples(http)
        for key, value in before.items():
            if key[0] in counters or key[0].endswith(("_count", "_bucket")):
                assert now[key] >= value, key
        before = now


def test_a_scraper_gets_the_format_it_asks_for(http: httpx.Client, client: Client) -> None:
    client.publish("scraped", "x")
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    asked = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    answer = http.get("/metrics", headers=asked)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parse_open(answer.text)} >= {"millstream_published", "millstream_mode"}
    compressed = http.get("/metrics", headers={"accept-encoding": "gzip"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert "millstream_mode" in compressed.text


def test_metrics_can_only_be_read(http: httpx.Client) -> None:
    answer = http.post("/metrics")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["code"] == "METHOD_NOT_ALLOWED"
    assert http.head("/metrics").status_code == 200


def test_http_requests_are_timed_by_family(http: httpx.Client) -> None:
    before = samples(http).get(("millstream_http_request_seconds_count", frozenset({("family", "stats")})), 0)
    http.get("/api/v1/stats/overview")
    http.get("/api/v1/stats/history?metric=nonsense")
    assert of(samples(http), "http_request_seconds_count", family="stats") == before + 2


def test_nothing_is_opened_to_be_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerForTests(data) as broker:
        client = broker.connect()
        for number in range(20):
            client.publish(f"t{number}", "x")
    with BrokerForTests(data, http=True) as broker, httpx.Client(base_url=broker.url) as http:
        for _ in range(2):
            assert of(samples(http), "partitions_cold") == 20
        assert http.get("/api/v1/stats/overview").json()["cold_partitions"] == 20
        assert list(broker.broker.topics.open_partitions()) == []


def test_a_backlog_shows_after_a_restart_also_while_its_consumers_are_away(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerForTests(data) as broker:
        client = broker.connect()
        client.create_topic("jobs")
        client.queue("jobs", group="g").close()
        for number in range(7):
            client.publish("jobs", f"{number}")
        client.publish("events", "x")
        client.commit_offsets("audit", {("events", 0): 0})
    with BrokerForTests(data) as broker:
        broker.clock.advance("1h")  # it was an hour ago
        overview = broker.connect().overview()
        assert (overview.depth, overview.cold_partitions) == (7, 0)
        assert 3_590_000 < overview.oldest_ms < 3_700_000
        behind = {(it.kind, it.group): (it.lag, it.state) for it in overview.furthest_behind}
        assert behind == {("queue", "g"): (7, "idle"), ("stream", "audit"): (1, "idle")}


def test_topics_beyond_the_limit_are_folded() -> None:
    settings = Settings.model_validate({"metrics": {"series_max": 3}})
    with BrokerForTests(settings=settings, http=True) as broker, httpx.Client(base_url=broker.url) as http:
        client = broker.connect()
        for number in range(5):
            client.publish(f"t{number}", "x")
        found = samples(http)
        assert of(found, "published_total", namespace="", topic="_other") == 2
        assert of(found, "series_folded", of="topics") == 2
        client.delete_topic("t4")
        assert of(samples(http), "published_total", namespace="", topic="_other") == 2


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_complain_about(http: httpx.Client) -> None:
    assert PROMTOOL is not None
    text = http.get("/metrics").text
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        checked = subprocess.run(
            [PROMTOOL, *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


# --- dashboards and alerts ---------------------------------------------------------------------------------------


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:millstream|process|python)_\w+", text))


def expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((DEPLOY / "grafana" / "millstream.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"][1:]:
        yield variable["name"], variable["query"]["query"]


def test_every_metric_of_the_dashboard_and_the_alerts_exists(http: httpx.Client, client: Client) -> None:
    work(client, "dashboards")
    client.publish("lanes", "x", priority=1)
    with client.queue("lanes", group="g") as queue:
        next(iter(queue)).ack()
    client.call(ReportPipeline(name="clean", run="1", state="running"), PipelineWish)
    http.get("/api/v1/topics")
    shown = {name for name, _ in samples(http)}
    assert len(list(expressions())) > 40
    for where, expression in expressions():
        assert names_in(expression) <= shown, where


def test_labels_in_the_dashboard_and_the_alerts_are_those_of_their_metrics() -> None:
    labels = {family.name: set(family.labels) for _, some in families.all_families() for family in some}
    for where, expression in expressions():
        for name, inside in re.findall(r"\b(millstream_\w+?)(?:_bucket|_count|_sum)?\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)\s*[=!]~?", inside))
            assert used <= labels[name] | {"instance", "job"}, f"{where}: {name}"


# --- overview ----------------------------------------------------------------------------------------------------


def overview(http: httpx.Client, path: str = "", **query: Any) -> dict[str, Any]:
    answer = http.get(f"/api/v1{path}/stats/overview", params=query)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_the_overview_says_what_is_going_on(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path / "data", http=True) as broker, httpx.Client(base_url=broker.url) as http:
        client = broker.connect()
        work(client, "orders")
        for number in range(30):
            client.publish("busier", f"{number}")
        client.publish("later", "x", delay="1h")
        # What is scheduled is counted when its scheduler has taken it up, a moment after it was confirmed.
        eventually(lambda: overview(http)["scheduled"])
        now = overview(http)
        assert now["mode"] == "normal"
        assert now["rates"]["published"] > 0
        assert now["totals"]["published"] >= 40
        assert (now["totals"]["acked"], now["totals"]["failed"], now["totals"]["dead_lettered"]) == (6, 4, 1)
        assert (now["depth"], now["waiting"], now["dead_letters"], now["scheduled"]) == (3, 3, 1, 1)
        assert now["busiest"][0]["topic"] in ("orders", "busier")
        assert now["publish_p99_ms"] > 0
        assert now["memory_bytes"] >= 0
        assert (now["queue_groups"], now["stream_groups"]) == (1, 1)
        broker.clock.advance("30s")
        assert overview(http)["rates"]["published"] == 0
        assert overview(http)["memory_bytes"] > 1_000_000
        assert overview(http)["disk_free_bytes"] > 0
        assert overview(http, limit=1)["busiest"][1:] == []


def test_the_overview_is_about_one_namespace_or_about_all(http: httpx.Client, broker: BrokerForTests) -> None:
    elsewhere = broker.connect(namespace="elsewhere")
    elsewhere.create_topic("theirs")
    elsewhere.publish("theirs", "x")
    there = overview(http, "/namespaces/elsewhere")
    assert (there["namespace"], there["topics"], there["messages"]) == ("elsewhere", 1, 1)
    here = overview(http, limit=1000)
    assert "theirs" not in {row["topic"] for row in here["busiest"]}
    everything = overview(http, limit=1000, everywhere=True)
    assert everything["namespace"] == ""
    assert everything["messages"] == here["messages"] + there["messages"]
    assert ("elsewhere", "theirs") in {(row["namespace"], row["topic"]) for row in everything["busiest"]}


def test_an_overview_of_a_thousand_topics_is_quick() -> None:
    with BrokerForTests() as broker:
        document = {"config": {}, "created_ms": 1, "deleting": False}
        facts = {f"topic/default/t{n}": {**document, "partition_uids": [n + 1]} for n in range(1_000)}
        registry = broker.broker.topics.registry

        async def look() -> float:
            registry.replay(facts)
            began_s = time.thread_time()
            survey = await broker.broker.stats.survey()
            assert len(survey.topics) == 1_000
            return time.thread_time() - began_s

        assert broker.run(look()) < 0.05  # type: ignore[operator]


# --- history -----------------------------------------------------------------------------------------------------


def test_history_over_http(http: httpx.Client, client: Client, broker: BrokerForTests) -> None:
    for _ in range(3):
        client.publish("plotted", "x")
        broker.clock.advance("5s")
    answer = http.get("/api/v1/stats/history", params={"metric": "published_rate", "topic": "plotted", "points": 60})
    assert answer.status_code == 200
    history = answer.json()
    assert (history["metric"], history["unit"], history["topic"]) == ("published_rate", "messages/s", "plotted")
    assert 0 < len(history["points"]) <= 60
    assert max(point["max"] for point in history["points"]) > 0
    assert history["from_ms"] == history["until_ms"] - 3_600_000


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("metric=nonsense", 400, "use one of published_rate"),
        ("metric=lag&group=g", 400, "a group is on a topic"),
        ("metric=depth&topic=nowhere", 404, "does not exist"),
        ("metric=depth&points=0", 400, "between 1 and 2000"),
        ("metric=depth&from_ms=5&until_ms=4", 400, "before until_ms"),
        ("metric=depth&until_ms=99999999999999999999999", 400, "milliseconds since 1970"),
        ("metric=depth&from_ms=-9000000000000000000", 400, "milliseconds since 1970"),
        ("metric=depth&until_ms=9000000000000", 200, "points"),
        ("metric=depth&from_ms=1", 200, "points"),
        ("topic=orders", 400, "metric"),
    ],
)
def test_a_wrong_question_about_history_gets_a_sentence(
    http: httpx.Client, query: str, status: int, words: str
) -> None:
    answer = http.get(f"/api/v1/stats/history?{query}")
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_a_wrong_question_about_the_overview_gets_a_sentence(http: httpx.Client) -> None:
    assert http.get("/api/v1/stats/overview?limit=-1").status_code == 400
    assert http.get("/api/v1/stats/overview?limit=100000").status_code == 400


# --- who may look ------------------------------------------------------------------------------------------------


def test_where_there_are_keys_metrics_need_one_that_may_read_everything() -> None:
    with guarded(http=True) as broker, httpx.Client(base_url=broker.url) as http:
        assert http.get("/metrics").status_code == 401
        for role, status in (("read", 200), ("admin", 200), ("produce", 403)):
            key = key_for(broker, role)
            assert http.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == status, role

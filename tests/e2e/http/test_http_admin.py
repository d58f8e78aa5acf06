"""Administration and health over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from millstream.client import Client
from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from millstream.testing.storage import Fault, SimulatedStorage


def component(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["components"] if one["name"] == name)
    return found


# --- administration ----------------------------------------------------------------------------------------------


def test_settings_are_told_with_where_they_came_from(http: httpx.Client, broker: BrokerForTests) -> None:
    settings = {row["name"]: row for row in http.get("/admin/config").json()}
    assert settings["storage.fsync"] == {"name": "storage.fsync", "value": "group", "source": "default"}
    assert settings["server.port"]["source"] == "program"
    assert {name.partition(".")[0] for name in settings} >= {"server", "storage", "topics"}
    storage = http.get("/admin/config", params={"section": "storage"}).json()
    assert {row["name"].partition(".")[0] for row in storage} == {"storage"}
    changed = http.get("/admin/config", params={"changed": True}).json()
    assert "default" not in {row["source"] for row in changed}


def test_a_checkpoint_puts_everything_on_disk(http: httpx.Client, client: Client, broker: BrokerForTests) -> None:
    client.create_topic("lazy", config={"fsync": "never"})
    client.publish("lazy", b"1")
    client.queues.lease("lazy")
    partition = broker.broker.topics.partition("default", "lazy", 0)
    assert not partition.is_synced
    answer = http.post("/admin/checkpoint").json()
    assert partition.is_synced
    assert (answer["failures"], answer["journals"] >= 1, answer["state_logs"] >= 5) == ([], True, True)


def test_compaction_can_be_asked_for(http: httpx.Client, client: Client) -> None:
    client.create_topic("state", config={"cleanup": "compact"})
    client.publish_many("state", [b"v" * 1000] * 50)
    for number in range(50):
        client.publish("state", str(number).encode(), key="k")
    answer = http.post("/admin/compact", json={"topic": "state"}).json()
    assert (answer["partitions"], answer["compacted"]) == (1, 0)
    answer = http.post("/admin/compact", json={"topic": "state", "roll": True}).json()
    assert answer["compacted"] == 1
    assert answer["bytes_after"] < answer["bytes_before"]
    kept = [message.value for message in client.stream("state", timeout_s=0.1) if message.key]
    assert kept == [b"49"]
    assert http.post("/admin/compact", json={}).json()["partitions"] > 1


def test_the_log_level_changes_at_run_time(http: httpx.Client, broker: BrokerForTests) -> None:
    told: list[str] = []
    broker.broker.on_log_level = told.append
    assert http.put("/admin/log-level", json={"level": "debug"}).json() == {"level": "debug", "before": "info"}
    assert http.put("/admin/log-level", json={"level": "info"}).json() == {"level": "info", "before": "debug"}
    assert told == ["debug", "info"]


def test_connections_are_listed_with_what_they_hold(http: httpx.Client, client: Client, broker: BrokerForTests) -> None:
    client.publish("held", b"1")
    with client.queue("held") as queue:
        (message,) = queue.lease(wait="5s")
        rows = http.get("/admin/connections", params={"door": "native"}).json()
        (holder,) = [row for row in rows if row["queues"]]
        assert (holder["client_id"], holder["queues"], holder["leased"]) == ("tester", ["held/default"], 1)
        assert holder["address"].startswith("127.0.0.1:")
        message.ack()
    with httpx.stream("GET", f"{broker.url}/api/v1/queues/held/default/stream", headers={"X-Client-Id": "me"}):
        (row,) = http.get("/admin/connections", params={"door": "http"}).json()
        assert (row["client_id"], row["queues"]) == ("me", ["held/default"])
    assert http.get("/admin/connections", params={"namespace": "nobody"}).json() == []


def test_maintenance_is_begun_and_ended(http: httpx.Client, broker: BrokerForTests) -> None:
    assert http.get("/admin/mode").json() == {"mode": "normal", "reason": ""}
    assert http.put("/admin/mode", json={"mode": "maintenance", "reason": "new disk"}).json()["mode"] == "maintenance"
    try:
        assert http.get("/admin/mode").json()["reason"] == "new disk"
        ready = http.get("/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert "new disk" in ready.json()["reason"]
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert component(health.json(), "mode")["recommendation"]
        assert http.get("/health/live").status_code == 200
    finally:
        assert http.put("/admin/mode", json={"mode": "normal"}).json()["mode"] == "normal"
    assert httpx.get(f"{broker.url}/health/ready").json() == {"ready": True, "reason": ""}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/admin/compact", {"topic": "nowhere"}, 404),
        ("POST", "/admin/compact", {"topic": "lazy", "namespace": "nowhere"}, 404),
        ("POST", "/admin/compact", {"namespace": "../up"}, 400),
        ("POST", "/admin/checkpoint", {"surprise": 1}, 400),
        ("PUT", "/admin/log-level", {"level": "loud"}, 400),
        ("PUT", "/admin/mode", {"mode": "emergency"}, 400),
        ("PUT", "/admin/mode", {}, 400),
        ("GET", "/admin/connections?limit=0", None, 400),
        ("GET", "/admin/config?what=1", None, 400),
        ("GET", "/health/deep?timeout_ms=0", None, 400),
        ("GET", "/health?deep=1", None, 400),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    http: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["message"]


# --- health ------------------------------------------------------------------------------------------------------


def test_health_stands_where_probes_look_for_it(broker: BrokerForTests) -> None:
    with httpx.Client(base_url=broker.url) as http:
        for path in ("/health", "/health/live", "/health/ready", "/health/deep"):
            assert http.get(path).status_code == 200, path
        assert http.post("/health").status_code == 405


def test_a_deep_check_stores_and_reads_back(http: httpx.Client) -> None:
    report = http.get("/health/deep").json()
    assert (report["status"], report["ready"], report["deep"]) == ("healthy", True, True)
    assert [one["name"] for one in report["components"]][-3:] == ["storage", "journal", "lag"]
    assert "read back" in component(report, "storage")["message"]
    assert http.get("/topics").json() == [] or all(row["name"] != "health" for row in http.get("/topics").json())


def test_a_group_that_is_far_behind_is_told(http: httpx.Client, client: Client, broker: BrokerForTests) -> None:
    client.publish_many("late", [b"1", b"2"])
    with httpx.stream("GET", f"{broker.url}/api/v1/queues/late/slow/stream?max_in_flight=1&lease_ms=3600000"):
        broker.clock.advance("5m1s")
        lag = component(http.get("/health/deep").json(), "lag")
    assert lag["status"] == "degraded"
    assert "late/slow" in lag["message"]
    assert "`millstream why late/slow`" in lag["recommendation"]


def test_a_stream_group_that_is_far_behind_is_looked_at_by_its_own_command(
    http: httpx.Client, client: Client, broker: BrokerForTests
) -> None:
    client.publish_many("read-late", [b"1", b"2"])
    with client.stream("read-late", group="readers", commit="manual", timeout_s=10) as stream:
        assert next(iter(stream)).value == b"1"
        broker.clock.advance("10m")
        lag = component(http.get("/health/deep").json(), "lag")
    assert lag["status"] == "degraded"
    assert "group readers" in lag["message"]
    assert "`millstream group show readers`" in lag["recommendation"]


def test_a_disk_that_fails_is_critical_and_counted() -> None:
    storage = SimulatedStorage()
    with BrokerForTests(storage=storage, http=True) as broker, httpx.Client(base_url=broker.url) as http:
        assert http.get("/health/deep").status_code == 200
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.path.startswith("state/health"))
        first = http.get("/health/deep")
        assert (first.status_code, first.json()["status"]) == (503, "critical")
        probe = component(first.json(), "storage")
        assert (probe["status"], probe["errors"]) == ("critical", 1)
        assert probe["recommendation"]
        assert component(http.get("/health/deep").json(), "storage")["errors"] == 2


def test_little_disk_is_told_before_it_is_too_late() -> None:
    settings = Settings.model_validate({"storage": {"free_bytes_min": "1TiB"}})
    with BrokerForTests(settings=settings, http=True) as broker:
        report = httpx.get(f"{broker.url}/health/deep")
        assert (report.status_code, component(report.json(), "disk")["status"]) == (503, "critical")
        assert component(report.json(), "storage")["status"] == "unknown"

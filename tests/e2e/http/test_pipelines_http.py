"""Pipelines over HTTP and by the SDK, as whoever runs them reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream import aio
from millstream.broker.sessions import Session
from millstream.client import Client
from millstream.config import Settings
from millstream.errors import Forbidden, InvalidArgument, InvalidName, PipelineNotFound, QuotaExceeded
from millstream.testing.broker import BrokerForTests
from millstream.wire.pipeline_calls import PipelineWish, ReportPipeline
from tests.e2e.access_world import guarded, key_for


@pytest.fixture
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


@pytest.fixture
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=10) as session:
        yield session


def report(broker: BrokerForTests, name: str = "archive", **values: Any) -> bool:
    """What a runner says; returns whether it is to stop."""
    session = Session("default", "runner", "", lambda _: None, lambda _: False)
    values = {"run": "run-1", "state": "running", **values}
    wish = broker.run(broker.broker.call(session, ReportPipeline(name=name, **values)))
    assert isinstance(wish, PipelineWish)
    return wish.stop


def test_a_pipeline_from_its_first_report_to_its_end(broker: BrokerForTests, http: httpx.Client) -> None:
    assert http.get("/pipelines").json() == []
    report(broker, sources=["orders"], rows=500, rows_per_s=12.5, lag=7, batch=3, definition={"steps": ["sql"]})
    (listed,) = http.get("/pipelines").json()
    assert (listed["name"], listed["state"], listed["rows"], listed["lag"]) == ("archive", "running", 500, 7)
    assert listed["definition"] == {}
    shown = http.get("/pipelines/archive").json()
    assert (shown["definition"], shown["stop_wished"]) == ({"steps": ["sql"]}, False)
    refused = http.delete("/pipelines/archive")
    assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_ARGUMENT")
    assert http.post("/pipelines/archive/stop").json()["stop_wished"]
    assert report(broker, state="stopping"), "the runner learns it from the answer to its report"
    report(broker, state="stopped")
    assert http.delete("/pipelines/archive").status_code == 204
    gone = http.get("/pipelines/archive")
    assert (gone.status_code, gone.json()["code"]) == (404, "PIPELINE_NOT_FOUND")


def test_a_wish_is_for_one_run(broker: BrokerForTests, client: Client) -> None:
    report(broker)
    client.pipelines.stop("archive")
    assert report(broker)
    assert not report(broker, run="run-2")
    report(broker, run="run-2", state="failed", error="no room")
    assert client.pipelines.show("archive").error == "no room"
    assert not client.pipelines.stop("archive").stop_wished, "it is over"


def test_one_that_is_silent_is_lost_and_then_forgotten(broker: BrokerForTests, client: Client) -> None:
    report(broker)
    report(broker, "done", state="finished")
    broker.clock.advance("31s")
    assert {it.name: it.state for it in client.pipelines.list()} == {"archive": "lost", "done": "finished"}
    report(broker)
    assert client.pipelines.show("archive").state == "running"
    broker.clock.advance("8d")
    assert client.pipelines.list() == []


def test_a_restart_forgets_neither_pipelines_nor_wishes(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        report(broker, rows=5, definition={"steps": 1})
        report(broker, "other", state="failed", error="why")
        broker.connect().pipelines.stop("archive")
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        assert [(it.name, it.state, it.error) for it in client.pipelines.list()] == [
            ("archive", "running", ""),
            ("other", "failed", "why"),
        ]
        assert client.pipelines.show("archive").definition == {"steps": 1}
        assert report(broker), "the wish was not forgotten"


def test_the_asynchronous_client_has_the_same(broker: BrokerForTests) -> None:
    report(broker)

    async def ask() -> None:
        async with aio.connect(broker.address) as client:
            assert [it.name for it in await client.pipelines.list()] == ["archive"]
            assert (await client.pipelines.stop("archive")).stop_wished
            assert (await client.pipelines.show("archive")).stop_wished
            await client.pipelines.forget("archive", force=True)
            with pytest.raises(PipelineNotFound):
                await client.pipelines.show("archive")

    asyncio.run(ask())


def test_metrics_tell_of_pipelines(broker: BrokerForTests) -> None:
    report(broker, rows=500, lag=7, batch_ms=1500)
    text = httpx.get(f"{broker.url}/metrics").text
    for line in (
        'millstream_pipeline_up{namespace="default",pipeline="archive"} 1',
        'millstream_pipeline_rows{namespace="default",pipeline="archive"} 500',
        'millstream_pipeline_lag{namespace="default",pipeline="archive"} 7',
        'millstream_pipeline_batch_seconds{namespace="default",pipeline="archive"} 1.5',
    ):
        assert line in text


@pytest.mark.parametrize(
    "values",
    [{"name": "a b"}, {"definition": {"x": "y" * 20_000}}, {"error": "e" * 3_000}, {"sources": ["t"] * 101}],
    ids=lambda values: next(iter(values)),
)
def test_a_report_has_limits(broker: BrokerForTests, values: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgument, InvalidName), match=r"at most|not valid"):
        report(broker, **{"name": "archive", **values})


def test_there_are_so_many_pipelines_and_no_more() -> None:
    with BrokerForTests(settings=Settings.model_validate({"pipelines": {"pipelines_max": 1}})) as broker:
        report(broker)
        report(broker)
        with pytest.raises(QuotaExceeded, match="pipelines_max"):
            report(broker, "other")


def test_stopping_takes_an_administrator_and_is_written_down() -> None:
    with guarded(access={"audit": "on"}) as broker:
        report(broker, sources=["orders"])
        reader = broker.connect(key=key_for(broker, "read"))
        assert [it.name for it in reader.pipelines.list()] == ["archive"]
        with pytest.raises(Forbidden):
            reader.pipelines.stop("archive")
        elsewhere = broker.connect(key=key_for(broker, "read", scopes=["bills"]))
        assert elsewhere.pipelines.list() == []
        admin = broker.connect(key=key_for(broker, "admin"))
        assert admin.pipelines.stop("archive").stop_wished
        assert any(entry.call == "pipeline.stop" for entry in admin.audit(limit=20).entries)

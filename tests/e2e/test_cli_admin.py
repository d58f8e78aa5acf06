"""`admin`, `health` and the commands that take a group in hand, from the command line and from the SDK."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

import millstream
from millstream.aio import connect
from millstream.broker import administration
from millstream.cli.main import _run
from millstream.testing.broker import BrokerForTests, BrokerProcess

Command = Callable[..., str]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    # In this process commands and broker share standard output, which in life they do not.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with BrokerForTests() as running:
        yield running
    structlog.reset_defaults()


@pytest.fixture
def command(broker: BrokerForTests, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, code: int = 0) -> str:
        assert _run([*arguments, "--broker", broker.address]) == code
        return capsys.readouterr().out

    return run


def test_settings_and_connections_are_shown(command: Command, broker: BrokerForTests) -> None:
    assert "storage.fsync" in command("admin", "config")
    settings = {row["name"]: row for row in json.loads(command("admin", "config", "--json"))}
    assert settings["storage.fsync"]["value"] == "group"
    with broker.connect(client_id="worker-7"):
        assert "worker-7" in command("admin", "connections")
        clients = [row["client_id"] for row in json.loads(command("admin", "connections", "--json"))]
    assert clients == ["worker-7", "millstream-cli"]


def test_files_are_worked_on(command: Command, broker: BrokerForTests) -> None:
    with broker.connect() as client:
        client.create_topic("state", config={"cleanup": "compact"})
        for number in range(20):
            client.publish("state", str(number), key="k")
    assert "logs on disk" in command("admin", "checkpoint")
    assert json.loads(command("admin", "compact", "state", "--roll", "--json"))["compacted"] == 1
    assert "partitions looked at" in command("admin", "compact")
    [topic] = [row for row in broker.broker.topics.registry.all_topics() if row.name == "state"]
    assert topic.partitions[0] is not None, "what was open stays open, and what it has counted is not forgotten"
    assert topic.partitions[0].messages_published == 20
    command("admin", "compact", "nowhere", code=1)


def test_the_log_level_is_set(command: Command) -> None:
    assert json.loads(command("admin", "log-level", "debug", "--json")) == {"level": "debug", "before": "info"}
    assert "debug" in command("admin", "log-level", "info")
    command("admin", "log-level", "loud", code=2)


def test_the_exit_code_says_how_the_broker_is(command: Command, broker: BrokerForTests) -> None:
    assert json.loads(command("health", "--json"))["status"] == "healthy"
    assert "read back" in command("health", "--deep")
    with broker.connect() as client:
        client.set_mode("maintenance", "new disk")
        assert "degraded" in command("health")
        client.set_mode("normal")
    modes = broker.broker.modes
    modes.memory_bytes, measured = lambda: 1 << 60, modes.memory_bytes
    broker.broker.settings = broker.settings.model_copy(
        update={"server": broker.settings.server.model_copy(update={"memory_bytes_critical": 1})}
    )
    try:
        assert "critical" in command("health", code=1)
    finally:
        modes.memory_bytes, broker.broker.settings = measured, broker.settings
    assert _run(["health", "--broker", "127.0.0.1:1"]) == 3


def test_a_group_is_paused_resumed_and_dealt_anew(command: Command, broker: BrokerForTests) -> None:
    with broker.connect() as client:
        client.create_topic("orders")
        client.commit_offsets("audit", {("orders", 0): 0})
    assert "paused" in command("group", "pause", "audit")
    assert "paused" in command("group", "show", "audit")
    assert "paused" in command("group", "list")
    assert json.loads(command("group", "resume", "audit", "--json"))["paused"] is False
    assert json.loads(command("group", "rebalance", "audit", "--json"))["name"] == "audit"
    command("group", "pause", "nobody", code=1)


def test_the_asynchronous_client_can_do_the_same(broker: BrokerForTests) -> None:
    async def scenario() -> None:
        async with await connect(broker.address) as client:
            await client.create_topic("later", if_missing=True)
            await client.commit_offsets("night", {("later", 0): 0})
            assert (await client.pause_group("night")).paused
            assert not (await client.resume_group("night")).paused
            assert (await client.rebalance_group("night")).name == "night"
            assert (await client.admin.health(deep=True)).status == "healthy"
            assert (await client.admin.checkpoint()).failures == []
            assert (await client.admin.compact("later")).segments_deleted == 0
            assert (await client.admin.config())[0].name
            assert (await client.admin.set_log_level("info")).level == "info"
            assert len(await client.admin.connections()) == 1

    asyncio.run(scenario())


def test_a_bad_topic_is_told_by_its_error(broker: BrokerForTests) -> None:
    with broker.connect() as client, pytest.raises(millstream.errors.TopicNotFound):
        client.admin.compact("nowhere")


def test_a_broker_says_where_its_settings_came_from_and_changes_its_log(tmp_path: Path) -> None:
    process = BrokerProcess(tmp_path / "data", arguments=["--set", "topics.auto_create=false"])
    with process, millstream.connect(process.address) as client:
        settings = {setting.name: setting for setting in client.admin.config()}
        assert (settings["topics.auto_create"].value, settings["topics.auto_create"].source) == (False, "--set")
        assert settings["log.level"].source == "--log-level"
        assert client.admin.set_log_level("debug").before == "warning"
        changed = next(setting for setting in client.admin.config() if setting.name == "log.level")
        assert (changed.value, changed.source) == ("debug", "admin.log_level")


def test_secrets_are_not_among_what_is_told(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [("server.host", broker.settings.server), ("storage.data", broker.settings.storage)]
    shown = [(name, type(section).model_fields[name.partition(".")[2]]) for name, section in fields]
    monkeypatch.setattr(administration, "setting_fields", lambda: iter(shown))
    monkeypatch.setattr(administration, "_SECRETS", ("data",))
    with broker.connect() as client:
        host, data = client.admin.config()
    assert (host.value, data.value) == ("127.0.0.1", "********")

"""What is done to the data of a broker that does not run: nobody else hears of it, and nothing else happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.broker.broker import Broker
from millstream.cli.main import main
from millstream.config import Settings
from millstream.server import lifecycle
from millstream.testing.broker import BrokerForTests

NOBODY = "http://127.0.0.1:1/hook"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Of a broker that has much to do."""
    with BrokerForTests(tmp_path) as broker, broker.connect() as client:
        client.publish("orders", "to deliver")
        client.publish("orders", "to fire", delay="1s")
        client.webhooks.create("orders", NOBODY)
    return tmp_path


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_goes_on_by_itself(data: Path, killed: bool) -> None:
    """Webhooks were sent and schedules fired while a key was made."""
    if killed:
        (data / "clean").unlink()

    async def others(_: Broker) -> set[object]:
        return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    settings = Settings.model_validate({"storage": {"data": str(data)}, "traces": {"otlp_endpoint": NOBODY}})
    assert asyncio.run(lifecycle.offline(settings, others)) == set()
    assert (data / "clean").exists() is not killed, "what a crash has left is still to be seen to"
    with BrokerForTests(data) as broker, broker.connect() as client:
        assert len(client.webhooks.list()) == 1
        broker.clock.advance("2s")
        stream = iter(client.stream("orders", start="earliest", timeout_s=5))
        assert [next(stream).text for _ in range(2)] == ["to deliver", "to fire"]


def test_a_key_is_made_with_the_settings_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "millstream.yaml").write_text("webhooks: {allow_private: false}\nstorage: {data: elsewhere}\n")
    monkeypatch.setenv("MILLSTREAM_STORAGE__FSYNC", "always")
    used: list[Settings] = []
    offline = lifecycle.offline

    def noting(settings: Settings, work: object) -> object:
        used.append(settings)
        return offline(settings, work)  # type: ignore[arg-type]

    monkeypatch.setattr(lifecycle, "offline", noting)
    where = ["--data", str(tmp_path / "data"), "--config", str(tmp_path / "millstream.yaml")]
    with pytest.raises(SystemExit) as ended:
        main(["key", "create", "--role", "admin", *where])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ms_")
    (settings,) = used
    assert (settings.webhooks.allow_private, settings.storage.fsync) == (False, "always")
    assert settings.storage.data == str(tmp_path / "data")

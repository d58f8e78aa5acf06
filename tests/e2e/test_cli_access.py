"""`key`, `audit` and `namespace quota`, from the first key on, against a broker that asks for keys."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.broker.access import audit
from millstream.cli.main import main
from millstream.config import LogSettings, Settings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: twenty of its own would take half a minute."""

    def run(*arguments: str, key: str = "", code: int = 0) -> str:
        monkeypatch.setenv("MILLSTREAM_KEY", key)
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert end.value.code == code, out + err
        return out if not code else err

    return run


@pytest.mark.parametrize("wrong", [("--role", "boss"), ("--role", "admin", "--scope", "no:such:scope")])
def test_a_key_that_is_refused_leaves_no_directory(tmp_path: Path, run: Run, wrong: tuple[str, ...]) -> None:
    data = tmp_path / "new"
    assert "INVALID" in run("key", "create", *wrong, "--data", str(data), code=1)
    assert not data.exists()


def test_from_the_first_key_to_the_last(tmp_path: Path, run: Run) -> None:
    ports = ("--port", "0", "--http-port", "0", "--mqtt-port", "0")
    refused = run("serve", "--data", str(tmp_path), *ports, "--set", "access.mode=keys", code=1)
    assert "make the first one with `millstream key create --role admin --data" in refused
    admin = run("key", "create", "--role", "admin", "--name", "root", "--data", str(tmp_path)).strip()
    assert admin.startswith("ms_")
    with BrokerForTests(tmp_path, settings=guarded().settings) as broker:
        at = ("--broker", broker.address)
        assert "UNAUTHORIZED" in run("status", *at, code=1)
        run("topic", "create", "orders", *at, key=admin)
        made = json.loads(run("key", "create", "-r", "produce", "-s", "default:orders", "--json", *at, key=admin))
        run("publish", "orders", "hello", *at, key=made["key"])
        assert "FORBIDDEN" in run("consume", "orders", "--max", "1", *at, key=made["key"], code=1)
        # In front of the command or behind it as well, for those who cannot set variables.
        run("--api-key", made["key"], "publish", "orders", "again", *at)
        run("publish", "orders", "again", *at, "--api-key", made["key"])
        rotated = run("key", "rotate", made["info"]["id"], "--grace", "0s", *at, key=admin).strip()
        assert "UNAUTHORIZED" in run("publish", "orders", "late", *at, key=made["key"], code=1)
        run("publish", "orders", "new", *at, key=rotated)
        listed = run("key", "list", *at, key=admin)
        assert "root" in listed
        assert "default:orders" in listed
        assert rotated.rpartition("_")[2] not in listed
        run("key", "revoke", made["info"]["id"], "--yes", *at, key=admin)
        assert [key["name"] for key in json.loads(run("key", "list", "--json", *at, key=admin))] == ["root"]
        quota = json.loads(
            run(
                "namespace",
                "quota",
                "default",
                "--topics",
                "9",
                "--partitions",
                "40",
                "--storage",
                "1GiB",
                "--json",
                *at,
                key=admin,
            )
        )
        assert (quota["topics"], quota["partitions"], quota["storage_bytes"]) == (9, 40, 1 << 30)
        shown = run("namespace", "quota", "default", "--connections", "7", *at, key=admin)
        assert "1 GiB" in shown, "what is not named stays as it is"
        audited = [entry["call"] for entry in json.loads(run("audit", "--since", "1h", "--json", *at, key=admin))]
        assert audited == [
            "namespace.quota.set", "namespace.quota.set", "key.revoke", "key.rotate", "key.create", "topic.create",
        ]  # fmt: skip
        assert "one of admin, consume, produce, read, not 'king'" in run(
            "key", "create", "--role", "king", *at, key=admin, code=1
        )


def test_an_entry_of_the_audit_log_is_found_however_many_came_after_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_LOOKED_AT_MAX", 3)
    settings = Settings.model_validate({"access": {"audit": "on"}})
    set_up_logs(LogSettings(), io.StringIO())  # the broker shares this process, and the output under test
    with BrokerForTests(settings=settings) as broker, broker.connect() as client:
        client.create_namespace("team-a")
        for number in range(8):
            client.create_topic(f"t{number}")
        at = ("--json", "--broker", broker.address)
        assert [entry["names"] for entry in json.loads(run("audit", "--call", "namespace.create", *at))] == [["team-a"]]
        newest = [entry["names"] for entry in json.loads(run("audit", "--limit", "5", *at))]
        assert newest == [["t7"], ["t6"], ["t5"], ["t4"], ["t3"]]
        assert len(json.loads(run("audit", *at))) == 9


def test_the_audit_log_is_nobodys_to_write_and_no_key_is_asked_for(run: Run) -> None:
    with BrokerForTests() as broker:
        refused = " ".join(run("publish", "_audit", "x", "--broker", broker.address, code=1).split())
    assert "topic '_audit' is the audit log, written by the broker alone" in refused
    assert "no key allows it; use another topic" in refused
    assert "unless the message says that none does" in refused


def test_a_benchmark_shows_the_key_that_it_was_given(run: Run) -> None:
    set_up_logs(LogSettings(), io.StringIO())  # as above
    with guarded() as broker:
        key = key_for(broker, "admin")
        at = ("--broker", broker.address)
        measured = json.loads(run("bench", "publish", "--messages", "20", "--json", *at, key=key))
        assert measured["publish"]["messages"] == 20
        measured = json.loads(run("--api-key", key, "bench", "consume", "--messages", "20", "--json", *at))
        assert measured["consume"]["messages"] == 20

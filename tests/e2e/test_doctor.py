"""`millstream doctor`: finds what is wrong, and is quiet where nothing is."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from millstream.cli import checks
from millstream.cli.main import _run
from millstream.config import Settings
from millstream.log.lock import DirectoryLock
from millstream.server import lifecycle
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setattr(checks, "file_system_of", lambda _: "ext4")
    monkeypatch.setattr(checks, "measure_syncs", lambda _: [0.5, 0.6, 0.7])

    def run(*arguments: object, code: int = 0) -> dict[str, Any]:
        ports = () if "--port" in arguments else ("--port", "0", "--http-port", "0", "--mqtt-port", "0")
        outcome = _run(["doctor", "--json", "--data", str(tmp_path / "data"), *ports, *map(str, arguments)])
        said = capsys.readouterr()
        assert outcome == code, said.out + said.err
        return {check["name"]: check for check in json.loads(said.out)["checks"]}

    return run


def test_without_a_broker_there_is_nothing_to_complain_about(doctor: Doctor) -> None:
    found = doctor()
    assert {check["verdict"] for check in found.values()} <= {"ok", "warn"}
    assert "will make it" in found["data directory"]["found"]
    assert found["fsync"]["found"].startswith("0.60 ms")


def test_a_broker_is_asked_how_it_is(doctor: Doctor, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerForTests(data) as broker:
        lock = DirectoryLock(data)
        lock.acquire()
        found = doctor("--broker", broker.address)
        assert f"in use by process {os.getpid()}" in found["data directory"]["found"]
        assert {found[name]["verdict"] for name in ("broker", "mode", "health", "clock")} == {"ok"}
        with broker.connect() as client:
            client.set_mode("maintenance", "new disk")
        assert doctor("--broker", broker.address)["mode"]["found"] == "maintenance: new disk"
        broker.clock.advance("1h")
        assert doctor("--broker", broker.address)["clock"]["verdict"] == "warn"
        lock.release()


def test_a_broker_that_should_be_there_and_is_not(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lock = DirectoryLock(tmp_path / "data")
    lock.acquire()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert "nobody listens" in doctor("--broker", address, code=1)["broker"]["found"]
        lock.release()
        assert doctor("--broker", address)["broker"]["verdict"] == "ok"


def test_a_broker_at_an_address_of_ipv6_is_asked(doctor: Doctor, tmp_path: Path) -> None:
    """`::1:9092` is another address, and not one with a port."""
    (tmp_path / "data").mkdir()
    lock = DirectoryLock(tmp_path / "data")
    lock.acquire()
    with socket.socket(socket.AF_INET6) as nobody:
        nobody.bind(("::1", 0))
        port = nobody.getsockname()[1]
        asked = doctor("--host", "::1", "--port", port, "--http-port", 0, "--mqtt-port", 0, code=1)["broker"]
        assert f"nobody listens at [::1]:{port}" in asked["found"]
    lock.release()


def test_a_key_that_may_not_look_is_told_which_one_may(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as broker:
        monkeypatch.setenv("MILLSTREAM_KEY", key_for(broker, "produce"))
        found = doctor("--broker", broker.address)["broker"]
        assert "lacks 'read'" in found["found"]
        assert found["next"] == "Use a key with the role read to see more."
        monkeypatch.delenv("MILLSTREAM_KEY")
        assert doctor("--broker", broker.address)["broker"]["next"] == "Set MILLSTREAM_KEY to see more."


def test_a_file_in_place_of_the_data_directory_is_called_one(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    found = doctor(code=1)["data directory"]
    assert "is a file" in found["found"]
    assert "--data" in found["next"]


def test_what_a_start_would_refuse_is_told_before(doctor: Doctor, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = ("--port", port, "--http-port", port, "--mqtt-port", port)
        found = doctor(*ports, "--broker", "127.0.0.1:1", code=1)
        assert {found[name]["verdict"] for name in ("port", "HTTP port", "MQTT port")} == {"fail"}
        assert "--http-port" in found["HTTP port"]["next"]
        assert "--mqtt-port" in found["MQTT port"]["next"]
    assert "no TLS" in doctor("--host", "0.0.0.0", code=1)["exposure"]["found"]
    assert doctor("--host", "0.0.0.0", "--insecure")["exposure"]["verdict"] == "warn"
    assert "key create" in doctor("--set", "access.mode=keys", code=1)["keys"]["next"]
    assert "server.nonsense" in doctor("--set", "server.nonsense=1", code=1)["settings"]["found"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "restoring").touch()
    assert "cut short" in doctor(code=1)["data directory"]["found"]
    (tmp_path / "data" / "restoring").unlink()
    (tmp_path / "data" / "topics" / "default" / "orders" / "0").mkdir(parents=True)
    assert doctor()["data directory"]["verdict"] == "ok"
    (tmp_path / "data" / "topics" / "default" / "orders" / "0" / "0.log").touch()
    found = doctor(code=1)["data directory"]
    assert "lacks state/topics" in found["found"]
    assert "restore" in found["next"]


def test_what_the_broker_may_not_read_is_found_before_it_starts(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root has made a key there, or restored a backup."""
    data = tmp_path / "data"
    with BrokerForTests(data):
        pass
    scan, access = os.scandir, os.access

    def refuse(path: Any) -> Any:
        if str(path) == str(data / "state" / "topics"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        found = doctor(code=1)["data directory"]
        assert f"{data}/state/topics cannot be read" in found["found"]
        assert f"Let user {os.getuid()} read" in found["next"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: "state/access" not in str(path) and access(path, mode))
        assert f"{data}/state/access/" in doctor(code=1)["data directory"]["found"]
    assert doctor()["data directory"]["verdict"] == "ok"


@pytest.mark.parametrize(
    "chosen", [{}, {"http.enabled": False, "mqtt.enabled": False}, {"server.max_connections": 70_000}]
)
def test_the_doctor_wants_as_many_open_files_as_a_start_takes(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: taken.append(limits[0]))
    lifecycle._raise_descriptor_limit(Settings.model_validate(nested(chosen)))
    (wanted,) = taken
    options = [word for name, value in chosen.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, wanted))
    assert doctor(*options)["open files"]["verdict"] == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, wanted - 1))
    found = doctor(*options)["open files"]
    assert (found["verdict"], f"{wanted:,} wanted" in found["found"]) == ("warn", True)


def nested(chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def test_disks_that_are_slow_full_or_made_of_memory(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "measure_syncs", lambda _: [45.0])
    monkeypatch.setattr(checks, "file_system_of", lambda _: "tmpfs")
    found = doctor("--set", "storage.free_bytes_min=1TiB", code=1)
    assert (found["fsync"]["verdict"], found["file system"]["verdict"], found["disk space"]["verdict"]) == (
        "warn",
        "warn",
        "fail",
    )
    monkeypatch.setattr(checks, "measure_syncs", lambda _: [0.001])
    assert "power cut" in doctor()["fsync"]["next"]


def test_syncs_are_measured_and_the_file_system_is_known(tmp_path: Path) -> None:
    assert all(0 < took < 60_000 for took in checks.measure_syncs(tmp_path))
    assert checks.file_system_of(Path("/proc")) == "proc"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.parametrize(("days", "verdict"), [(400, "ok"), (10, "warn"), (36_500, "ok")])
def test_a_certificate_is_looked_at(doctor: Doctor, tmp_path: Path, days: int, verdict: str) -> None:
    where = tmp_path / "broker.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=broker", "-days", str(days), "-keyout", str(where), "-out", f"{where}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    where.write_text(where.read_text() + Path(f"{where}.crt").read_text())
    expires = checks.expiry_of(where.read_text())
    assert abs(expires - datetime.now(UTC) - timedelta(days=days)) < timedelta(minutes=10)
    assert doctor("--set", f"tls.certificate={where}")["certificate"]["verdict"] == verdict


def test_what_is_no_certificate_is_said_to_be_none(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "broker.pem").write_text("nothing")
    assert doctor("--set", f"tls.certificate={tmp_path / 'broker.pem'}", code=1)["certificate"]["verdict"] == "fail"
    with pytest.raises(ValueError, match="cannot be read"):
        checks.expiry_of("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")


def test_a_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["doctor", "--data", str(tmp_path), "--port", "0", "--http-port", "0", "--mqtt-port", "0"])
    assert "failed" in capsys.readouterr().out

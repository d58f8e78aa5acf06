"""`millstream log` where the files of a stopped broker are not as they should be, or not where."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.testing.broker import BrokerForTests
from tests.e2e.command_line import CommandLine, keep_logs_out
from tests.native import NativeClient


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    keep_logs_out()
    return CommandLine(capsys, monkeypatch, "", "log")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with BrokerForTests(tmp_path / "data") as broker, broker.connect() as client:
        client.publish("orders", "precious")
        client.publish("bills", "precious")
    return tmp_path / "data"


def refusing(place: Path, number: int) -> Callable[[Any], Any]:
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == str(place):
            raise OSError(number, os.strerror(number), str(path))
        return scan(path)

    return refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_not_all_good(
    log: CommandLine, data: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    place = data / "topics" / "default" / "orders"
    monkeypatch.setattr(os, "scandir", refusing(place, number))
    assert str(place) in log("verify", str(data), code=4, errors=True)
    log("verify", str(data), "--topic", "bills")  # what can be read still is
    assert "precious" in log("dump", str(data), "--topic", "bills")


def test_what_is_on_another_disk_is_checked(log: CommandLine, data: Path, tmp_path: Path) -> None:
    (data / "topics").rename(tmp_path / "larger-disk")
    (data / "topics").symlink_to(tmp_path / "larger-disk")
    assert {"orders/0", "bills/0"} <= {line.split()[0] for line in log("verify", str(data)).splitlines()}
    assert "precious" in log("dump", str(data), "--topic", "orders")


def test_what_a_backup_has_put_aside_is_no_log(log: CommandLine, data: Path) -> None:
    """A broker that is killed meanwhile leaves it, and the next one clears it away."""
    before = log("verify", str(data))
    kept = data / "held" / "kept" / "topics" / "default" / "gone" / "0"
    kept.mkdir(parents=True)
    (kept / f"{0:020d}.log").write_bytes(b"a copy, as far as it got")
    assert log("verify", str(data)) == before


def test_a_topic_that_is_none_is_not_looked_for_elsewhere(log: CommandLine, data: Path) -> None:
    assert "INVALID_NAME" in log("dump", str(data), "--topic", "../../state/groups", code=1, errors=True)


def test_a_message_whose_headers_cannot_be_read_is_dumped_with_those_behind_it(log: CommandLine, data: Path) -> None:
    with BrokerForTests(data) as broker, NativeClient(broker.address) as client:
        client.publish("orders", [b"odd"], headers=[b"\xff\xff"])
        client.publish("orders", [b"last"])
    assert [line.split("\t")[-1] for line in log("dump", str(data), "--topic", "orders").splitlines()] == [
        "precious",
        "odd",
        "last",
    ]
    documents = [json.loads(line) for line in log("dump", str(data), "--topic", "orders", "--json").splitlines()]
    assert "unreadable" in str(documents[1]["headers"])

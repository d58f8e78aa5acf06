"""A data directory that a broker or a restore makes is there after a power cut, and so is everything above it."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.log.archive import restore_archive, write_archive
from millstream.server.lifecycle import offline


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Whatever is synced from now on."""
    found: set[Path] = set()
    original = os.fsync

    def fsync(fd: int) -> None:
        found.add(Path(os.readlink(f"/proc/self/fd/{fd}")))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_of_a_broker(tmp_path: Path, synced: set[Path]) -> None:
    async def nothing(_: Broker) -> None: ...

    settings = Settings.model_validate({"storage": {"data": str(tmp_path / "a/b/data"), "free_bytes_min": 0}})
    asyncio.run(offline(settings, nothing))
    assert {tmp_path, tmp_path / "a", tmp_path / "a/b"} <= synced
    assert (tmp_path / "a/b/data").stat().st_mode & 0o777 == 0o750


def test_of_a_restore(tmp_path: Path, synced: set[Path]) -> None:
    backup = io.BytesIO()
    write_archive(backup, {"node_id": 1}, lambda _: io.BytesIO(b"7"), node_id="7", created_ms=1, running=False)
    backup.seek(0)
    restore_archive(backup, tmp_path / "a/b/data")
    assert {tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/data"} <= synced


def test_below_a_directory_that_nobody_may_list(tmp_path: Path, synced: set[Path]) -> None:
    """It may be entered and written to, which is enough for a broker; its names cannot be synced by itself."""
    drawer = tmp_path / "drawer"
    drawer.mkdir()
    original = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if str(path) == str(drawer):
            raise PermissionError(13, "Permission denied")
        return original(path, flags, *rest)

    async def nothing(_: Broker) -> None: ...

    settings = Settings.model_validate({"storage": {"data": str(drawer / "data"), "free_bytes_min": 0}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        asyncio.run(offline(settings, nothing))
    assert drawer not in synced

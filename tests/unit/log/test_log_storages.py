"""One suite for every storage: the log must not be able to tell them apart."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.errors import DataDirLocked
from millstream.log import storage as storage_module
from millstream.log.lock import DirectoryLock
from millstream.log.memory import MemoryStorage
from millstream.log.storage import DiskStorage, NotOpened, Storage
from millstream.testing.storage import SimulatedStorage
from tests.log_workload import DIRECTORY, FIRST_LOG, append, open_log, plain

KINDS: dict[str, Callable[[Path], Storage]] = {
    "disk": DiskStorage,
    "memory": lambda _: MemoryStorage(),
    "simulated": lambda _: SimulatedStorage(),
}


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = KINDS[request.param](tmp_path / "data")
    made.make_directory("a/b")
    return made


def test_bytes_are_read_back_where_they_were_written(storage: Storage) -> None:
    file = storage.open("a/b/f", create=True)
    file.write(b"0123456789", 0)
    file.write(memoryview(b"XY"), 3)
    file.write(bytearray(b"!"), 10)
    assert file.read(0, 100) == b"012XY56789!"
    assert file.read(3, 2) == b"XY"
    assert file.read(11, 5) == b""
    assert file.size() == storage.size("a/b/f") == 11
    assert file.path == "a/b/f"
    file.sync()
    file.close()


def test_a_write_behind_the_end_leaves_zeros(storage: Storage) -> None:
    file = storage.open("a/b/f", create=True)
    file.write(b"x", 4)
    assert file.read(0, 10) == b"\0\0\0\0x"


def test_two_handles_see_the_same_file(storage: Storage) -> None:
    one, two = storage.open("a/b/f", create=True), storage.open("a/b/f")
    one.write(b"abc", 0)
    assert two.read(0, 3) == b"abc"
    assert storage.open("a/b/f", create=True).read(0, 3) == b"abc", "create leaves contents alone"


def test_truncate_cuts_and_extends(storage: Storage) -> None:
    file = storage.open("a/b/f", create=True)
    file.write(b"abcdef", 0)
    file.truncate(2)
    assert storage.read_all("a/b/f") == b"ab"
    file.truncate(4)
    assert storage.read_all("a/b/f") == b"ab\0\0"


def test_what_is_missing_is_said_to_be_missing(storage: Storage) -> None:
    for attempt in (storage.open, storage.size, storage.remove, storage.read_all):
        with pytest.raises(FileNotFoundError):
            attempt("a/b/nothing")
    with pytest.raises(FileNotFoundError):
        storage.open("no/directory/f", create=True)
    with pytest.raises(FileNotFoundError):
        storage.rename("a/b/nothing", "a/b/f")
    with pytest.raises(FileNotFoundError):
        storage.sync_directory("no/directory")
    assert not storage.exists("a/b/nothing")
    assert storage.names("no/directory") == []


def test_names_are_sorted_and_include_directories(storage: Storage) -> None:
    for name in ("z", "m", "c"):
        storage.open(f"a/{name}", create=True).close()
    assert storage.names("a") == ["b", "c", "m", "z"]
    assert storage.names("") == ["a"]
    assert storage.exists("a")
    assert storage.exists("a/z")


def test_rename_replaces_its_target(storage: Storage) -> None:
    storage.replace("a/b/old", b"new contents")
    storage.replace("a/b/new", b"old contents, longer")
    storage.rename("a/b/old", "a/b/new")
    storage.sync_directory("a/b")
    assert storage.names("a/b") == ["new"]
    assert storage.read_all("a/b/new") == b"new contents"


def test_replace_leaves_nothing_beside_the_file(storage: Storage) -> None:
    storage.replace("a/b/f", b"a longer text")
    storage.replace("a/b/f", b"short")
    assert storage.read_all("a/b/f") == b"short"
    assert storage.names("a/b") == ["f"]


def test_a_handle_survives_the_removal_of_its_name(storage: Storage) -> None:
    """A thread may be reading a segment that is being replaced."""
    file = storage.open("a/b/f", create=True)
    file.write(b"still here", 0)
    storage.remove("a/b/f")
    assert not storage.exists("a/b/f")
    assert file.read(0, 10) == b"still here"


def test_remove_tree_takes_everything_below(storage: Storage) -> None:
    storage.make_directory("a/b/c/d")
    storage.replace("a/b/c/f", b"x")
    storage.replace("a/bystander", b"x")
    storage.remove_tree("a/b")
    storage.remove_tree("a/b")
    assert storage.names("a") == ["bystander"]


def test_after_a_power_cut_there_are_the_names_that_were_synced() -> None:
    storage = SimulatedStorage()
    storage.make_directory("a/b")
    for name in ("kept", "renamed"):
        storage.open(f"a/b/{name}", create=True).close()
    storage.sync_directory("a/b")
    storage.remove("a/b/kept")
    storage.rename("a/b/renamed", "a/b/new")
    storage.open("a/b/lost", create=True).close()
    assert storage.names("a/b") == ["lost", "new"]
    storage.power_cut(lose_everything=True)
    assert storage.names("a/b") == ["kept", "renamed"]
    assert storage.names("a") == ["b"]


def test_making_a_directory_twice_is_fine(storage: Storage) -> None:
    storage.make_directory("a/b")
    storage.make_directory("x")
    assert storage.names("") == ["a", "x"]


def test_many_directories_are_made_with_one_sync_of_each_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DiskStorage(tmp_path)
    synced: list[str] = []
    monkeypatch.setattr("millstream.log.storage._sync_directory", synced.append)
    storage.make_directory(*(f"topics/t/{number}" for number in range(50)))
    assert storage.names("topics/t") == sorted(map(str, range(50)))
    assert sorted(synced) == [str(tmp_path), f"{tmp_path}/topics", f"{tmp_path}/topics/t"]
    storage.make_directory("topics/t/7")
    assert len(synced) == 3, "one that exists is fine, and durable already"


@pytest.mark.parametrize(("number", "again"), [(errno.EMFILE, True), (errno.ENFILE, True), (errno.EIO, False)])
def test_a_directory_that_cannot_be_opened_was_not_synced_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, again: bool
) -> None:
    storage = DiskStorage(tmp_path)
    storage.make_directory("a")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    for attempt in (storage.sync_directory, storage.open_directory):
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            attempt("a")
        assert isinstance(raised.value, NotOpened) == again
        assert raised.value.errno == number
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        storage.sync_directory("a")
    assert not isinstance(raised.value, NotOpened), "whatever a sync says, it is final"


def test_disk_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:3], at))
    storage = DiskStorage(tmp_path)
    file = storage.open("f", create=True)
    file.write(b"0123456789", 0)
    assert storage.read_all("f") == b"0123456789"


def test_disk_does_not_spin_when_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="no progress"):
        DiskStorage(tmp_path).open("f", create=True).write(b"x", 0)


def test_disk_reports_free_space(tmp_path: Path) -> None:
    assert DiskStorage(tmp_path).free_bytes() > 0


def test_lock_keeps_a_second_broker_out_and_names_the_first(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(DataDirLocked, match=str(os.getpid())):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_lock_that_root_makes_belongs_to_the_owner_of_the_data(tmp_path: Path) -> None:
    """After `log verify` by root the broker could not start."""
    os.chown(tmp_path, 65534, 65533)
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
    found = (tmp_path / "lock").stat()
    assert (found.st_uid, found.st_gid) == (65534, 65533)
    os.chown(tmp_path / "lock", 1, 1)
    lock.acquire()
    lock.release()
    assert (tmp_path / "lock").stat().st_uid == 1, "what was there is not given away"


@pytest.mark.parametrize("lost", range(3))
def test_what_is_stored_in_a_directory_that_was_left_unfinished_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The broker died, or the disk refused a sync, when it had made the directory and its name was not on disk yet.
    The next one found the directory, and took its name for granted.
    """
    data = tmp_path / "data"
    DiskStorage(data).make_directory()
    on_disk: set[str] = set()
    syncs = itertools.count()

    def sync(path: str) -> None:
        if next(syncs) == lost:
            raise OSError(errno.EIO, "Input/output error", path)
        on_disk.update(f"{path}/{name}" for name in os.listdir(path))

    monkeypatch.setattr(storage_module, "_sync_directory", sync)
    with suppress(OSError):
        DiskStorage(data).make_directory(DIRECTORY, "topics/orders/1")
    assert next(syncs) == lost + 1
    open_log(DiskStorage(data))  # and nothing comes of it
    log = open_log(DiskStorage(data))
    append(log, plain(b"confirmed"))
    log.sync()
    path = data
    for name in Path(FIRST_LOG).parts:
        path /= name
        assert str(path) in on_disk

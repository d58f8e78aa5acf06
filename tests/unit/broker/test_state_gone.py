"""A data directory that has lost what says which topics there are: nothing may begin there as if it were new."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

import millstream
from millstream.broker.node import TOPICS_STATE, check_data
from millstream.errors import StartFailed
from millstream.log.memory import MemoryStorage
from millstream.testing.broker import BrokerForTests


def files_of(data: Path) -> dict[str, bytes]:
    return {path.relative_to(data).as_posix(): path.read_bytes() for path in data.rglob("*") if path.is_file()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        client.publish("orders", "precious")
    return tmp_path


@pytest.mark.parametrize("gone", ["state", TOPICS_STATE])
def test_messages_without_the_state_that_describes_them_are_left_alone(data: Path, gone: str) -> None:
    shutil.rmtree(data / gone)
    before = files_of(data)
    with pytest.raises(StartFailed) as refused, BrokerForTests(data):
        pass
    said = str(refused.value)
    assert "topics/default/orders/" in said
    assert TOPICS_STATE in said
    assert "restore a backup" in said
    assert "move topics/ and state/ elsewhere" in said
    assert files_of(data) == before


def test_state_that_is_put_back_is_taken_up(data: Path) -> None:
    (data / "state").rename(data / "elsewhere")
    with pytest.raises(StartFailed), BrokerForTests(data):
        pass
    (data / "elsewhere").rename(data / "state")
    with BrokerForTests(data) as broker, millstream.connect(broker.address) as client:
        stream = client.stream("orders", start="earliest")
        assert next(iter(stream)).value == b"precious"


def test_with_the_messages_out_of_the_way_a_broker_begins_anew(data: Path) -> None:
    shutil.rmtree(data / TOPICS_STATE)
    (data / "state").rename(data / "old-state")  # positions of groups in topics that would be new
    (data / "topics").rename(data / "old-topics")
    with BrokerForTests(data) as broker, millstream.connect(broker.address) as client:
        assert not client.topics()
    assert list((data / "old-topics").rglob("*.log"))


def test_a_directory_that_the_broker_may_not_look_into_is_not_its_own() -> None:
    """As `lost+found` is, where a volume is mounted for the messages."""

    class Volume:
        def exists(self, _: str) -> bool:
            return False

        def names(self, directory: str) -> list[str]:
            if directory == "topics/lost+found":
                raise PermissionError
            return ["lost+found"] if directory == "topics" else []

    check_data(Volume())  # type: ignore[arg-type]


@pytest.mark.parametrize("closed", [TOPICS_STATE, "node_id"])
def test_what_the_broker_may_not_read_is_named(closed: str) -> None:
    """As it is after somebody else, root perhaps, has started one there."""

    class Closed(MemoryStorage):
        def names(self, directory: str) -> list[str]:
            return self._refused(directory) or super().names(directory)

        def read_all(self, path: str) -> bytes:
            return self._refused(path) or super().read_all(path)

        def _refused(self, path: str) -> None:
            if path == closed:
                raise PermissionError(errno.EACCES, "Permission denied", f"data/{path}")

    storage = Closed()
    storage.replace("node_id", b"17")
    with pytest.raises(StartFailed, match=f"data/{closed} cannot be read: Permission denied; let this user read it"):
        check_data(storage)


def test_a_first_topic_that_a_crash_has_cut_short_is_no_loss(tmp_path: Path) -> None:
    """Directories of a topic are made while it is recorded, so they can be there and the record not."""
    (tmp_path / "topics" / "default" / "orders" / "0").mkdir(parents=True)
    (tmp_path / "topics" / "note").write_text("not a directory")
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        client.publish("orders", "hello")

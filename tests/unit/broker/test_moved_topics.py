"""Topics that whoever runs the broker has moved to another disk, with a link where they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests
from tests.native import NativeClient


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The other disk, with the topic and with something that belongs to others."""
    data, disk = tmp_path / "data", tmp_path / "larger-disk"
    with BrokerForTests(data) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="orders", partitions=2)
        assert client.publish("orders", [b"old"]).label == "disk"
    shutil.move(data / "topics/default/orders", disk)
    (data / "topics/default/orders").symlink_to(disk)
    (disk / "notes.txt").write_text("of others")
    (disk / "photos").mkdir()
    (disk / "photos/cat").write_text("of others, too")
    return disk


def test_a_topic_behind_a_link_is_deleted_with_its_files_and_nothing_of_others(tmp_path: Path, moved: Path) -> None:
    link = tmp_path / "data/topics/default/orders"
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        assert client.publish("orders", [b"new"]).label == "disk"
        client.call("topic.delete", name="orders")
        assert not link.exists()
        assert not link.is_symlink()
        assert sorted(path.name for path in moved.iterdir()) == ["notes.txt", "photos"]
        assert (moved / "photos/cat").read_text() == "of others, too"
        client.call("topic.create", name="orders", partitions=2)
        assert client.publish("orders", [b"first"]).base_offset == 0
    assert link.is_dir()
    assert not link.is_symlink()
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        assert client.fetch("orders", 0).high_watermark == 1


def test_a_topic_whose_disk_is_not_there_can_be_deleted_and_made_again(tmp_path: Path, moved: Path) -> None:
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        moved.rename(tmp_path / "unplugged")
        client.call("topic.delete", name="orders")
        client.call("topic.create", name="orders")
        assert client.publish("orders", [b"first"]).base_offset == 0
    assert (tmp_path / "unplugged/0").is_dir()


def test_of_a_partition_behind_a_link_only_the_link_goes(tmp_path: Path, moved: Path) -> None:
    (tmp_path / "data/topics/default/orders").unlink()
    moved.rename(tmp_path / "data/topics/default/orders")
    shutil.move(tmp_path / "data/topics/default/orders/0", tmp_path / "partition")
    (tmp_path / "data/topics/default/orders/0").symlink_to(tmp_path / "partition")
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        assert client.publish("orders", [b"new"]).base_offset == 1
        client.call("topic.delete", name="orders")
        client.call("topic.create", name="orders")
        assert client.publish("orders", [b"first"]).base_offset == 0
    assert list((tmp_path / "partition").glob("*.log"))

"""What a newer version wrote is not touched: one sentence says so, and every byte stays where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from millstream.broker.vocabulary import DOCUMENTS, FACTS
from millstream.cli.main import _run
from millstream.errors import MillstreamError, NewerData, UnsupportedVersion
from millstream.log import format as data_format
from millstream.log import index
from millstream.log.cache import FileCache, TailCache
from millstream.log.partition import LogConfig, PartitionLog
from millstream.log.storage import DiskStorage
from millstream.mqtt.packets import Connect, Properties
from millstream.records import STAMP_BYTES, VERSION, Codec, Columns, encode_batch
from millstream.spark.segments import SegmentDirectory
from millstream.testing.broker import BrokerForTests
from millstream.wire.stage_calls import stage_address
from tests.e2e.mqtt.support import Address, Wire
from tests.log_workload import append
from tests.native import NativeClient

ORDERS = "topics/default/orders/0"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a broker that has stopped."""
    with BrokerForTests(tmp_path / "data", mqtt=True) as broker:
        client = broker.connect()
        client.publish_many("orders", ["one", "two"])
        client.publish("payments", "three")
        client.create_topic("sealed", config={"segment_bytes": 4096})
        for _ in range(4):
            client.publish("sealed", bytes(2000))
        with client.queue("orders", group="work") as queue:
            queue.ack(queue.lease(1))
        wire = Wire(Address("127.0.0.1", broker.mqtt_port))
        wire.connect(Connect(5, "sensor", False, properties=Properties(session_expiry_s=3600)))
        wire.disconnect()
        wire.close()
    return tmp_path / "data"


def contents(data: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in data.rglob("*")
        if path.is_file() and path.name not in ("lock", "clean")
    }


def add(data: Path, directory: str, key: str | bytes, fact: bytes) -> None:
    """Append a fact to a log of a broker that does not run."""
    log = PartitionLog.open(DiskStorage(data), directory, config=LogConfig(), files=FileCache(), tail=TailCache(0))
    now_us = time.time_ns() // 1000
    append(
        log,
        memoryview(
            encode_batch([fact], keys=[key if isinstance(key, bytes) else key.encode()], base_timestamp_us=now_us)
        ),
    )
    log.close()


def refuses_to_start(data: Path) -> str:
    """What a broker says that does not start there, and that it has changed nothing."""
    before = contents(data)
    with pytest.raises(NewerData) as refusal:
        BrokerForTests(data).start()
    assert contents(data) == before
    said = str(refusal.value)
    assert "this version of Millstream" in said
    assert "\n" not in said
    return said


# --- the directory as a whole ------------------------------------------------------------------------------------


def test_a_directory_of_a_newer_format_is_left_alone_by_everybody(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "format").write_text("2\n")
    assert "the format 2" in refuses_to_start(data)
    before = contents(data)
    for arguments in (
        ("serve", "--data", data, "--port", "0", "--http-port", "0", "--mqtt-port", "0"),
        ("key", "create", "--role", "admin", "--data", data),
        ("log", "verify", data),
        ("log", "dump", data, "--topic", "orders"),
        ("backup", tmp_path / "backup", "--data", data),
    ):
        capsys.readouterr()
        assert _run([str(argument) for argument in arguments]) == 4, arguments
        said = capsys.readouterr().err
        assert "NEWER_DATA" in said
        assert "restore a backup" in said
        assert "Traceback" not in said
    assert _run(["doctor", "--data", str(data)]) == 1
    assert "the format 2" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(NewerData):
        SegmentDirectory(data)
    assert contents(data) == before


@pytest.mark.parametrize("written", ["", "two", "1.5"])
def test_a_format_that_is_no_number_is_one_that_we_know_nothing_of(data: Path, written: str) -> None:
    (data / "format").write_text(written)
    assert "the format ?" in refuses_to_start(data)


def test_a_version_that_raises_the_format_says_so_before_anything_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a backup that is made then says it as well."""
    with monkeypatch.context() as newer:
        newer.setattr(data_format, "FORMAT", 2)
        with BrokerForTests(data):
            pass
        assert (data / "format").read_text() == "2\n"
        assert _run(["backup", str(tmp_path / "backup"), "--data", str(data)]) == 0
    assert _run(["restore", str(tmp_path / "backup"), "--data", str(tmp_path / "copy")]) == 0
    refuses_to_start(data)
    refuses_to_start(tmp_path / "copy")


def test_a_directory_without_a_number_has_the_first_format(data: Path) -> None:
    """As all had that were written before there was one; nothing is written down as long as that is so."""
    assert not (data / "format").exists()
    with BrokerForTests(data) as broker:
        assert [it.value for it in broker.connect().browse("payments")] == [b"three"]


# --- batches and indexes -----------------------------------------------------------------------------------------


def make_batch_newer(log: Path, position: int = 0) -> None:
    """A batch of version 2, as a newer broker stamps it."""
    written = bytearray(log.read_bytes())
    written[position + 2] = 2
    stamp = crc32c(bytes(written[position : position + STAMP_BYTES]))
    written[position + STAMP_BYTES : position + STAMP_BYTES + 4] = stamp.to_bytes(4, "little")
    log.write_bytes(written)


def make_index_newer(log: Path) -> None:
    index = log.with_suffix(".index")
    written = bytearray(index.read_bytes())
    written[2] = 2
    written[60:64] = crc32c(bytes(written[:60])).to_bytes(4, "little")
    index.write_bytes(written)


def kill(data: Path) -> None:
    """As if the broker had not stopped in order: nothing says how far its logs reach."""
    (data / "clean").unlink()
    for path in data.rglob("*.index"):
        path.unlink()


@pytest.mark.parametrize("killed", [False, True])
def test_a_batch_of_a_newer_version_is_neither_skipped_nor_cut_off(
    data: Path, killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its topic cannot be used; all others can."""
    if killed:
        kill(data)
    (log,) = (data / ORDERS).glob("*.log")
    make_batch_newer(log)
    before = log.read_bytes()
    with BrokerForTests(data) as broker:
        client = broker.connect()
        with pytest.raises(NewerData, match="version 2"):
            client.stream("orders").next(5)
        if killed:
            with pytest.raises(NewerData, match="version 2"):
                client.publish("orders", "behind it")
        assert [it.value for it in client.browse("payments")] == [b"three"]
    assert log.read_bytes().startswith(before), "what was there is there"
    assert not list(log.parent.glob("*.damaged"))
    assert _run(["log", "verify", str(data), "--topic", "orders"]) == 4
    assert "NEWER_DATA" in capsys.readouterr().err


def test_a_sealed_segment_with_a_batch_of_a_newer_version_is_not_read_past_it(data: Path) -> None:
    log = min((data / "topics/default/sealed/0").glob("*.log"))
    make_batch_newer(log)
    with BrokerForTests(data) as broker:
        client = broker.connect()
        with pytest.raises(NewerData, match="version 2"):
            client.stream("sealed").next(5)
        assert client.topic("sealed").partitions[0].damaged_ranges == []
        client.publish("sealed", "behind it")
    with pytest.raises(NewerData, match="version 2"):
        list(SegmentDirectory(data).read("sealed", 0, 0, 5, damaged=[]))


def test_rot_in_the_version_of_a_batch_is_damage_as_before(data: Path) -> None:
    (log,) = (data / ORDERS).glob("*.log")
    written = bytearray(log.read_bytes())
    written[2] = 2  # and its stamp does not say so
    log.write_bytes(written)
    assert _run(["log", "verify", str(data), "--topic", "orders"]) == 4
    with BrokerForTests(data) as broker:
        broker.connect().publish("orders", "behind it")


def test_spark_steps_over_rot_in_the_version_of_a_batch_where_an_index_points_at_it(data: Path) -> None:
    log = min((data / "topics/default/sealed/0").glob("*.log"))
    written = bytearray(log.read_bytes())
    written[2] = 2
    log.write_bytes(written)
    damaged: list[tuple[int, int]] = []
    assert len(list(SegmentDirectory(data).read("sealed", 0, 0, 4, damaged=damaged)))
    assert damaged == [(0, 1)]


def test_an_index_of_a_newer_version_is_not_made_anew(data: Path) -> None:
    (log,) = (data / ORDERS).glob("*.log")
    make_index_newer(log)
    before = contents(log.parent)
    with BrokerForTests(data) as broker:
        client = broker.connect()
        for use in (lambda: client.publish("orders", "x"), lambda: client.stream("orders").next(5)):
            with pytest.raises(NewerData, match="index of a segment has version 2"):
                use()
        assert [it.value for it in client.browse("payments")] == [b"three"]
    assert contents(log.parent) == before


@pytest.mark.parametrize("newer", [make_batch_newer, make_index_newer])
@pytest.mark.parametrize("killed", [False, True])
def test_a_state_log_of_a_newer_version_keeps_the_broker_from_starting(
    data: Path, newer: Callable[[Path], None], killed: bool
) -> None:
    if killed and newer is make_batch_newer:
        kill(data)
    (log,) = (data / "state/groups").glob("*.log")
    if not log.read_bytes():
        add(data, "state/groups", "offset/default/g/orders/0", b'{"offset":1}')
    newer(log)
    with pytest.raises(NewerData):
        BrokerForTests(data).start()


def test_a_producer_of_a_newer_version_is_told_so_and_does_not_try_again(data: Path) -> None:
    batch = encode_batch([b"x"], base_timestamp_us=1)
    batch[2] = 2
    with BrokerForTests(data) as broker, NativeClient(broker.address) as wire:
        correlation = wire.send_batch("orders", bytes(batch))
        with pytest.raises(UnsupportedVersion, match="version 2") as refusal:
            wire_answer(wire, correlation)
        assert not refusal.value.retriable


def wire_answer(wire: NativeClient, correlation: int) -> None:
    from millstream.wire.messages import decode_publish_result

    decode_publish_result(wire.answer(correlation))


# --- facts -------------------------------------------------------------------------------------------------------

NEWER_FACTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "topic": ("state/topics", "topic/default/new", {"config": {}, "partition_uids": [7], "created_ms": 1, "tier": 2}),
    "topic setting": (
        "state/topics",
        "topic/default/new",
        {"config": {"tier": "cold"}, "partition_uids": [7], "created_ms": 1},
    ),
    "kind": ("state/topics", "region/north", {"created_ms": 1}),
    "offset": ("state/groups", "offset/default/g/orders/0", {"offset": 1, "term": 4}),
    "queue setting": ("state/queues", "queue/default/orders/q", {"policy": {"tier": "cold"}, "made_us": 1}),
    "queue kind": ("state/queues", "chain/default/orders/q", {"policy": {}, "made_us": 1}),
    "key": (
        "state/access",
        "key/k",
        {"id": "k", "name": "", "roles": ["read"], "scopes": [], "created_ms": 1, "secrets": [], "not_from": ["x"]},
    ),
}


@pytest.mark.parametrize("which", NEWER_FACTS)
def test_a_fact_that_only_a_newer_version_understands_keeps_the_broker_from_starting(data: Path, which: str) -> None:
    """Read without what it says, it would be written down without it: a key, say, that opens more than it should."""
    directory, key, document = NEWER_FACTS[which]
    add(data, directory, key, msgspec.json.encode(document))
    said = refuses_to_start(data)
    assert "does not know" in said


def test_a_session_with_a_fact_of_a_newer_version_keeps_the_broker_from_starting(data: Path) -> None:
    add(data, "state/mqtt", "session/default/sensor", msgspec.msgpack.encode(["moved-to", "north"]))
    assert "'moved-to'" in refuses_to_start(data)


@pytest.mark.parametrize("entity", ["queue/work", "burials/work", "transfers", "schedules", "lanes"])
def test_a_journal_with_a_fact_of_a_newer_version_closes_its_partition_and_no_other(data: Path, entity: str) -> None:
    """A queue that passed over it would deliver again what is settled, or never what is not."""
    add(data, f"{ORDERS}.state", entity, msgspec.msgpack.encode(["parked", [0, 1]]))
    before = contents(data / f"{ORDERS}.state")
    with BrokerForTests(data) as broker:
        client = broker.connect()
        for use in (lambda: client.queue("orders", group="work").lease(1), lambda: client.publish("orders", "x")):
            with pytest.raises(NewerData, match="'parked'"):
                use()
        assert [it.value for it in client.browse("payments")] == [b"three"]
    assert contents(data / f"{ORDERS}.state") == before


def test_a_query_with_a_fact_of_a_newer_version_publishes_nothing(data: Path) -> None:
    """Half of a batch would be published for all of it."""
    with BrokerForTests(data) as broker, NativeClient(broker.address) as wire:
        stage = wire.call("stage.open", query="q", batch=0)["stage"]
        wire.publish(stage_address(stage, "orders"), [b"staged"])
    add(data, "stages/1", msgspec.msgpack.encode(["parked", stage]), b"")
    before = contents(data / "stages/1")
    part = {"stage": stage, "batches": 1, "messages": 1}
    with BrokerForTests(data) as broker, NativeClient(broker.address) as wire:
        with pytest.raises(NewerData, match="'parked'"):
            wire.call("stage.publish", query="q", batch=0, stages=[part])
        assert [it.value for it in broker.connect().browse("orders")] == [b"one", b"two"]
    assert contents(data / "stages/1") == before


def test_facts_about_what_nobody_knows_are_kept(data: Path) -> None:
    add(data, f"{ORDERS}.state", "mirror/north", msgspec.msgpack.encode(["begun", 1]))
    with BrokerForTests(data) as broker:
        client = broker.connect()
        with client.queue("orders", group="work") as queue:
            queue.ack(queue.lease(1))
        client.admin.checkpoint()
    assert b"mirror/north" in b"".join(contents(data / f"{ORDERS}.state").values())


#: By format: what is stored in it, summed up.  Lines are added; one is changed only while no release has its format.
#: Settings of topics and queues are not in it: an earlier version refuses them where they are used, and only there.
FROZEN = {1: 2813666114}


def test_whoever_stores_something_new_raises_the_format() -> None:
    """Earlier versions would refuse it log by log, when they have begun already; by the number they do so at once."""
    stored = {
        "documents": {log: {kind: sorted(fields) for kind, fields in it.items()} for log, it in DOCUMENTS.items()},
        "facts": {entity: sorted(kind.decode() for kind in kinds) for entity, kinds in FACTS.items()},
        "batch": [VERSION, int(sum(Columns)), sorted(Codec)],
        "index": [index._VERSION, int(sum(index.IndexFlags))],
    }
    found = crc32c(msgspec.json.encode(stored, order="sorted"))
    hint = f"raise FORMAT in log/format.py and add {data_format.FORMAT + 1}: {found} here; see CONTRIBUTING.md"
    assert FROZEN.get(data_format.FORMAT) == found, hint


def test_the_sentence_has_a_code_and_says_what_to_do() -> None:
    assert issubclass(NewerData, MillstreamError)
    assert not NewerData.retriable
    assert "restore a backup" in NewerData.remedy

"""What is read from files: logs, backups, pipelines, settings."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from unittest import mock

import zstandard
from crc32c import crc32c

from millstream.config import load_settings
from millstream.errors import BatchDamaged, MillstreamError
from millstream.headers import readable_headers
from millstream.log import archive
from millstream.log.compaction import Compaction
from millstream.log.memory import MemoryStorage
from millstream.log.partition import PartitionLog
from millstream.log.verify import verify
from millstream.records import Batch
from tests.fuzz.doors import batches, mended
from tests.fuzz.mutation import VALUES, bend
from tests.fuzz.target import Harm, Target
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, append, open_log

__all__ = ["BackupTarget", "ConfigTarget", "LogTarget", "PipelineTarget"]

try:
    from millstream.spark.columns import columns_of
    from millstream.spark.decoding import BatchDecoder
except ImportError:  # without Spark's packages
    BatchDecoder = None  # type: ignore[assignment, misc]
else:
    _COLUMNS = columns_of(headers=True, priority=True, ids=True)


# --- logs --------------------------------------------------------------------------------------------------------

_FILES = {b"L": FIRST_LOG, b"I": FIRST_INDEX, b"P": f"{DIRECTORY}/{28:020d}.producers"}


class LogTarget(Target):
    """A file of a partition: its first byte says which (L, I or P), the others are as they should be.

    Every batch that can be read is unpacked by everybody who unpacks batches.
    """

    name = "log"

    def _log(self, storage: MemoryStorage) -> PartitionLog:
        return open_log(storage, segment_bytes=2048, index_interval_bytes=256, tail_bytes=0)

    def _written(self) -> MemoryStorage:
        storage = MemoryStorage()
        log = self._log(storage)
        for number, batch in enumerate(batches()):
            append(log, memoryview(bytearray(batch)), now_us=1_000_000 + number)
        log.sync()
        log.close()
        return storage

    def seeds(self) -> list[bytes]:
        storage = self._written()
        names = [f"{DIRECTORY}/{name}" for name in storage.names(DIRECTORY)]
        kinds = {".log": b"L", ".index": b"I", ".producers": b"P"}
        found = [kinds["." + name.rpartition(".")[2]] + storage.read_all(name) for name in names]
        stored = [unit for data in found if data[:1] == b"L" for unit in self.split(data)[1:]]
        return [*found, *(b"L" + unit for unit in stored)]

    def split(self, data: bytes) -> list[bytes]:
        units, at = [data[:1]], 1
        while data[:1] == b"L" and data[at : at + 3] == b"MS\x01" and len(data) - at >= 64:
            size = max(64, int.from_bytes(data[at + 4 : at + 8], "little"))
            units.append(data[at : at + size])
            at += size
        return [*units, data[at:]] if at < len(data) else units

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"".join(map(_stamped, units))

    def change(self, random: Random, unit: bytes) -> bytes:
        if len(unit) < 64:
            return random.choice((b"L", b"L", b"I", b"P")) if len(unit) == 1 else bend(random, unit)
        if random.random() < 0.3:
            return bend(random, unit[:64])[:64].ljust(64, b"\0") + unit[64:]
        return unit[:64] + bend(random, unit[64:])

    def use(self, data: bytes) -> None:
        storage = self._written()
        path = _FILES.get(data[:1], FIRST_LOG)
        storage.replace(path, data[1:])
        if path == FIRST_LOG:
            self._unpack(data[1:])
            if len(data) & 1:
                storage.remove(FIRST_INDEX)  # else its log is taken for what it was
        verify(storage, DIRECTORY)
        with suppress(MillstreamError):
            log = self._log(storage)
            self._read(log)
            log.roll()
            log.sync()
            compaction = Compaction.plan(log, now_us=10**15, dirty_share_min=0.0)
            if compaction is not None:
                compaction.rewrite()
                list(compaction.swaps())
                self._read(log)
            log.close()

    def _read(self, log: PartitionLog) -> None:
        offset = log.start_offset
        for _ in range(1000):
            if offset >= log.next_offset:
                break
            chunk = log.read(offset, 4096, before=log.next_offset)
            for buffer in chunk.buffers:
                self._unpack(bytes(buffer))
            if chunk.next_offset <= offset:
                raise Harm("a reader does not get on")
            offset = chunk.next_offset
        log.offset_at_time(1_000_001)

    def _unpack(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            try:
                batch = Batch.parse(data, at)
            except BatchDamaged:
                break
            at += batch.header.length
            with suppress(MillstreamError):
                _look_at(batch)
        if BatchDecoder is not None and data:
            for verified in (True, False):
                decoder = BatchDecoder(_COLUMNS, topic="t", partition=0)
                with suppress(MillstreamError):
                    for rows in (*decoder.feed(data, first=0, until=2**62, verify=verified), *decoder.finish()):
                        rows.validate(full=True)
                        for column in rows.columns:  # times as they are: Python has no years behind 9999, Spark has
                            (column.cast("int64") if str(column.type).startswith("timestamp") else column).to_pylist()


def _look_at(batch: Batch) -> None:
    batch.values(), batch.keys(), batch.timestamps_us(), batch.deliver_at_us(), batch.expiry_us()
    batch.priorities(), list(batch.offsets()), batch.earliest_deliver_at_us
    for headers in batch.raw_headers() or ():
        readable_headers(headers)


def _stamped(unit: bytes) -> bytes:
    """A stored batch that matches both its checksums."""
    if len(unit) < 64:
        return unit
    whole = bytearray(mended(unit))
    whole[32:36] = crc32c(memoryview(whole)[:32]).to_bytes(4, "little")
    return bytes(whole)


# --- backups -----------------------------------------------------------------------------------------------------


class BackupTarget(Target):
    """The tar inside an archive."""

    name = "backup"

    def seeds(self) -> list[bytes]:
        return [*self._archives(), *self._hostile()]

    def _archives(self) -> Iterator[bytes]:
        for files in ({"node_id": b"n"}, {"node_id": b"n", "topics/default/orders/0/0.log": b"x" * 700}, {}):
            target = io.BytesIO()
            sizes = {name: len(content) for name, content in files.items()}
            read = {name: io.BytesIO(content) for name, content in files.items()}
            archive.write_archive(target, sizes, read.__getitem__, node_id="n", created_ms=1, running=True)
            yield zstandard.ZstdDecompressor().stream_reader(target.getvalue()).read()

    def _hostile(self) -> Iterator[bytes]:
        heading = next(self._archives())[:1536]
        kinds = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
        for name, kind in [("../up", kinds[0]), ("/etc/up", kinds[0]), *(("a", kind) for kind in kinds)]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            yield heading + member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)

    def split(self, data: bytes) -> list[bytes]:
        return [data[at : at + 512] for at in range(0, len(data), 512)]

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"".join(_summed(unit) for unit in units)

    def use(self, data: bytes) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="millstream-fuzz-", dir=_fast_place()) as place,
            mock.patch.object(archive, "_sync"),
        ):
            target = Path(place) / "data"
            for packed in (data, zstandard.ZstdCompressor(level=1).compress(data)):
                with suppress(MillstreamError):
                    archive.restore_archive(io.BytesIO(packed), target)
                    if any(path.is_symlink() for path in target.rglob("*")):
                        raise Harm("a restored directory has a link in it")
                if [path for path in Path(place).iterdir() if path != target]:
                    raise Harm("a restore wrote beside its directory")
                if target.exists():
                    break


def _fast_place() -> str | None:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() else None


def _summed(block: bytes) -> bytes:
    """A header of a member, with its checksum."""
    if block[257:262] != b"ustar":
        return block
    block = block[:512].ljust(512, b"\0")
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


# --- YAML --------------------------------------------------------------------------------------------------------


class _Text(Target):
    """Lines, which nobody else waits for."""

    slow_s = 5.0

    def split(self, data: bytes) -> list[bytes]:
        return data.splitlines(keepends=True)

    def change(self, random: Random, unit: bytes) -> bytes:
        key, colon, _ = unit.partition(b":")
        if colon and random.random() < 0.5:
            return key + colon + b" " + repr(random.choice(VALUES)).encode(errors="replace")[:2000] + b"\n"
        return bend(random, unit)


_HOSTILE_YAML = (
    b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n",
    b"a: !!python/object/apply:os.system ['true']\n",
    b"? {a: b}\n: c\n",
    b"a: &a\n  b: *a\n",
    b"a: 2020-13-45\n",
    b"a: 0x" + b"f" * 5000 + b"\n",
    b"[" * 1000,
    b"{a: " * 1000,
    b"a:\n <<: [1]\n",
)


class ConfigTarget(_Text):
    """The file of settings."""

    name = "config"

    def seeds(self) -> list[bytes]:
        text = b"server:\n  port: 0\n  host: 127.0.0.1\nstorage:\n  segment_bytes: 64MiB\nmqtt:\n  enabled: true\n"
        return [text, b"", b"# nothing\n", b"limits:\n", *_HOSTILE_YAML]

    def use(self, data: bytes) -> None:
        with suppress(MillstreamError):
            load_settings(data.decode(errors="replace"), {}, {})


class PipelineTarget(_Text):
    """The file of a pipeline, as far as it can be checked without Spark."""

    name = "pipeline"

    def seeds(self) -> list[bytes]:
        made = [path.read_bytes() for path in sorted(Path(__file__).parents[2].glob("examples/**/*.y*ml"))]
        return [
            *(text for text in made if b"sources:" in text or b"ready:" in text),
            *(f"ready: {kind}\n".encode() for kind in ("archive", "replay", "dlq-report", "audit", "latency", "usage")),
            *(b"name: a\nsources:\n  s: {topic: a}\nsinks:\n  - {topic: b}\n" + text for text in _HOSTILE_YAML),
            *_HOSTILE_YAML,
            _WHOLE,
        ]

    def use(self, data: bytes) -> None:
        from millstream.spark.pipelines.loading import check_pipeline

        _, mistakes = check_pipeline(data.decode(errors="replace"), Path("/nowhere"))
        for mistake in mistakes:
            if not str(mistake):
                raise Harm("a mistake without words")


_WHOLE = b"""\
name: whole
broker: 127.0.0.1:9092
namespace: default
sources:
  orders: {topic: orders, options: {startingOffsets: earliest}}
  files: {parquet: in, stream: false}
steps:
  - sql: select * from orders
    name: one
  - redact: {fields: [value.a], with: hash}
    from: one
    name: two
  - split: {field: value.items}
    name: three
  - aggregate: {window: 1m, by: [key], columns: {n: count(*)}}
    name: four
  - enrich: {with: files, on: [key]}
    name: five
  - route: {by: key, topics: {a: x, b: y}, otherwise: drop}
    name: six
sinks:
  - {topic: out, from: six, trigger: 10s}
  - {parquet: out, from: three}
dead_letters: {topic: out.dlq}
restart: {tries: 3}
"""

"""What tests of the log share: batches of every kind, opening a log, and reading all of it back."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from millstream.headers import encode_headers
from millstream.log.cache import FileCache, TailCache
from millstream.log.partition import LogConfig, PartitionLog
from millstream.log.storage import Storage
from millstream.records import Batch, check_batch, encode_batch

DIRECTORY = "topics/orders/0"
FIRST_LOG = f"{DIRECTORY}/{0:020d}.log"
FIRST_INDEX = f"{DIRECTORY}/{0:020d}.index"


@dataclass(frozen=True)
class Message:
    """What must come back unchanged."""

    offset: int
    key: bytes | None
    value: bytes | None


def open_log(
    storage: Storage,
    *,
    segment_bytes: int = 64 * 1024 * 1024,
    index_interval_bytes: int = 4096,
    notes_bytes_min: int = 0,
    tail_bytes: int = 16 * 1024 * 1024,
) -> PartitionLog:
    """A log with caches of its own; pass tail_bytes=0 to read from the files."""
    return PartitionLog.open(
        storage,
        DIRECTORY,
        config=LogConfig(segment_bytes, index_interval_bytes, notes_bytes_min),
        files=FileCache(),
        tail=TailCache(tail_bytes),
    )


def plain(
    *values: bytes | None, keys: list[bytes | None] | None = None, producer: int = 0, sequence: int = 0
) -> memoryview:
    """A batch without anything special."""
    return memoryview(
        encode_batch(list(values), keys=keys, base_timestamp_us=1_000, producer=producer, first_sequence=sequence)
    )


def mixed(random: Random, *, messages_max: int = 6, value_bytes_max: int = 120) -> memoryview:
    """A batch with any combination of columns and any codec."""
    count = random.randint(1, messages_max)

    def sometimes(column: list[int]) -> list[int] | None:
        return column if random.random() < 0.3 else None

    values: list[bytes | None] = [random.randbytes(random.randint(0, value_bytes_max)) for _ in range(count)]
    if random.random() < 0.2:
        values[random.randrange(count)] = None
    keys: list[bytes | None] = [random.choice([None, b"a", b"bb", b"ccc"]) for _ in range(count)]
    headers = [encode_headers({"trace": random.randbytes(random.randint(0, 9))}) for _ in range(count)]
    batch = encode_batch(
        values,
        keys=keys if random.random() < 0.5 else None,
        headers=headers if random.random() < 0.3 else None,
        priorities=sometimes([random.randrange(5) for _ in range(count)]),
        deliver_at_us=sometimes([random.randrange(1 << 50) for _ in range(count)]),
        expiry_us=sometimes([random.randrange(1 << 50) for _ in range(count)]),
        timestamps_us=sometimes([random.randrange(1 << 50) for _ in range(count)]),
        base_timestamp_us=random.randrange(1 << 50),
        codec=random.randrange(3),
    )
    return memoryview(batch)


def append(log: PartitionLog, *batches: memoryview, now_us: int = 0) -> list[Message]:
    """Append batches together; returns their messages as they must be read back."""
    counts = [check_batch(batch, 0, len(batch)).count for batch in batches]
    offset = log.append(batches, counts, now_us)
    messages = []
    for batch in batches:
        for message in messages_of(bytes(batch)):
            messages.append(message)
            assert message.offset == offset
            offset += 1
    return messages


def messages_of(data: bytes) -> list[Message]:
    """The messages in a buffer of whole batches; checks every checksum on the way."""
    messages = []
    position = 0
    while position < len(data):
        batch = Batch.parse(data, position)
        keys = batch.keys() or [None] * batch.count
        messages += [Message(*row) for row in zip(batch.offsets(), keys, batch.values(), strict=True)]
        position += batch.header.length
    assert position == len(data)
    return messages


def read_back(
    log: PartitionLog, *, start: int | None = None, before: int | None = None, max_bytes: int = 1 << 20
) -> tuple[list[Message], list[tuple[int, int]]]:
    """Every message that can be read from `start` on, and the damaged ranges met on the way."""
    offset = log.start_offset if start is None else start
    first = offset
    end = log.next_offset if before is None else before
    messages: list[Message] = []
    damaged = []
    while offset < end:
        chunk = log.read(offset, max_bytes, before=end)
        if chunk.damaged is not None:
            damaged.append(chunk.damaged)
        for buffer in chunk.buffers:
            messages += messages_of(buffer)
        if not chunk.buffers and chunk.next_offset == offset:
            break
        assert offset < chunk.next_offset <= end
        offset = chunk.next_offset
    return [message for message in messages if message.offset >= first], damaged

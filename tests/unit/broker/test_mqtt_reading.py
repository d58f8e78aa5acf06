"""Messages for sessions that catch up: cut out of a batch a few at a time, and large batches unpacked once."""

from __future__ import annotations

import pytest

from millstream.broker.mqtt import reading
from millstream.broker.mqtt.halfway import Halfway
from millstream.broker.mqtt.reading import messages_from, messages_of
from millstream.mqtt.messages import Message
from millstream.records import Batch, Codec, encode_batch, encode_headers, stamp

HEADERS = encode_headers([("mqtt", "1:device7")])


def stored(count: int, *, base: int = 1_000, codec: int = 0, step: int = 1, keys: bool = False) -> bytes:
    """A batch as the log has it, of which compaction may have left every second message."""
    batch = encode_batch(
        [b"%d" % number if number % 7 else None for number in range(count)],
        base_timestamp_us=1,
        keys=[b"k/%d" % number if number % 5 else None for number in range(count)] if keys else None,
        headers=[HEADERS if number % 3 else b"" for number in range(count)],
        expiry_us=list(range(count)),
        offsets=range(0, step * count, step) if step > 1 else None,
        codec=codec,
    )
    stamp(memoryview(batch), 0, base_offset=base, append_time_us=5, leader_epoch=0)
    return bytes(batch)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize(("count", "step"), [(1, 1), (99, 1), (100, 2), (350, 1), (350, 2)])
@pytest.mark.parametrize("topic", ["a/b", None])
def test_messages_from_an_offset_on_are_those_that_the_whole_batch_has(
    codec: Codec, count: int, step: int, topic: str | None
) -> None:
    buffer = stored(count, codec=codec, step=step, keys=topic is None)
    everything = list(messages_of([buffer], topic))
    assert len(everything) == (count if topic else count - -(-count // 5))
    batch = Batch.parse(buffer)
    for first in (0, 1_000, 1_001, 1_050, 1_000 + step * count - 1, 1_000 + step * count):
        assert list(messages_from(batch, topic, first)) == [row for row in everything if row[0] >= first]
    wanted = {1_000, 1_004, 1_250, 5_000}
    assert list(messages_of([buffer], topic, wanted)) == [row for row in everything if row[0] in wanted]
    assert not list(messages_of([buffer], topic, {7}))


def test_who_wants_a_few_messages_of_a_batch_does_not_pay_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    cut: list[int] = []
    message_of, values = reading.message_of, Batch.values

    def make(*arguments: object) -> Message:
        nonlocal made
        made += 1
        return message_of(*arguments)  # type: ignore[arg-type]

    def cut_out(batch: Batch) -> list[bytes | None]:
        cut.append(batch.count)
        return values(batch)

    monkeypatch.setattr(reading, "message_of", make)
    monkeypatch.setattr(Batch, "values", cut_out)
    found = messages_from(Batch.parse(stored(50_000)), "a", 41_000)
    assert [next(found)[0] for _ in range(150)] == list(range(41_000, 41_150))
    assert made == 150
    assert sum(cut) == 200


def test_large_messages_are_cut_out_one_by_one() -> None:
    batch = encode_batch([bytes(100_000)] * 50, base_timestamp_us=1)
    stamp(memoryview(batch), 0, base_offset=0, append_time_us=5, leader_epoch=0)
    found = messages_from(Batch.parse(bytes(batch)), "a", 20)
    assert next(found)[0] == 20
    assert found.gi_frame.f_locals["end"] == 21  # type: ignore[attr-defined]


def batch_of(size: int, base: int) -> Batch:
    batch = encode_batch([bytes(size)], base_timestamp_us=1)
    stamp(memoryview(batch), 0, base_offset=base, append_time_us=5, leader_epoch=0)
    return Batch.parse(bytes(batch))


def test_batches_that_were_kept_last_stay_within_their_limit() -> None:
    halfway = Halfway(10_000)
    for base in range(20):
        halfway.keep(7, batch_of(2_000, base))
    assert [base for base in range(20) if halfway.find(7, base) is not None] == [16, 17, 18, 19]
    halfway.keep(7, batch_of(2_000, 16))
    halfway.keep(8, batch_of(2_000, 16))
    assert halfway.find(7, 17) is None
    assert halfway.find(7, 16) is not None, "it was kept again"
    halfway.keep(9, batch_of(50_000, 0))
    assert len(halfway) == 1
    assert halfway.find(9, 0) is not None, "one may be as large as it likes"


def test_a_batch_that_nobody_needs_is_forgotten() -> None:
    halfway = Halfway()
    halfway.keep(1, batch_of(2_000, 0))
    halfway.keep(2, batch_of(2_000, 0))
    halfway.sweep()
    assert halfway.find(1, 0) is not None
    halfway.sweep()
    assert halfway.find(2, 0) is None
    halfway.sweep()
    halfway.sweep()
    assert len(halfway) == 0

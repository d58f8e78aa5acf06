"""Dead letters for every message: nothing of it is lost, and order comes back whatever order they died in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.dead_letters import DeadLetter, LetterEdit
from millstream.ids import message_id
from millstream.queues.letters import Place, dead_letter_batch, read_letter, replay_batch, stored_messages
from millstream.queues.records import Attempt, Dead, History
from millstream.queues.replay_plan import ReplayPlanner
from millstream.records import Batch, decode_headers, encode_batch, encode_headers, stamp

ORDERS, DEAD = Place("orders", 1, 7), Place("orders.dlq", 1, 8)

names = st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("millstream-"))
messages = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=8),
        st.lists(st.tuples(names, st.binary(max_size=8)), max_size=3),
        st.integers(0, 4),
        st.integers(0, 1 << 50),
    ),
    min_size=1,
    max_size=12,
)


def stamped(batch: bytearray, base: int) -> Batch:
    stamp(memoryview(batch), 0, base_offset=base, append_time_us=1_700_000_000_000_000, leader_epoch=0)
    return Batch.parse(bytes(batch))


@given(messages=messages, chosen=st.integers(1, (1 << 12) - 1), error=st.text(max_size=2000))
def test_a_message_comes_back_from_the_dead_as_it_was(
    messages: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]], int, int]], chosen: int, error: str
) -> None:
    values, keys, headers, priorities, timestamps = zip(*messages, strict=True)
    batch = encode_batch(
        values,
        keys=keys if any(key is not None for key in keys) else None,
        headers=[encode_headers(items) for items in headers],
        priorities=priorities,
        timestamps_us=timestamps,
        base_timestamp_us=0,
    )
    history = History(1, 1, 5, (Attempt("w", 5, 6, "nack", error),))
    made = dead_letter_batch(
        [stamped(batch, 40)], [Dead(40, chosen, "POISON", error, history, ())], ORDERS, group="g", now_ms=9
    )
    picked = [index for index in range(len(messages)) if chosen >> index & 1]
    if made is None:
        assert not picked
        return
    letters = [read_letter(message, DEAD) for message in stored_messages(stamped(made, 90))]
    assert [letter.original_offset for letter in letters] == [40 + index for index in picked]
    assert all(letter.attempts[0].reason == error for letter in letters)
    back = stamped(replay_batch(letters, replay_id="r", edit=LetterEdit()), 200)
    found = [
        (
            message.value,
            message.key,
            [item for item in decode_headers(message.raw_headers) if not item[0].startswith("millstream-")],
            message.priority,
            message.timestamp_us,
        )
        for message in stored_messages(back)
    ]
    assert found == [messages[index] for index in picked]


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.integers(0, 3), st.integers(0, 1 << 40)),
        min_size=1,
        max_size=40,
        unique=True,
    ).flatmap(lambda places: st.tuples(st.just(sorted(places)), st.permutations(places)))
)
def test_replays_follow_the_order_of_arrival(
    orders: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]],
) -> None:
    arrived, died = orders
    planner = ReplayPlanner(target="", edit=LetterEdit(), rate=0, topic_exists=lambda _: True, groups_of=lambda _: [])
    for offset, (time_ms, uid, original_offset) in enumerate(died):
        planner.add(_letter(offset, message_id(time_ms * 1000, uid, original_offset)))
    assert [died[candidate.offset] for candidate in planner.candidates()] == arrived
    first = planner.plan(now_ms=0).first
    assert first == [f"letter {died.index(place)}" for place in arrived[:10]]


def _letter(offset: int, original_id: str) -> DeadLetter:
    return DeadLetter(
        id=f"letter {offset}",
        topic="orders.dlq",
        partition=offset % 2,
        offset=offset,
        original_id=original_id,
        original_topic="orders",
        original_partition=0,
        original_offset=0,
        timestamp_us=0,
        key=None,
        value=b"",
        value_bytes=0,
        headers=[],
        priority=2,
        group="",
        reason="",
        error="",
        deliveries=1,
        failures=1,
        first_delivery_ms=0,
        attempts=[],
        dead_ms=0,
    )

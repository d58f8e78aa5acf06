"""Dead letters: made from messages, read back whole, sorted, filtered, counted, and made into messages again."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.dead_letters import DeadLetter, LetterEdit, LetterFilter, LetterStatistics
from millstream.errors import InvalidName
from millstream.ids import message_id
from millstream.names import check_topic
from millstream.options import DEDUP_ID, MAX_RETRIES
from millstream.queues.letter_filters import compile_filter
from millstream.queues.letters import (
    Place,
    dead_letter_batch,
    dead_letter_topic,
    read_letter,
    replay_batch,
    stored_messages,
)
from millstream.queues.records import Attempt, Dead, History
from millstream.queues.replay_plan import Candidate, ReplayPlanner
from millstream.records import Batch, Columns, decode_headers, encode_batch, encode_headers, stamp


def read_letters(batch: Batch) -> list[DeadLetter]:
    return [read_letter(message, Place("orders.dlq", 3, 88)) for message in stored_messages(batch)]


ORDERS = Place("orders", 3, 77)
HISTORY = History(
    2,
    1,
    1_000_000,
    (Attempt("w1", 1_000_000, 2_000_000, "nack", "db down"), Attempt("w2", 3_000_000, 4_000_000, "reject")),
)


def stored(values: list[bytes | None], base: int = 10, append_us: int = 5_000_000, **columns: Any) -> Batch:
    batch = encode_batch(values, base_timestamp_us=4_000_123, **columns)
    stamp(memoryview(batch), 0, base_offset=base, append_time_us=append_us, leader_epoch=0)
    return Batch.parse(bytes(batch))


def died(batch: Batch, bits: int = 1, reason: str = "REJECTED", error: str = "db down", base: int = 10) -> Batch:
    dead = Dead(base, bits, reason, error, HISTORY, ())
    made = dead_letter_batch([batch], [dead], ORDERS, group="billing", now_ms=9_000)
    assert made is not None
    stamp(memoryview(made), 0, base_offset=500, append_time_us=9_500_000, leader_epoch=0)
    return Batch.parse(bytes(made))


def letter(**changes: Any) -> DeadLetter:
    (found,) = read_letters(died(stored([b"value"], keys=[b"k"])))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


# --- making and reading ----------------------------------------------------------------------------------------------


def test_a_letter_has_the_message_its_place_and_its_whole_history() -> None:
    batch = stored(
        [b"first", b"second", None],
        keys=[b"a", None, b"c"],
        headers=[encode_headers({"shop": "berlin"}), b"", b""],
        priorities=[0, 2, 4],
        timestamps_us=[111, 222, 333],
        expiry_us=[1, 1, 1],
    )
    made = died(batch, bits=0b101)
    first, third = read_letters(made)
    assert (first.value, first.key, first.priority, first.timestamp_us) == (b"first", b"a", 0, 111)
    assert (third.value, third.key, third.priority, third.timestamp_us) == (None, b"c", 4, 333)
    assert first.headers == [("shop", b"berlin")]
    assert (first.topic, first.partition, first.offset) == ("orders.dlq", 3, 500)
    assert first.id == message_id(9_500_000, 88, 500)
    assert (first.original_topic, first.original_partition, first.original_offset) == ("orders", 3, 10)
    assert first.original_id == message_id(5_000_000, 77, 10)
    assert third.original_offset == 12
    assert (first.group, first.reason, first.error, first.dead_ms) == ("billing", "REJECTED", "db down", 9_000)
    assert (first.deliveries, first.failures, first.first_delivery_ms) == (2, 1, 1_000)
    assert [(a.consumer, a.delivered_ms, a.ended_ms, a.kind, a.reason) for a in first.attempts] == [
        ("w1", 1_000, 2_000, "nack", "db down"),
        ("w2", 3_000, 4_000, "reject", ""),
    ]
    assert made.expiry_us() is None, "a letter of an expired message must not expire"


def test_letters_of_one_death_are_gathered_from_all_their_batches() -> None:
    batches = [stored([b"a", b"b"]), stored([b"c"], base=12, append_us=6_000_000)]
    made = dead_letter_batch(batches, [Dead(11, 0b11, "POISON", "", HISTORY, ())], ORDERS, group="g", now_ms=1)
    assert made is not None
    stamp(memoryview(made), 0, base_offset=0, append_time_us=1, leader_epoch=0)
    letters = read_letters(Batch.parse(bytes(made)))
    assert [(found.original_offset, found.value) for found in letters] == [(11, b"b"), (12, b"c")]
    assert letters[1].original_id == message_id(6_000_000, 77, 12)


def test_nothing_is_made_of_messages_that_compaction_took() -> None:
    assert (
        dead_letter_batch([stored([b"a"])], [Dead(99, 1, "POISON", "", HISTORY, ())], ORDERS, group="g", now_ms=1)
        is None
    )


def test_a_message_that_dies_again_tells_of_its_last_death_only() -> None:
    once = letter()
    again = stored([once.value], headers=[died(stored([b"x"])).raw_headers()[0]])  # type: ignore[index, list-item]
    (found,) = read_letters(died(again, reason="POISON"))
    assert found.reason == "POISON"
    assert found.headers == []


def test_a_message_published_by_hand_is_a_letter_without_a_past() -> None:
    batch = stored([b"x"], headers=[encode_headers({"millstream-dead-offset": "no", "millstream-dead-attempts": "{"})])
    (found,) = read_letters(batch)
    assert (found.original_topic, found.original_offset, found.original_id) == ("orders", 10, found.id)
    assert (found.reason, found.attempts, found.dead_ms) == ("", [], 5_000)


def test_a_long_error_is_cut_between_letters() -> None:
    (found,) = read_letters(died(stored([b"x"]), error="ä" * 2000))
    assert found.error == "ä" * 512


@pytest.mark.parametrize(("topic", "configured", "name"), [("a.b", "", "a.b.dlq"), ("a", "graveyard", "graveyard")])
def test_where_letters_go(topic: str, configured: str, name: str) -> None:
    assert dead_letter_topic(topic, configured) == name


# --- returning -------------------------------------------------------------------------------------------------------


def replayed(letters: list[DeadLetter], edit: LetterEdit | None = None) -> Batch:
    batch = replay_batch(letters, replay_id="r-1", edit=edit or LetterEdit())
    stamp(memoryview(batch), 0, base_offset=0, append_time_us=1, leader_epoch=0)
    return Batch.parse(bytes(batch))


def headers_of(batch: Batch, index: int = 0) -> dict[str, bytes]:
    raw = batch.raw_headers()
    assert raw is not None
    return dict(decode_headers(raw[index]))


def test_a_replayed_message_is_the_original_with_word_of_where_it_was() -> None:
    original = stored([b"v"], keys=[b"k"], headers=[encode_headers({"shop": "berlin"})], priorities=[1])
    (found,) = read_letters(died(original))
    again = replayed([found])
    assert (again.values(), again.keys(), again.priorities()) == ([b"v"], [b"k"], [1])
    assert again.timestamps_us() == [4_000_123]
    assert headers_of(again) == {
        "shop": b"berlin",
        "millstream-replay-id": b"r-1",
        "millstream-replayed-from": found.id.encode(),
        "millstream-replayed-reason": b"REJECTED",
    }


def test_a_second_replay_replaces_what_the_first_one_said() -> None:
    found = letter(headers=[("millstream-replay-id", b"r-0"), ("a", b"1")])
    assert headers_of(replayed([found]))["millstream-replay-id"] == b"r-1"
    raw = replayed([found]).raw_headers()
    assert raw is not None
    assert [name for name, _ in decode_headers(raw[0])].count("millstream-replay-id") == 1


def test_value_and_headers_can_be_edited() -> None:
    found = letter(headers=[("keep", b"1"), ("drop", b"2"), ("change", b"3")])
    edit = LetterEdit(value=b"new", set_headers={"change": "4", "add": "5"}, remove_headers=["drop"])
    again = replayed([found], edit)
    assert again.values() == [b"new"]
    ours = {name: value for name, value in headers_of(again).items() if not name.startswith("millstream-")}
    assert ours == {"keep": b"1", "change": b"4", "add": b"5"}


@pytest.mark.parametrize(("header", "set_again"), [(MAX_RETRIES, True), ("other", False)])
def test_options_in_headers_count_again(header: str, set_again: bool) -> None:
    again = replayed([letter(headers=[(header, b"9")])])
    assert bool(again.header.flags & Columns.OPTIONS) is set_again


def test_a_dedup_id_does_not_come_back() -> None:
    """A replay is a repetition that somebody wants: within the window it would vanish."""
    assert DEDUP_ID not in headers_of(replayed([letter(headers=[(DEDUP_ID, b"x")])]))


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, True),
        ({"topic": "orders"}, True),
        ({"topic": "orders.#"}, True),
        ({"topic": "order"}, False),
        ({"topic": "*.eu"}, False),
        ({"group": "billing"}, True),
        ({"group": "bill"}, False),
        ({"reason": "rejected"}, True),
        ({"reason": "poison"}, False),
        ({"error": "DB"}, True),
        ({"error": "network"}, False),
        ({"headers": {"shop": "berlin"}}, True),
        ({"headers": {"shop": None}}, True),
        ({"headers": {"shop": "paris"}}, False),
        ({"headers": {"shop": "berlin", "floor": None}}, False),
        ({"key": "k"}, True),
        ({"key": ""}, False),
        ({"since_ms": 9_000}, True),
        ({"since_ms": 9_001}, False),
        ({"until_ms": 9_001}, True),
        ({"until_ms": 9_000}, False),
        ({"reason": "REJECTED", "error": "network"}, False),
    ],
)
def test_every_condition_of_a_filter_must_hold(wanted: dict[str, Any], expected: bool) -> None:
    matches = compile_filter(LetterFilter(**wanted))
    assert matches(letter(headers=[("shop", b"berlin")])) is expected


def test_a_topic_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidName):
        compile_filter(LetterFilter(topic="no/such"))


# --- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_add_up_in_parts() -> None:
    hour = 3_600_000
    now = 100 * 24 * hour
    letters = [
        letter(dead_ms=now - 1, reason="POISON", error="a"),
        letter(dead_ms=now - 2 * hour, original_topic="bills", error=""),
        letter(dead_ms=now - 48 * hour, group="audit"),
        letter(dead_ms=now - 999 * hour),
    ]
    whole, parts = LetterStatistics(), LetterStatistics()
    for one in letters:
        whole.count(one, now_ms=now)
        part = LetterStatistics()
        part.count(one, now_ms=now)
        parts.add(part)
    parts.add(LetterStatistics())
    assert parts == whole
    assert (whole.total, whole.bytes) == (4, 20)
    assert whole.by_reason == {"POISON": 1, "REJECTED": 3}
    assert whole.by_topic == {"orders": 3, "bills": 1}
    assert whole.by_group == {"billing": 3, "audit": 1}
    assert whole.by_error == {"a": 1, "db down": 2}
    assert whole.by_age == {"under 1 h": 1, "1 h to 1 d": 1, "1 d to 7 d": 1, "over 7 d": 1}
    assert (whole.oldest_ms, whole.newest_ms) == (now - 999 * hour, now - 1)


def test_errors_that_are_all_different_do_not_fill_the_memory() -> None:
    statistics = LetterStatistics()
    for number in range(1000):
        statistics.count(letter(error=f"order {number} failed"), now_ms=10_000)
    assert len(statistics.by_error) == 201
    assert sum(statistics.by_error.values()) == 1000


# --- plans -----------------------------------------------------------------------------------------------------------


def planner(**options: Any) -> ReplayPlanner:
    settings = {"target": "", "edit": LetterEdit(), "rate": 0.0, "topic_exists": lambda name: name != "gone"}
    settings["groups_of"] = lambda topic: []
    return ReplayPlanner(**{**settings, **options})


def test_letters_go_out_in_the_order_their_originals_came_in() -> None:
    plan = planner()
    for place, (time_us, offset) in enumerate([(3_000_000, 5), (1_000_000, 2), (3_000_000, 4)]):
        plan.add(letter(original_id=message_id(time_us, 7, offset), offset=place, id=f"letter-{place}"))
    plan.add(letter(original_id=message_id(2_000_000, 1, 9), topic="other.dlq", partition=0, offset=7, id="other"))
    assert list(plan.candidates()) == [
        Candidate("orders.dlq", 3, 1),
        Candidate("other.dlq", 0, 7),
        Candidate("orders.dlq", 3, 2),
        Candidate("orders.dlq", 3, 0),
    ]
    assert plan.plan(now_ms=5_000).first == ["letter-1", "other", "letter-2", "letter-0"]


def test_a_plan_counts_targets_and_says_how_long_it_takes() -> None:
    plan = planner(rate=2.0)
    for topic in ("orders", "orders", "bills"):
        plan.add(letter(original_topic=topic))
    made = plan.plan(now_ms=5_000)
    assert (made.total, made.bytes, made.targets, made.duration_ms) == (3, 15, {"orders": 2, "bills": 1}, 1_500)
    assert made.warnings == []


def test_letters_without_a_topic_to_go_to_stay() -> None:
    plan = planner()
    plan.add(letter(original_topic="gone"))
    plan.add(letter())
    made = plan.plan(now_ms=5_000)
    assert (made.total, made.stuck) == (1, 1)
    assert "'gone' does not exist" in made.warnings[0]
    (nothing,) = planner(target="other").plan(now_ms=1).warnings
    assert nothing.startswith("there is nothing to replay: no dead letter matches")


def test_a_plan_names_the_groups_that_get_a_message_again() -> None:
    def warnings(*letters: DeadLetter, target: str = "") -> list[str]:
        groups = {"orders": ["audit", "billing", "mail"], "bills": ["billing"]}
        plan = planner(target=target, groups_of=lambda topic: groups.get(topic, []))
        for one in letters:
            plan.add(one)
        return plan.plan(now_ms=5_000).warnings

    (warning,) = warnings(letter(), letter())
    assert "groups 'audit' and 'mail' too" in warning
    (warning,) = warnings(letter(), letter(group="audit"), letter(original_topic="bills"))
    assert "groups 'audit', 'billing' and 'mail' too" in warning
    assert warnings(letter(original_topic="bills")) == [], "who gave up on it is the only one"
    assert warnings(letter(), target="bills") == [], "there nobody had it before"
    (warning,) = warnings(letter(), target="orders")
    assert "'audit' and 'mail'" in warning


def test_a_plan_names_some_of_many_groups() -> None:
    plan = planner(groups_of=lambda topic: [f"g{number:02}" for number in range(20)])
    plan.add(letter())
    (warning,) = plan.plan(now_ms=5_000).warnings
    assert "'g04' and 15 more too" in warning


def test_a_plan_warns_of_age_bursts_and_equal_values() -> None:
    plan = planner(edit=LetterEdit(value=b"same"))
    for _ in range(1001):
        plan.add(letter())
    warnings = " | ".join(plan.plan(now_ms=10 * 86_400_000).warnings)
    assert "1w2d ago" in warnings
    assert "set a rate" in warnings
    assert "get the same value" in warnings


@pytest.mark.parametrize("size", [251, 252, 255])
def test_a_topic_with_a_name_as_long_as_can_be_has_a_place_for_its_letters(size: int) -> None:
    names = [("a." * 200)[: size - 1] + last for last in "xy"]
    names.append(names[0][: size - 4] + ".dlq")
    letters = [check_topic(dead_letter_topic(name)) for name in names]
    assert len({*names, *letters}) == 6, "a place of its own"
    assert all(name.endswith(".dlq") for name in letters)

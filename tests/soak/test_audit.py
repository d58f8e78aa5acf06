"""The audit sees what is wrong: each promise broken by hand, in a run that is otherwise as it should be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.queue_kills import LETTERS, Entry
from tests.queue_kills import TOPIC as JOBS
from tests.soak.audit import Evidence, SetClock, Stored, Verdict, judge, read_grants, read_removals
from tests.soak.audit.queues import timed_out
from tests.soak.faults import Happened
from tests.soak.ledger import Note
from tests.soak.memory import compare_memory, is_flat
from tests.soak.run import Sample
from tests.soak.traffic import mqtt, streams, web

PRODUCER = "orders-0.1"


def diary(at_s: float, group: str, what: str, offset: int, value: str, failures: int = 0, lease: str = "") -> Entry:
    return Entry(at_s, 0, group, what, (0, offset), failures, value, lease)


@dataclass
class Run:
    """A small run without faults in which everything is right; tests change one thing."""

    notes: dict[str, list[Note]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    stored: dict[str, list[Stored]] = field(default_factory=dict)
    faults: list[Happened] = field(default_factory=list)
    clocks: list[SetClock] = field(default_factory=list)
    grants: dict[str, float] = field(default_factory=dict)

    @classmethod
    def good(cls) -> Run:
        run = cls()
        run._streams()
        run._queues()
        run._web()
        run._mqtt()
        return run

    def _streams(self) -> None:
        self.notes[PRODUCER] = [
            Note(1, "sent", "orders", PRODUCER, 0, 3),
            Note(2, "sure", "orders", PRODUCER, 0, 3),
            Note(3, "sent", "orders", PRODUCER, 4, 5),  # killed before it knew
        ]
        self.stored["orders"] = [Stored(0, at, "k", f"{PRODUCER}:{at}") for at in range(5)]
        self.stored["copies"] = [*self.stored["orders"]]
        self.notes["readers-0.1"] = [Note(3, "saw", "orders", "readers-0.1", 0, 2, "0")]
        self.notes["readers-1.1"] = [Note(4, "saw", "orders", "readers-1.1", 3, 4, "0")]

    def _queues(self) -> None:
        values = ["jobs-0.1:0:ack:0", "jobs-0.1:1:reject:0", "jobs-0.1:2:ack:0"]
        self.notes["jobs-0.1"] = [Note(1, what, JOBS, v, 0, 0) for what in ("sent", "sure") for v in values]
        self.stored[JOBS] = [Stored(0, at, "j1", value) for at, value in enumerate(values)]
        self.stored[LETTERS] = []
        for group in ("sync", "keyed"):
            headers = {"group": group, "partition": "0", "offset": "1", "reason": "REJECTED", "failures": "0"}
            marked = {f"millstream-dead-{name}": value for name, value in headers.items()}
            self.stored[LETTERS].append(Stored(0, len(self.stored[LETTERS]), "j1", values[1], 0, marked))
            for at, (value, action, result) in enumerate(
                zip(values, ("ack", "reject", "ack"), ("done", "dead", "done"), strict=True)
            ):
                self.entries.append(diary(10 + at, group, "got", at, value))
                self.entries.append(diary(10.1 + at, group, f"try-{action}", at, value))
                self.entries.append(diary(10.2 + at, group, f"{result}-{action}", at, value))

    def _web(self) -> None:
        self.notes["web-0.1"] = [Note(1, what, web.TOPIC, "web-0.1", 0, 1) for what in ("sent", "sure")]
        self.stored[web.TOPIC] = [Stored(0, at, "", f"web-0.1:{at}") for at in range(2)]
        names = [f"web-0.1:{at}" for at in range(2)]
        self.notes["pages-0.1"] = [Note(5, "got", web.TOPIC, name, 0, 0) for name in names]
        self.notes["pages-0.1"] += [Note(6, "done", web.TOPIC, name, 0, 0) for name in names]

    def _mqtt(self) -> None:
        for name, _, qos in mqtt.PUBLISHERS:
            sure = "sure" if qos == 1 else "received"
            self.notes[f"mqtt-{name}"] = [
                Note(1, what, "soak", name, at, at, "1") for at in range(3) for what in ("sent", sure)
            ]
            self.stored[f"soak.{name}"] = [Stored(0, at, "", str(at)) for at in range(3)]
        for name, _, qos in mqtt.READERS:
            self.notes[f"mqtt-{name}"] = [
                Note(2 + at, f"got{min(qos, published)}", "soak", publisher, at, at, "1")
                for publisher, _, published in mqtt.PUBLISHERS
                for at in range(3)
            ]

    def judge(self, folder: Path) -> Verdict:
        for name, notes in self.notes.items():
            lines = ("\t".join(map(str, note)) + "\n" for note in notes)
            (folder / f"{name}.tsv").write_text("".join(lines))
        for old in folder.glob("*.diary"):
            old.unlink()
        for entry in self.entries:
            with (folder / f"{entry.group}-0.1.diary").open("a") as file:
                place = f"{entry.place[0]}\t{entry.place[1]}"
                told = (entry.failures, entry.value, entry.lease)
                line = (entry.at_s, entry.wall_ms, entry.group, entry.what, place, *told)
                file.write("\t".join(map(str, line)) + "\n")
        return judge(Evidence(folder, self.stored, self.faults, self.clocks, self.grants), spark=True)


def lose_a_stored_message(run: Run) -> None:
    del run.stored["orders"][4], run.stored["copies"][4]
    run.stored["orders"] = [message for message in run.stored["orders"] if message.offset != 3]
    run.stored["orders"].append(Stored(0, 3, "k", f"{PRODUCER}:4"))
    run.stored["copies"] = [*run.stored["orders"]]
    run.notes["readers-1.1"] = [Note(4, "saw", "orders", "readers-1.1", 3, 3, "0")]


def store_one_twice(run: Run) -> None:
    run.stored["orders"].append(Stored(0, 5, "k", f"{PRODUCER}:4"))
    run.stored["copies"] = [*run.stored["orders"]]
    run.notes["readers-1.1"] = [Note(4, "saw", "orders", "readers-1.1", 3, 5, "0")]


def store_what_nobody_sent(run: Run) -> None:
    run.stored[web.TOPIC].append(Stored(0, 2, "", "web-0.1:77"))
    run.notes["pages-0.1"].append(Note(7, "got", web.TOPIC, "web-0.1:77", 0, 0))


def swap_two_of_a_key(run: Run) -> None:
    first, second, *rest = run.stored["orders"]
    run.stored["orders"] = [first._replace(value=second.value), second._replace(value=first.value), *rest]
    run.stored["copies"] = [*run.stored["orders"]]


def never_show_one_to_the_group(run: Run) -> None:
    run.notes["readers-1.1"] = [Note(4, "saw", "orders", "readers-1.1", 4, 4, "0")]


def show_one_again_without_a_fault(run: Run) -> None:
    run.notes["readers-1.1"].append(Note(9, "saw", "orders", "readers-1.1", 2, 2, "0"))


def forget_a_copy(run: Run) -> None:
    del run.stored["copies"][2]


def copy_one_twice(run: Run) -> None:
    run.stored["copies"].append(run.stored["copies"][2])


def never_settle_one(run: Run) -> None:
    run.entries = [entry for entry in run.entries if not (entry.group == "sync" and entry.what.endswith("-ack"))]


def lose_a_dead_letter(run: Run) -> None:
    del run.stored[LETTERS][0]


def write_a_dead_letter_twice(run: Run) -> None:
    run.stored[LETTERS].append(run.stored[LETTERS][0])


def deliver_again_what_was_acked_on_disk(run: Run) -> None:
    run.faults.append(Happened("kill broker", "", "", 10.1, 12.0))  # which is no excuse for a group that syncs
    run.entries.append(diary(20, "sync", "got", 0, "jobs-0.1:0:ack:0"))


def deliver_again_for_no_reason(run: Run) -> None:
    run.entries.append(diary(20, "keyed", "got", 0, "jobs-0.1:0:ack:0"))


def hand_out_a_key_too_early(run: Run) -> None:
    run.entries = [
        entry._replace(at_s=9.0) if (entry.group, entry.what, entry.place) == ("keyed", "got", (0, 2)) else entry
        for entry in run.entries
    ]


def deliver_before_its_time(run: Run) -> None:
    value = "later-0.1:0:ack:5000"
    run.notes["later-0.1"] = [Note(1, what, JOBS, value, 0, 0) for what in ("sent", "sure")]
    run.stored[JOBS].append(Stored(0, 3, "l1", value, 4999))
    for group in ("sync", "keyed"):
        run.entries += [diary(20 + at, group, what, 3, value) for at, what in enumerate(("got", "try-ack", "done-ack"))]


def lease_again_what_was_acked(run: Run) -> None:
    run.notes["pages-0.1"].append(Note(9, "got", web.TOPIC, "web-0.1:0", 0, 0))


def receive_qos_2_twice(run: Run) -> None:
    run.faults.append(Happened("kill broker", "", "", 0, 100))  # which is no excuse
    run.notes["mqtt-r2"].append(Note(9, "got2", "soak", "p2", 1, 1, "1"))


def store_qos_2_twice(run: Run) -> None:
    run.faults.append(Happened("kill broker", "", "", 0, 100))
    run.stored["soak.p2"].append(Stored(0, 3, "", "2"))


def receive_qos_1_twice_without_a_fault(run: Run) -> None:
    run.notes["mqtt-r1"].append(Note(90, "got1", "soak", "p1", 1, 1, "1"))


def lose_a_message_of_mqtt(run: Run) -> None:
    del run.notes["mqtt-r1"][1]


def forget_a_session(run: Run) -> None:
    run.notes["mqtt-r3"].append(Note(9, "forgotten", "soak", "r3", 0, 0))


BROKEN: dict[Callable[[Run], None], str] = {
    lose_a_stored_message: "lost",
    store_one_twice: "twice",
    store_what_nobody_sent: "made up",
    swap_two_of_a_key: "order",
    never_show_one_to_the_group: "lost",
    show_one_again_without_a_fault: "again",
    forget_a_copy: "lost",
    copy_one_twice: "twice",
    never_settle_one: "lost",
    lose_a_dead_letter: "lost",
    write_a_dead_letter_twice: "outcome",
    deliver_again_what_was_acked_on_disk: "again",
    deliver_again_for_no_reason: "again",
    hand_out_a_key_too_early: "order",
    deliver_before_its_time: "early",
    lease_again_what_was_acked: "again",
    receive_qos_2_twice: "twice",
    store_qos_2_twice: "twice",
    receive_qos_1_twice_without_a_fault: "again",
    lose_a_message_of_mqtt: "lost",
    forget_a_session: "lost",
}


def test_a_run_in_which_everything_is_right_has_no_findings(tmp_path: Path) -> None:
    verdict = Run.good().judge(tmp_path)
    assert verdict.findings == []
    assert verdict.counts["orders: confirmed"] == 4
    assert verdict.counts["orders: stored, and never confirmed"] == 1


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_the_audit_finds(damage: Callable[[Run], None], tmp_path: Path) -> None:
    run = Run.good()
    damage(run)
    assert BROKEN[damage] in {finding.rule for finding in run.judge(tmp_path).findings}


def test_a_repetition_after_a_fault_is_explained_by_it(tmp_path: Path) -> None:
    run = Run.good()
    run.faults.append(Happened("kill consumer", f"{streams.GROUP}-1", "", 5, 6))
    show_one_again_without_a_fault(run)
    verdict = run.judge(tmp_path)
    assert verdict.findings == []
    assert verdict.explained == {("readers: read again", "kill consumer"): 1}


def test_a_member_that_the_broker_gave_up_on_explains_what_its_successor_reads_again(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    moment = datetime.fromtimestamp(time.time() - time.monotonic() + 5, UTC).isoformat()
    entry = {"time": moment, "event": "member removed", "group": streams.GROUP, "reason": "no heartbeat"}
    log.write_text(f"{json.dumps({'event': 'mode'})}\n{json.dumps(entry)}\n")
    run = Run.good()
    run.faults += read_removals(log)
    show_one_again_without_a_fault(run)
    assert run.judge(tmp_path).findings == []


def test_a_fault_of_somebody_else_explains_nothing(tmp_path: Path) -> None:
    run = Run.good()
    run.faults.append(Happened("kill consumer", "screens-0", "", 5, 6))
    run.faults.append(Happened("cut connections", "mqtt", "", 5, 6))
    show_one_again_without_a_fault(run)
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_an_ack_that_was_not_on_disk_yet_may_be_forgotten_by_a_kill(tmp_path: Path) -> None:
    run = Run.good()
    run.faults.append(Happened("kill broker", "", "", 10.3, 12.0))
    deliver_again_for_no_reason(run)
    verdict = run.judge(tmp_path)
    assert verdict.findings == []
    assert ("jobs: an ack that was not on disk yet", "kill broker") in verdict.explained


def hand_out_late(run: Run, granted_s: float, *, failures: int = 0) -> None:
    """`keyed` has a message acked by one consumer, tried at 10.1 and confirmed at 10.2; then another one gets it."""
    value = "jobs-0.1:0:ack:0"
    run.grants["other"] = granted_s
    run.faults.append(Happened("cut connections", "native", "", 9.9, 9.9))
    run.entries.append(diary(10.3, "keyed", "got", 0, value, failures, "other"))


def test_what_the_broker_granted_before_the_ack_may_be_handed_out_late(tmp_path: Path) -> None:
    """Found by seed 860332: it lay with a consumer whose connection was cut, and which was short of processor time."""
    run = Run.good()
    hand_out_late(run, 9.8)
    verdict = run.judge(tmp_path)
    assert verdict.findings == []
    assert verdict.explained == {("jobs: handed out late", "cut connections"): 1}


@pytest.mark.parametrize("granted_s", [10.15, 10.25])
def test_what_the_broker_granted_after_the_ack_was_sent_is_found_whatever_was_cut(
    tmp_path: Path, granted_s: float
) -> None:
    run = Run.good()
    hand_out_late(run, granted_s)
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_what_the_broker_does_not_account_for_is_found(tmp_path: Path) -> None:
    run = Run.good()
    hand_out_late(run, 9.8)
    run.grants.clear()
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_two_consumers_with_one_message_are_found_if_nothing_was_cut(tmp_path: Path) -> None:
    run = Run.good()
    hand_out_late(run, 9.8)
    run.faults.clear()
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_one_that_is_handed_out_late_is_no_excuse_for_the_next(tmp_path: Path) -> None:
    run = Run.good()
    hand_out_late(run, 9.8)
    run.grants["later"] = 10.35
    run.entries.append(diary(10.4, "keyed", "got", 0, "jobs-0.1:0:ack:0", 0, "later"))
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_to_ack_again_what_was_acked_does_not_move_its_end(tmp_path: Path) -> None:
    """The broker had granted the last one after the first ack, and before the second, which was a success as well."""
    run = Run.good()
    hand_out_late(run, 9.8)
    value = "jobs-0.1:0:ack:0"
    run.entries += [
        diary(10.4, "keyed", "try-ack", 0, value, 0, "other"),
        diary(10.5, "keyed", "done-ack", 0, value, 0, "other"),
    ]
    run.grants["later"] = 10.35
    run.entries.append(diary(10.6, "keyed", "got", 0, value, 0, "later"))
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]


def test_what_is_handed_out_late_has_not_heard_of_failures_since(tmp_path: Path) -> None:
    """Found by seed 20261118.  The broker remembers them: the next delivery has them."""
    run = Run.good()
    value = "jobs-0.1:0:ack:0"
    run.entries = [entry for entry in run.entries if (entry.group, entry.place) != ("keyed", (0, 0))]
    told = [("got", 0, "a"), ("try-nack", 0, "a"), ("retried-nack", 0, "a"), ("got", 0, "other")]
    told += [("got", 1, "b"), ("try-ack", 1, "b"), ("done-ack", 1, "b")]
    run.entries += [
        diary(10 + at / 10, "keyed", what, 0, value, failures, lease) for at, (what, failures, lease) in enumerate(told)
    ]
    run.entries.sort(key=lambda entry: entry.at_s)
    run.faults.append(Happened("cut connections", "native", "", 9.9, 9.9))
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["again"]
    run.grants["other"] = 9.8
    verdict = run.judge(tmp_path)
    assert verdict.findings == []
    assert verdict.explained == {("jobs: handed out late", "cut connections"): 1}


def test_grants_are_read_as_the_broker_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "grants"
    assert read_grants(path) == {}
    path.write_text("1.5\taa\n2.5\tbb\n3.5\taa\n4.5\tb")  # killed in the middle of a line
    assert read_grants(path) == {"aa": 3.5, "bb": 2.5}


def test_the_next_of_a_key_may_come_when_the_one_before_it_died_in_silence(tmp_path: Path) -> None:
    """Its consumer was stopped: nobody but its dead letter knows that it came to an end."""
    run = Run.good()
    run.entries = [entry for entry in run.entries if not (entry.group == "keyed" and entry.what.endswith("-reject"))]
    assert "order" in {finding.rule for finding in run.judge(tmp_path).findings}
    for letter in run.stored[LETTERS]:
        letter.headers["millstream-dead-attempts"] = '[{"kind":"nack"},{"kind":"timeout"}]'
    assert "order" not in {finding.rule for finding in run.judge(tmp_path).findings}


def test_the_end_of_a_message_that_was_nacked_last_is_known(tmp_path: Path) -> None:
    """An answer that is under way for long says when it was heard, and not when the next of its key may come."""
    run = Run.good()
    for letter in run.stored[LETTERS]:
        letter.headers["millstream-dead-error"] = "no answer within 8s"  # of an earlier attempt
        letter.headers["millstream-dead-attempts"] = '[{"kind":"timeout"},{"kind":"nack"}]'
    assert timed_out("keyed", run.stored[LETTERS]) == set()
    assert "order" not in {finding.rule for finding in run.judge(tmp_path).findings}


def test_what_was_due_before_the_clock_was_set_back_is_not_early(tmp_path: Path) -> None:
    run = Run.good()
    deliver_before_its_time(run)
    run.clocks.append(SetClock(5001, 0, -1000))  # stored at 4999 by the clock that was set back, which is 5999
    assert run.judge(tmp_path).findings == []
    run.clocks[0] = SetClock(4500, 0, -1000)  # it was not due yet
    assert [finding.rule for finding in run.judge(tmp_path).findings] == ["early"]


def lives(*figures: tuple[float, float]) -> list[Sample]:
    """Lives of five minutes whose memory goes from one figure to another."""
    return [
        Sample(at, life, at, first + (last - first) * at / 300, 0, 0, 0, 0)
        for life, (first, last) in enumerate(figures)
        for at in range(300)
    ]


def test_memory_that_grows_within_a_life_is_found() -> None:
    assert is_flat(compare_memory(lives((80, 84), (80, 82))))
    assert not is_flat(compare_memory(lives((80, 84), (80, 140))))


def test_memory_that_grows_from_life_to_life_is_found() -> None:
    assert not is_flat(compare_memory(lives((80, 81), (110, 111), (140, 141))))

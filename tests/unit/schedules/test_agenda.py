"""What is pending: an agenda against a dictionary, step by step, and across restarts."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.ids import OFFSET_BITS
from millstream.schedules.agenda import Agenda, settled_fact
from tests.examples import examples


def row(due_ms: int, offset: int) -> int:
    return due_ms << OFFSET_BITS | offset


class AgendaMachine(RuleBasedStateMachine):
    """Messages are scheduled, moved, cancelled, fired and lost, the clock goes on, and the broker restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.agenda = Agenda()
        self.facts: list[object] = []
        self.stored: list[int] = []  # the due time that each message carries
        self.due: dict[int, int] = {}  # of what is pending
        self.states: dict[int, str] = {}
        self.firing: list[int] = []
        self.now_ms = 0

    def record(self, fact: object) -> None:
        self.facts.append(fact)
        self.agenda.apply(fact)

    @rule(delays=st.lists(st.integers(0, 3_000), min_size=1, max_size=5))
    def publish(self, delays: list[int]) -> None:
        for delay_ms in delays:
            offset = len(self.stored)
            self.stored.append(self.now_ms + delay_ms)
            self.due[offset] = self.stored[offset]
            self.states[offset] = "pending"
            self.agenda.timers.add([row(self.stored[offset], offset)])
        self.agenda.extend(len(self.stored))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.due.keys() - set(self.firing))))

    @precondition(lambda self: self.due.keys() - set(self.firing))
    @rule(data=st.data(), delay_ms=st.integers(0, 3_000))
    def move(self, data: st.DataObject, delay_ms: int) -> None:
        offset = self.pick(data)
        self.due[offset] = self.now_ms + delay_ms
        self.record(("moved", offset, self.due[offset]))

    @precondition(lambda self: self.due.keys() - set(self.firing))
    @rule(data=st.data(), kind=st.sampled_from(["cancelled", "expired", "lost"]))
    def settle(self, data: st.DataObject, kind: str) -> None:
        offset = self.pick(data)
        del self.due[offset]
        self.states[offset] = kind
        self.record(settled_fact(kind, [offset]))

    @rule(step_ms=st.integers(0, 1_500), limit=st.integers(1, 4))
    def time_goes_on(self, step_ms: int, limit: int) -> None:
        self.now_ms += step_ms
        waiting = sorted((due_ms, offset) for offset, due_ms in self.due.items() if offset not in self.firing)
        expected = [row(due_ms, offset) for due_ms, offset in waiting if due_ms <= self.now_ms][:limit]
        assert self.agenda.take_due(self.now_ms, limit) == expected, "never early, in order, each once"
        self.firing += [it & ((1 << OFFSET_BITS) - 1) for it in expected]

    @precondition(lambda self: self.firing)
    @rule(count=st.integers(1, 4))
    def fire(self, count: int) -> None:
        fired, self.firing = self.firing[:count], self.firing[count:]
        for offset in fired:
            del self.due[offset]
            self.states[offset] = "fired"
        self.record(settled_fact("fired", fired))

    @precondition(lambda self: self.firing)
    @rule()
    def fail_to_fire(self) -> None:
        self.agenda.give_back([row(self.due[offset], offset) for offset in self.firing])
        self.firing = []

    @rule(snapshot=st.booleans())
    def restart(self, snapshot: bool) -> None:
        if snapshot:
            self.facts = [self.agenda.snapshot()]
        start = self.agenda.start
        self.agenda = Agenda()
        for fact in self.facts:
            self.agenda.apply(fact)
        self.agenda.trim(start)
        self.agenda.extend(len(self.stored))
        rows = [row(due_ms, offset) for offset, due_ms in enumerate(self.stored)]
        self.agenda.timers.add(self.agenda.unsettled(rows))
        self.firing = []

    @rule()
    def retention(self) -> None:
        first = self.agenda.first_pending()
        assert first == min(self.due, default=len(self.stored))
        self.agenda.trim(first)
        for offset in range(first):
            self.states[offset] = "gone"

    @invariant()
    def every_message_is_in_one_state(self) -> None:
        assert self.agenda.pending == len(self.due)
        for offset, state in self.states.items():
            expected = "firing" if offset in self.firing else state
            assert self.agenda.state(offset) == expected
        assert self.agenda.state(len(self.stored)) == "unknown"

    @invariant()
    def what_is_uncovered_is_what_is_pending(self) -> None:
        ranges = self.agenda.uncovered([])
        assert [offset for first, end in ranges for offset in range(first, end)] == sorted(self.due)
        half = len(self.stored) // 2
        beyond = self.agenda.uncovered([(0, half)])
        assert [offset for first, end in beyond for offset in range(first, end)] == [
            offset for offset in sorted(self.due) if offset >= half
        ]


TestAgenda = AgendaMachine.TestCase
TestAgenda.settings = examples(25, stateful_step_count=40)


def test_a_message_that_is_being_cancelled_is_not_delivered_meanwhile() -> None:
    agenda = Agenda()
    agenda.extend(2)
    agenda.timers.add([row(10, 0), row(10, 1)])
    agenda.hold([0])
    assert agenda.take_due(20, 10) == [row(10, 1)]
    agenda.release([0])  # the disk refused: it is still scheduled
    assert agenda.take_due(20, 10) == [row(10, 0)]


def test_a_message_that_is_moved_and_cancelled_at_once_waits_for_both() -> None:
    """Delivered behind the first of them, it would be delivered although the second is answered with success."""
    agenda = Agenda()
    agenda.extend(1)
    agenda.timers.add([row(10, 0)])
    agenda.hold([0])
    agenda.hold([0])
    agenda.release([0])
    assert agenda.take_due(20, 10) == []
    agenda.apply(settled_fact("cancelled", [0]))
    agenda.release([0])
    assert agenda.take_due(20, 10) == []
    assert agenda.state(0) == "cancelled"


def test_ten_million_settled_messages_in_any_order_fit_into_two_megabytes() -> None:
    agenda = Agenda()
    agenda.extend(10_000_000)
    agenda.apply(settled_fact("fired", range(0, 10_000_000, 2)))
    kind, settled, *_ = agenda.snapshot()
    assert kind == "agenda"
    assert len(settled) < 2_000_000
    assert agenda.pending == 5_000_000

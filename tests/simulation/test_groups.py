"""Stream groups under trouble: virtual time, one seed per run, every message late, lost or out of order.

A run has two parts.  In the first, members join, leave, stall, die, restart, dawdle with giving partitions
back, and the broker crashes, sometimes between deciding and recording.  After every event the safety rules
are checked.  In the second part the trouble stops, and the group has to settle: every partition read by
exactly one member, evenly.  A failing run names its seed; `python tests/simulation/test_groups.py SEED`
repeats it alone.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest

from millstream.errors import MemberFenced, MillstreamError, StaleGeneration, UnknownMember
from millstream.groups.core import (
    decide_expire,
    decide_heartbeat,
    decide_join,
    decide_lapse,
    decide_leave,
    decide_refresh,
    new_group,
    validate_commit,
)
from millstream.groups.documents import from_document, to_document
from millstream.groups.offsets import OffsetTable, decide_commit
from millstream.groups.ownership import check_exclusive, group_phase
from millstream.groups.records import (
    GroupState,
    Heartbeat,
    Join,
    Leave,
    Phase,
    RebalanceProtocol,
    Reply,
    Strategy,
    TopicPartition,
    Transition,
)
from millstream.groups.sessions import Sessions
from tests.examples import seeds

TROUBLE_MS = 240_000
CALM_MS = 120_000
SESSION_MS = 10_000
REBALANCE_MS = 20_000
HEARTBEAT_MS = 1_000


@dataclass
class Consumer:
    """A client that keeps the rules of the protocol, however slowly."""

    name: str
    instance_id: str | None
    topics: tuple[str, ...]
    member_id: str = ""
    life: int = 0  # answers to an earlier life are thrown away, as they would be with its connection
    generation: int = 0
    held: set[TopicPartition] = field(default_factory=set)
    dropping: set[TopicPartition] = field(default_factory=set)
    logs: dict[TopicPartition, int] = field(default_factory=dict)  # which log it began to read, of several of one name
    running: bool = True
    stalled_until_ms: int = 0
    drop_ms: int = 0


class World:
    """The broker, its members and the network between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.protocol = self.random.choice(list(RebalanceProtocol))
        self.strategy = self.random.choice(list(Strategy))
        self.equal_topics = self.random.random() < 0.7
        self.now_ms = 0
        self.calm = False
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.sequence = count()
        self.topics = {"orders.eu": 5, "orders.us": 3, "audit": 4}
        self.state = new_group("workers", now_ms=0)
        self.recorded = json.dumps(to_document(self.state))
        self.sessions = Sessions()
        self.offsets = OffsetTable("workers")
        self.boot = 0
        self.generation_seen = 0
        self.consumers: list[Consumer] = []
        self.logs: Counter[str] = Counter()  # how often each topic was made anew
        self.last_commit: dict[TopicPartition, tuple[str, int]] = {}
        self.commits_accepted = 0
        self.commits_refused = 0

    # The broker: decide, record, make visible.

    def apply(self, transition: Transition[Reply] | Transition[None]) -> bool:
        """Record a decision; False when the broker crashed first and nobody may ever learn of it."""
        if transition.state is not self.state:
            assert transition.state != self.state, "an equal state must be the same object"
            if not self.calm and self.random.random() < 0.01:
                self.restart()
                return False
            self.recorded = json.dumps(to_document(transition.state))
            known, self.state = self.state.members.keys() | transition.state.members.keys(), transition.state
            self.sessions.follow(self.state, now_ms=self.now_ms)
            assert transition.nudged <= known
        for member_id in sorted(transition.nudged):  # a set has another order in each process
            for consumer in self.consumers:
                if consumer.member_id == member_id:
                    self.later(self.delay(), partial(self.send_heartbeat, consumer))
        return True

    def restart(self) -> None:
        """Only what was recorded comes back; every connection is gone."""
        self.boot += 1
        self.state = from_document(json.loads(self.recorded))
        assert json.dumps(to_document(self.state)) == self.recorded
        self.sessions = Sessions()
        self.sessions.follow(self.state, now_ms=self.now_ms)
        assert not self.sessions.late(self.state, now_ms=self.now_ms)
        # Topics may have changed in the moment of the crash, so the broker looks at them before it serves anybody.
        followed = decide_refresh(self.state, topics=self.topics, now_ms=self.now_ms)
        self.recorded = json.dumps(to_document(followed.state))
        self.state = followed.state
        self.sessions.follow(self.state, now_ms=self.now_ms)

    def tick(self) -> None:
        late = self.sessions.late(self.state, now_ms=self.now_ms)
        if late:
            self.apply(decide_expire(self.state, late, topics=self.topics, now_ms=self.now_ms))
        self.later(500, self.tick)

    # The network.

    def delay(self) -> int:
        return self.random.choice((0, 1, 5, 5, 20, 300)) if not self.calm else 5

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        heappush(self.events, (self.now_ms + delay_ms, next(self.sequence), action))

    def request(self, consumer: Consumer, decide: Callable[[], Transition[Reply]]) -> None:
        """Send a request of a member; the answer comes late, out of order, or not at all."""
        life, boot = consumer.life, self.boot

        def answer(reply: Reply | MillstreamError) -> None:
            if consumer.running and consumer.life == life and not self.stalled(consumer):
                self.receive(consumer, reply)

        def serve() -> None:
            if boot != self.boot or (not self.calm and self.random.random() < 0.05):
                return
            try:
                transition = decide()
            except (UnknownMember, MemberFenced) as error:  # fenced by an earlier life of the same member
                outcome: Reply | MillstreamError = error
            else:
                if not self.apply(transition):
                    return
                outcome = transition.reply
            self.later(self.delay(), lambda: answer(outcome))

        self.later(self.delay(), serve)

    # The members.

    def stalled(self, consumer: Consumer) -> bool:
        return consumer.stalled_until_ms > self.now_ms

    def send_join(self, consumer: Consumer) -> None:
        if not consumer.running:
            return
        if not consumer.member_id or self.random.random() < 0.8:
            consumer.member_id = f"{consumer.name}-{self.random.getrandbits(24):06x}"
        consumer.life += 1
        consumer.generation, consumer.held, consumer.dropping = 0, set(), set()
        self.request_join(consumer, renew=False)

    def request_join(self, consumer: Consumer, *, renew: bool) -> None:
        member_id = consumer.member_id
        command = Join(
            member_id,
            consumer.name,
            "10.0.0.1:5000",
            consumer.topics,
            consumer.instance_id,
            SESSION_MS,
            REBALANCE_MS,
            self.strategy,
            self.protocol,
            renew,
        )

        def decide() -> Transition[Reply]:
            transition = decide_join(self.state, command, topics=self.topics, now_ms=self.now_ms)
            self.sessions.touch(member_id, now_ms=self.now_ms)
            return transition

        self.request(consumer, decide)

    def send_heartbeat(self, consumer: Consumer) -> None:
        if not consumer.running or self.stalled(consumer) or not consumer.member_id:
            return
        command = Heartbeat(consumer.member_id, consumer.generation, frozenset(consumer.held))

        def decide() -> Transition[Reply]:
            transition = decide_heartbeat(self.state, command)
            self.sessions.touch(command.member_id, now_ms=self.now_ms)
            return transition

        self.request(consumer, decide)

    def receive(self, consumer: Consumer, reply: Reply | MillstreamError) -> None:
        if isinstance(reply, MillstreamError):
            self.send_join(consumer)
            return
        if reply.generation < consumer.generation:
            return
        consumer.generation = reply.generation
        for partition in reply.assigned - consumer.held:
            consumer.logs[partition] = self.logs[partition.topic]
        consumer.held |= reply.assigned
        consumer.dropping -= reply.assigned
        leaving = consumer.held - reply.assigned - consumer.dropping
        if leaving:
            consumer.dropping |= leaving
            life = consumer.life
            self.later(consumer.drop_ms, lambda: self.finish_dropping(consumer, leaving, life))

    def finish_dropping(self, consumer: Consumer, leaving: set[TopicPartition], life: int) -> None:
        if consumer.life == life:
            consumer.held -= leaving & consumer.dropping
            consumer.dropping -= leaving
            self.send_heartbeat(consumer)

    def live(self, consumer: Consumer) -> None:
        """One beat of a member's life: heartbeat, commit, or find out that nobody answered the join."""
        if consumer.running:
            if not self.stalled(consumer):
                self.send_heartbeat(consumer)
                self.send_commit(consumer)
            self.later(HEARTBEAT_MS + self.random.randrange(100), lambda: self.live(consumer))

    def send_commit(self, consumer: Consumer) -> None:
        """Commits may be under way for long: their sender can lose the partition, and even get it back."""
        if consumer.held:
            partition = self.random.choice(sorted(consumer.held))
            sender, generation, sent_at_ms = consumer.member_id, consumer.generation, self.now_ms
            log = consumer.logs[partition]
            delay_ms = self.random.choice((0, 5, 500, 5_000, 20_000))
            self.later(delay_ms, lambda: self.take_commit(sender, generation, partition, log, sent_at_ms))

    def take_commit(self, sender: str, generation: int, partition: TopicPartition, log: int, sent_at_ms: int) -> None:
        try:
            validate_commit(self.state, member_id=sender, generation=generation, partition=partition)
        except (UnknownMember, StaleGeneration):
            self.commits_refused += 1
            return
        owner = [m.member_id for m in self.state.members.values() if partition in m.owned]
        assert owner == [sender], f"commit for {partition} taken from {sender}, the owner is {owner}"
        assert log == self.logs[partition.topic], f"{sender} committed an offset of an earlier log of {partition}"
        last, last_at_ms = self.last_commit.get(partition, (sender, 0))
        assert last == sender or last_at_ms <= sent_at_ms, f"{sender} undid a commit of {last} in {partition}"
        self.last_commit[partition] = (sender, self.now_ms)
        self.commits_accepted += 1
        self.offsets.replay(partition, decide_commit(self.commits_accepted, now_ms=self.now_ms))

    # Trouble.

    def start_consumer(self) -> None:
        number = len(self.consumers)
        static = f"seat-{number}" if self.random.random() < 0.4 else None
        topics = ("orders.*", "audit") if self.equal_topics or number % 2 else ("orders.#",)
        consumer = Consumer(f"c{number}", static, topics)
        consumer.drop_ms = self.random.choice((0, 10, 500, 3_000))
        self.consumers.append(consumer)
        self.send_join(consumer)
        self.live(consumer)

    def trouble(self) -> None:
        if self.calm:
            return
        running = [consumer for consumer in self.consumers if consumer.running]
        stopped = [consumer for consumer in self.consumers if not consumer.running]
        victim = self.random.choice(running) if running else None
        match self.random.randrange(12):
            case 0 | 1 if len(self.consumers) < 9:
                self.start_consumer()
            case 2 if victim:
                self.leave(victim)
            case 3 if victim:
                stall_ms = self.random.choice((2_000, SESSION_MS, 3 * SESSION_MS))
                victim.stalled_until_ms = self.now_ms + stall_ms
            case 4 if victim:
                victim.running = False  # dies without a word; its partitions wait for the session to end
            case 5 if victim:
                victim.drop_ms = self.random.choice((0, 500, 2 * REBALANCE_MS))
            case 6 if stopped:
                self.start_again(self.random.choice(stopped))
            case 7 if victim:
                self.send_join(victim)  # restarts at once: static ones take over their own seat
            case 8:
                self.restart()
            case 9:
                self.change_topics()
            case 10 if victim:
                self.request_join(victim, renew=True)
            case 11:
                self.make_anew()
            case _:
                pass
        self.later(self.random.randrange(200, 8_000), self.trouble)

    def leave(self, consumer: Consumer) -> None:
        consumer.running = False
        if consumer.member_id in self.state.members:
            command = Leave(consumer.member_id, permanent=self.random.random() < 0.3)
            self.apply(decide_leave(self.state, command, topics=self.topics, now_ms=self.now_ms))

    def start_again(self, consumer: Consumer) -> None:
        consumer.running, consumer.stalled_until_ms = True, 0
        self.send_join(consumer)
        self.live(consumer)

    def change_topics(self) -> None:
        name = self.random.choice(("orders.asia", "orders.us", "audit"))
        if name in self.topics and self.random.random() < 0.3:
            del self.topics[name]
        else:
            self.topics[name] = self.topics.get(name, 0) + self.random.randrange(1, 4)
        self.apply(decide_refresh(self.state, topics=self.topics, now_ms=self.now_ms))

    def make_anew(self) -> None:
        """Delete a topic with its offsets, and make another of its name; perhaps before anybody hears of it."""
        name = self.random.choice(sorted(self.topics))
        number = self.topics.pop(name)
        gone = [TopicPartition(name, place) for place in range(number)]
        while not self.apply(decide_lapse(self.state, gone, topics=self.topics, now_ms=self.now_ms)):
            pass  # a deletion that a crash has cut short is finished at the next start
        self.logs[name] += 1

        def make() -> None:
            self.topics.setdefault(name, number)
            self.apply(decide_refresh(self.state, topics=self.topics, now_ms=self.now_ms))

        self.later(self.random.choice((0, 50, 5_000)), make)

    # The rules.

    def check_safety(self) -> None:
        check_exclusive(self.state)
        assert self.state.generation >= self.generation_seen, "the generation went back"
        self.generation_seen = self.state.generation
        readers: dict[str, set[TopicPartition]] = {}
        for consumer in self.consumers:
            # What members really do, not only what the broker believes: held means reading.  A stalled member
            # that was removed may still hold, but it is fenced and so it does not count.
            member = self.state.members.get(consumer.member_id)
            if member is not None and consumer.running and consumer.held:
                stolen = consumer.held - member.owned.keys()
                assert not stolen, f"{consumer.member_id} reads {stolen} without owning it"
                readers[consumer.member_id] = readers.get(consumer.member_id, set()) | consumer.held
        read: set[TopicPartition] = set()
        for member_id, held in readers.items():
            assert read.isdisjoint(held), f"{read & held} are read by {member_id} and by another"
            read |= held

    def check_liveness(self) -> None:
        running = {c.member_id: c for c in self.consumers if c.running}
        assert self.state.members.keys() == running.keys(), "a member is missing or a dead one was kept"
        assert group_phase(self.state) is Phase.STABLE
        for member_id, consumer in running.items():
            assert consumer.held == set(self.state.members[member_id].owned), f"{member_id} is out of step"
            assert consumer.generation == self.state.generation, f"{member_id} has not heard of the newest generation"
        audited = any("audit" in consumer.topics for consumer in running.values())
        readable = [topic for topic in self.topics if topic != "audit" or audited]
        expected = {TopicPartition(t, n) for t in readable for n in range(self.topics[t])}
        assert {p for c in running.values() for p in c.held} == expected
        assert sum(len(c.held) for c in running.values()) == len(expected), "a partition has two readers"
        loads = [len(c.held) for c in running.values()]
        if self.equal_topics and self.strategy is not Strategy.RANGE:
            assert max(loads) - min(loads) <= 1, f"uneven: {loads}"

    # The run.

    def run_until(self, end_ms: int) -> None:
        while self.events and self.events[0][0] <= end_ms:
            self.now_ms, _, action = heappop(self.events)
            action()
            self.check_safety()
        self.now_ms = end_ms

    def calm_down(self) -> None:
        self.calm = True
        if not any(consumer.running for consumer in self.consumers):
            self.start_consumer()
        for consumer in self.consumers:
            consumer.stalled_until_ms = 0
            consumer.drop_ms = min(consumer.drop_ms, 500)
            if consumer.running and consumer.member_id not in self.state.members:
                self.send_join(consumer)


def simulate(seed: int) -> World:
    world = World(seed)
    for _ in range(world.random.randrange(1, 4)):
        world.start_consumer()
    world.tick()
    world.trouble()
    world.run_until(TROUBLE_MS)
    world.calm_down()
    world.run_until(TROUBLE_MS + CALM_MS)
    world.check_liveness()
    return world


#: What a seed came to, for those who only look at it.
simulated = cache(simulate)


SEEDS_PER_TEST = 10


@pytest.mark.parametrize("round_of_seeds", seeds(1, 6))
def test_members_never_share_a_partition_and_the_group_always_settles(round_of_seeds: int) -> None:
    first = round_of_seeds * SEEDS_PER_TEST
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            world = simulated(seed)
        except Exception as error:
            pytest.fail(f"{error!r}; repeat with: python tests/simulation/test_groups.py {seed}")
        assert world.commits_accepted > 0, f"seed {seed}: nobody ever committed"


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(7), simulate(7)
    assert first.recorded == second.recorded
    assert list(first.offsets) == list(second.offsets)


def test_the_simulation_reaches_what_it_is_meant_to_test() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    worlds = [simulated(seed) for seed in range(12)]
    assert {world.protocol for world in worlds} == set(RebalanceProtocol)
    assert {world.strategy for world in worlds} == set(Strategy)
    assert sum(world.commits_refused for world in worlds) > 10
    assert sum(world.boot for world in worlds) > 10
    assert sum(world.state.generation for world in worlds) > 100


def test_a_forgotten_generation_check_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the rule that only an informed member gives back; some seed must then catch two readers."""
    honest = decide_heartbeat

    def careless(state: GroupState, command: Heartbeat) -> Transition[Reply]:
        informed = Heartbeat(command.member_id, state.generation, command.owned)
        return honest(state, informed)

    monkeypatch.setitem(globals(), "decide_heartbeat", careless)
    with pytest.raises(AssertionError, match="read"):
        list(map(simulate, range(60)))


if __name__ == "__main__":
    simulate(int(sys.argv[1]))

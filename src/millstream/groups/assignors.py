"""Who reads which partition: three strategies as pure functions.

All take the members with the topics each has subscribed to, the number of partitions per topic, and who had
which partition before.  All return an entry for every member, hand out every partition that has a subscriber
exactly once, and give the same answer for the same question.  The order of `members` is the order of
precedence: when something cannot be split evenly, earlier members get more.

`range`        per topic, consecutive runs.  Members read the same partition numbers of topics with equal
               counts, which is what joining two topics by key needs.
`round_robin`  all partitions of all topics dealt out in turn.
`sticky`       as even as the subscriptions allow, and as little as possible changes hands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace
from itertools import chain

from millstream.groups.records import Strategy, TopicPartition

__all__ = ["Assignment", "Subscriptions", "assign", "assign_range", "assign_round_robin", "assign_sticky"]

Subscriptions = Mapping[str, Collection[str]]
Assignment = dict[str, frozenset[TopicPartition]]


def assign(
    strategy: Strategy,
    members: Subscriptions,
    partitions: Mapping[str, int],
    previous: Mapping[TopicPartition, str],
) -> Assignment:
    """The target assignment by the given strategy."""
    match strategy:
        case Strategy.RANGE:
            return assign_range(members, partitions)
        case Strategy.ROUND_ROBIN:
            return assign_round_robin(members, partitions)
        case Strategy.STICKY:
            return assign_sticky(members, partitions, previous)


def assign_range(members: Subscriptions, partitions: Mapping[str, int]) -> Assignment:
    """Per topic: an even split into runs; the first `partitions mod members` members get one more."""
    dealt: dict[str, list[TopicPartition]] = {member: [] for member in members}
    for topic, readers in _readers(members, partitions).items():
        share, extra = divmod(partitions[topic], len(readers))
        start = 0
        for place, member in enumerate(readers):
            end = start + share + (place < extra)
            dealt[member] += (TopicPartition(topic, number) for number in range(start, end))
            start = end
    return _frozen(dealt)


def assign_round_robin(members: Subscriptions, partitions: Mapping[str, int]) -> Assignment:
    """Every partition in turn to the next member around the circle that has subscribed to its topic."""
    dealt: dict[str, list[TopicPartition]] = {member: [] for member in members}
    circle = list(members)
    place = 0
    for topic, readers in _readers(members, partitions).items():
        subscribed = set(readers)
        for number in range(partitions[topic]):
            while circle[place % len(circle)] not in subscribed:
                place += 1
            dealt[circle[place % len(circle)]].append(TopicPartition(topic, number))
            place += 1
    return _frozen(dealt)


def assign_sticky(
    members: Subscriptions, partitions: Mapping[str, int], previous: Mapping[TopicPartition, str]
) -> Assignment:
    """Keep what can be kept, deal out the rest to whoever has least, then level what is still uneven.

    The result cannot be made more even: a partition is passed on, over several members if need be, as long as
    the one at the end of the chain has at least two fewer than the one at its start.  With equal
    subscriptions no even assignment keeps more partitions where they were.
    """
    balance = _Balance(members, partitions, previous)
    balance.place()
    while balance.level():
        pass
    return balance.assignment()


class _Hand:
    """The partitions of one topic that one member holds: those it had before, and those it was given now."""

    __slots__ = ("away", "home")

    def __init__(self) -> None:
        self.home: list[TopicPartition] = []
        self.away: list[TopicPartition] = []

    def pop(self) -> TopicPartition:
        # One that has already changed hands costs nothing to move again.
        return self.away.pop() if self.away else self.home.pop()


class _Balance:
    """The working state of the sticky strategy."""

    def __init__(
        self, members: Subscriptions, partitions: Mapping[str, int], previous: Mapping[TopicPartition, str]
    ) -> None:
        self._hands: dict[str, dict[str, _Hand]] = {member: {} for member in members}
        self._loads: dict[str, int] = dict.fromkeys(members, 0)
        self._order = {member: place for place, member in enumerate(members)}
        self._readers = _readers(members, partitions)
        self._previous = previous
        self._unplaced: list[TopicPartition] = []
        for topic, readers in self._readers.items():
            subscribed = set(readers)
            for number in range(partitions[topic]):
                partition = TopicPartition(topic, number)
                owner = previous.get(partition)
                if owner is not None and owner in subscribed:
                    self._give(partition, owner)
                else:
                    self._unplaced.append(partition)

    def assignment(self) -> Assignment:
        return {
            member: frozenset(chain.from_iterable(hand.home + hand.away for hand in hands.values()))
            for member, hands in self._hands.items()
        }

    def place(self) -> None:
        """Deal what nobody holds to the least loaded subscriber."""
        # Topics with few readers first: the partitions that have no choice must not find their only readers
        # full.
        self._unplaced.sort(key=lambda partition: (len(self._readers[partition.topic]), partition))
        heaps: dict[str, list[tuple[int, int, str]]] = {}
        for partition in self._unplaced:
            heap = heaps.get(partition.topic)
            if heap is None:
                heap = [self._rank(member) for member in self._readers[partition.topic]]
                heapify(heap)
                heaps[partition.topic] = heap
            # Loads only grow here, so an entry that is out of date is too low and comes up to be corrected.
            while heap[0] != self._rank(heap[0][2]):
                heapreplace(heap, self._rank(heap[0][2]))
            member = heap[0][2]
            self._give(partition, member)
            heapreplace(heap, self._rank(member))
        self._unplaced.clear()

    def level(self) -> bool:
        """Pass one partition down one chain; False when no chain makes the assignment more even."""
        least = min(self._loads.values(), default=0)
        # Once everything reachable from a member is known to be level with it, so is all that can be reached
        # from there, as members come in order of load.
        settled: set[str] = set()
        for source in sorted(self._loads, key=lambda member: (-self._loads[member], self._order[member])):
            if self._loads[source] < least + 2:
                return False
            if source not in settled and self._pass_on(source, settled):
                return True
        return False

    def _pass_on(self, source: str, settled: set[str]) -> bool:
        """Search breadth first for the shortest chain from `source` to a member with two partitions less."""
        enough = self._loads[source] - 2
        came_from: dict[str, tuple[str, str]] = {}  # member -> who passes it a partition, and of which topic
        topics_seen: set[str] = set()
        frontier, reached = [source], {source}
        while frontier:
            further: list[str] = []
            for giver in frontier:
                for topic in self._offered(giver, topics_seen):
                    topics_seen.add(topic)
                    for taker in self._readers[topic]:
                        if taker not in reached and taker not in settled:
                            reached.add(taker)
                            came_from[taker] = (giver, topic)
                            further.append(taker)
            if further:
                lightest = min(further, key=self._rank)
                if self._loads[lightest] <= enough:
                    self._shift(source, lightest, came_from)
                    return True
            frontier = further
        settled |= reached
        return False

    def _offered(self, giver: str, topics_seen: set[str]) -> list[str]:
        """Topics of which the giver can pass one on; first those where that moves nothing from its home."""
        hands = self._hands[giver]
        return sorted(hands.keys() - topics_seen, key=lambda topic: (not hands[topic].away, topic))

    def _shift(self, source: str, taker: str, came_from: Mapping[str, tuple[str, str]]) -> None:
        while taker != source:
            giver, topic = came_from[taker]
            self._give(self._take(topic, giver), taker)
            taker = giver

    def _rank(self, member: str) -> tuple[int, int, str]:
        return (self._loads[member], self._order[member], member)

    def _give(self, partition: TopicPartition, member: str) -> None:
        hand = self._hands[member].setdefault(partition.topic, _Hand())
        at_home = self._previous.get(partition) == member
        (hand.home if at_home else hand.away).append(partition)
        self._loads[member] += 1

    def _take(self, topic: str, member: str) -> TopicPartition:
        hand = self._hands[member][topic]
        partition = hand.pop()
        if not hand.home and not hand.away:
            del self._hands[member][topic]
        self._loads[member] -= 1
        return partition


def _readers(members: Subscriptions, partitions: Mapping[str, int]) -> dict[str, list[str]]:
    """Topic -> its subscribers in order of precedence; only topics that exist and have any, sorted."""
    readers: dict[str, list[str]] = {}
    for member, topics in members.items():
        for topic in set(topics):
            if topic in partitions:
                readers.setdefault(topic, []).append(member)
    return dict(sorted(readers.items()))


def _frozen(dealt: Mapping[str, Collection[TopicPartition]]) -> Assignment:
    return {member: frozenset(held) for member, held in dealt.items()}

"""The values of stream groups: what a group is, what can be asked of it, what it answers.

Everything here is immutable.  `GroupState` is the durable part of a group; what a restart may forget (who was
heard when) lives in `sessions.py`.  Times are UTC milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = [
    "FORMER_MAX",
    "FORMER_PLACES_MAX",
    "MEMBERS_MAX",
    "MEMBER_LETTERS_MAX",
    "REBALANCE_MS",
    "SESSION_MS",
    "SESSION_MS_MAX",
    "SESSION_MS_MIN",
    "SUBSCRIPTIONS_MAX",
    "GroupState",
    "Heartbeat",
    "Join",
    "Leave",
    "Member",
    "Phase",
    "RebalanceProtocol",
    "Reply",
    "Strategy",
    "TopicPartition",
    "Transition",
    "name_member",
]

#: A group is one document in the state log, rewritten when it changes; a thousand members keep it well below
#: 1 MiB.
MEMBERS_MAX: Final = 1_000
#: Ids of members and instances are in that document: a client's id and what makes it unique fit.
MEMBER_LETTERS_MAX: Final = 512
#: Members that a group remembers to have had the place of a static one before, and of how many places.
FORMER_MAX: Final = 4
FORMER_PLACES_MAX: Final = 250
#: One subscription is matched against every topic; more than this is a pattern that was spelled out.
SUBSCRIPTIONS_MAX: Final = 1_000
#: Below a second an ordinary pause of a garbage collector or a disk would cost the member its partitions.
SESSION_MS_MIN: Final = 1_000
#: Beyond an hour a dead member blocks its partitions for longer than anybody waits.
SESSION_MS_MAX: Final = 3_600_000
#: Ten missed heartbeats at the usual 3 s.
SESSION_MS: Final = 30_000
#: How long a member may take to finish what it has in hand before it must give a partition back.
REBALANCE_MS: Final = 120_000


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Strategy(StrEnum):
    """How partitions are dealt to members."""

    RANGE = "range"
    ROUND_ROBIN = "round_robin"
    STICKY = "sticky"


class RebalanceProtocol(StrEnum):
    """What members stop doing while partitions move: only the moved ones, or everything."""

    COOPERATIVE = "cooperative"
    EAGER = "eager"


class Phase(StrEnum):
    EMPTY = "empty"
    REBALANCING = "rebalancing"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group, as the broker sees it."""

    member_id: str
    client_id: str
    address: str
    topics: tuple[str, ...]  # names and patterns, as subscribed
    instance_id: str | None = None
    session_ms: int = SESSION_MS
    rebalance_ms: int = REBALANCE_MS
    joined_at_ms: int = 0
    target: frozenset[TopicPartition] = frozenset()
    #: Partitions granted and not given back, each with the generation it was granted in.  That number is what
    #: fences a commit from an earlier time the same member held the same partition.
    owned: Mapping[TopicPartition, int] = field(default_factory=dict)
    #: Owned partitions whose log is another one since they were granted.  What the member knows of them is wrong, so it
    #: lets go of them, and whoever gets them next, it or another, begins with what is committed.
    lapsed: frozenset[TopicPartition] = frozenset()
    #: The last generation that took something away.  A heartbeat which acknowledges an older one was sent by
    #: a member that may not know yet, so what it does not list is not taken as given back.
    revoke_generation: int = 0

    @property
    def seat(self) -> tuple[str, str]:
        """Where the member sorts in its group; a static member keeps its place across restarts."""
        return (self.instance_id or self.member_id, self.member_id)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A stream group.  `generation` numbers the target assignments and never goes back."""

    name: str
    strategy: Strategy = Strategy.STICKY
    protocol: RebalanceProtocol = RebalanceProtocol.COOPERATIVE
    generation: int = 0
    #: Eager protocol only: nobody is granted anything until everybody has given back everything.
    draining: bool = False
    #: Nobody reads: the target is nothing for everybody until the group goes on.  Members stay members.
    paused: bool = False
    members: Mapping[str, Member] = field(default_factory=dict)
    created_at_ms: int = 0
    rebalanced_at_ms: int = 0
    #: Since when the group has no members; None while it has some.
    emptied_at_ms: int | None = 0
    #: Names and patterns that members have ever subscribed to: what they cover without a position came later.
    begun: tuple[str, ...] = ()
    #: Instance id -> the members that had its place before, the latest ones.  Whoever is neither there nor a member
    #: came after all that this state remembers: it may have been restored from a backup.
    former: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member, or refresh the membership of the same `member_id` or `instance_id`.

    A joiner holds no partitions.  One that does, and wants to change its subscription or settings, sets
    `renew`: it is refused if its membership has ended meanwhile, as others may read those partitions by now.
    After a lost connection no join is needed; a heartbeat goes on where it was.  `strategy` and `protocol`
    None mean: whatever the group uses.
    """

    member_id: str
    client_id: str
    address: str
    topics: tuple[str, ...]
    instance_id: str | None = None
    session_ms: int = SESSION_MS
    rebalance_ms: int = REBALANCE_MS
    strategy: Strategy | None = None
    protocol: RebalanceProtocol | None = None
    renew: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life that says where the member stands.

    `generation` is that of the newest reply it has acted on, `owned` is what it holds at this moment.
    """

    member_id: str
    generation: int
    owned: frozenset[TopicPartition]
    #: With it, a member whose place was taken is told so, and not only that it is unknown.
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop being a member.  A static one keeps its assignment until its session ends, unless `permanent`."""

    member_id: str
    permanent: bool = False
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a member may do now.

    It holds `assigned`, stops reading and gives back `revoke`, and will get `waiting` once others have given
    it back.  A member ignores a reply whose generation is lower than one it has already acted on.
    """

    member_id: str
    generation: int
    assigned: frozenset[TopicPartition]
    revoke: frozenset[TopicPartition]
    waiting: frozenset[TopicPartition]


ReplyT = TypeVar("ReplyT", Reply, None)


@dataclass(frozen=True, slots=True)
class Transition(Generic[ReplyT]):
    """A decision.  Record `state`, then make it visible, answer `reply` and tell `nudged` to send a
    heartbeat: members, and a process whose place another has taken.

    `state` is the very object that was passed in when there is nothing to record.
    """

    state: GroupState
    reply: ReplyT
    nudged: frozenset[str] = frozenset()


def name_member(client_id: str, suffix: str) -> str:
    """A member id; the caller draws the random suffix."""
    return f"{client_id}-{suffix}"

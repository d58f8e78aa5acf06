"""Who was heard when, and who was asked to give something back: the part of a group a restart may forget.

After a restart every member starts a fresh session, so a broker that was away for a minute does not find all
its members dead.  `now_ms` is of any clock that never goes back; it need not be the wall clock.
"""

from __future__ import annotations

from millstream.groups.ownership import must_give_back
from millstream.groups.records import GroupState, TopicPartition

__all__ = ["Sessions"]


class Sessions:
    """The deadlines of one group's members."""

    def __init__(self) -> None:
        self._seen_at_ms: dict[str, int] = {}
        # By partition: a second request must not shorten the time for the first, nor the first that for the
        # second.
        self._asked_at_ms: dict[str, dict[TopicPartition, int]] = {}

    def touch(self, member_id: str, *, now_ms: int) -> None:
        """A member was heard: call it for every join and every heartbeat that was accepted."""
        self._seen_at_ms[member_id] = now_ms

    def excuse(self, away_ms: int, *, now_ms: int) -> None:
        """Nobody could be heard for so long, up to now: it does not count."""
        for member_id, at_ms in self._seen_at_ms.items():
            self._seen_at_ms[member_id] = min(at_ms + away_ms, now_ms)
        for asked in self._asked_at_ms.values():
            for partition, at_ms in asked.items():
                asked[partition] = min(at_ms + away_ms, now_ms)

    def follow(self, state: GroupState, *, now_ms: int) -> None:
        """Take up a state that was just recorded or recovered; new members start their session now."""
        for member_id in self._seen_at_ms.keys() - state.members.keys():
            del self._seen_at_ms[member_id]
            self._asked_at_ms.pop(member_id, None)
        for member_id, member in state.members.items():
            self._seen_at_ms.setdefault(member_id, now_ms)
            owed = must_give_back(state, member)
            asked = self._asked_at_ms.get(member_id, {})
            if owed:
                self._asked_at_ms[member_id] = {partition: asked.get(partition, now_ms) for partition in owed}
            elif asked:
                del self._asked_at_ms[member_id]

    def late(self, state: GroupState, *, now_ms: int) -> dict[str, str]:
        """Members to expire now, each with the reason in words."""
        reasons: dict[str, str] = {}
        for member_id, member in state.members.items():
            silent_ms = now_ms - self._seen_at_ms.get(member_id, now_ms)
            asked = self._asked_at_ms.get(member_id)
            if silent_ms >= member.session_ms:
                reasons[member_id] = f"no heartbeat for {silent_ms} ms; the session is {member.session_ms} ms"
            elif asked and now_ms - min(asked.values()) >= member.rebalance_ms:
                partition = min(asked, key=lambda candidate: (asked[candidate], candidate))
                reasons[member_id] = f"did not give back {partition} within {member.rebalance_ms} ms"
        return reasons

    def silent_ms(self, member_id: str, *, now_ms: int) -> int | None:
        """How long ago the member was last heard."""
        seen_at_ms = self._seen_at_ms.get(member_id)
        return None if seen_at_ms is None else now_ms - seen_at_ms

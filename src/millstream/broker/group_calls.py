"""The control calls about stream groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from millstream.broker.groups import Groups
from millstream.errors import InvalidArgument
from millstream.wire import calls

if TYPE_CHECKING:
    from millstream.broker.sessions import Session

__all__ = ["GroupCalls"]


class GroupCalls:
    """Answers the calls about stream groups."""

    def __init__(self, groups: Groups, *, session_ms_max: int) -> None:
        self._groups = groups
        self._session_ms_max = session_ms_max

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        groups = self._groups
        return {
            calls.JoinGroup: self._join,
            calls.HeartbeatGroup: lambda session, call: groups.heartbeat(session.namespace, call, push=session.push),
            calls.LeaveGroup: lambda session, call: groups.leave(session.namespace, call),
            calls.CommitOffsets: lambda session, call: groups.commit(session.namespace, call),
            calls.CommittedOffsets: self._committed,
            calls.ListGroups: self._list,
            calls.DescribeGroup: lambda session, call: groups.describe(session.namespace, call.name),
            calls.ResetOffsets: lambda session, call: groups.reset(session.namespace, call),
            calls.DeleteGroup: lambda session, call: groups.delete(session.namespace, call.name),
            calls.EvictMember: lambda session, call: groups.evict(session.namespace, call),
            calls.RebalanceGroup: lambda session, call: groups.rebalance(session.namespace, call.name),
            calls.PauseGroup: lambda session, call: groups.pause(session.namespace, call),
        }

    async def _join(self, session: Session, call: calls.JoinGroup) -> calls.Assignment:
        if call.session_ms > self._session_ms_max:
            raise InvalidArgument(f"session_ms is {call.session_ms}, this broker allows {self._session_ms_max}")
        return await self._groups.join(
            session.namespace, call, client_id=session.client_id, address=session.address, push=session.push
        )

    async def _committed(self, session: Session, call: calls.CommittedOffsets) -> list[calls.OffsetEntry]:
        return self._groups.committed(session.namespace, call)

    async def _list(self, session: Session, _: calls.ListGroups) -> list[calls.GroupSummary]:
        return self._groups.summaries(session.namespace)

"""Stream groups over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.server.http.parameters import Page
from millstream.settings import EXACT_MAX
from millstream.wire import calls

__all__ = ["family"]

family = Family("groups", "Stream groups: named readers whose progress is kept, and whose members share partitions.")


class GroupsQuery(Page, kw_only=True, forbid_unknown_fields=True):
    #: Only groups that read this topic.
    topic: str = ""
    #: Only groups in this state.
    state: Literal["", "empty", "rebalancing", "stable"] = ""


class LagQuery(Page, kw_only=True, forbid_unknown_fields=True):
    #: Only partitions of this topic.
    topic: str = ""


class GroupLags(msgspec.Struct, kw_only=True):
    """How far behind a group is: in all, and in the partitions of this page."""

    group: str
    lag: int
    lag_ms: int
    partitions: list[calls.GroupLag]


class Reset(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    topic: str
    to: Literal["earliest", "latest", "timestamp", "offset", "shift"]
    #: A time (UTC, ms), an offset, or the number of messages to shift by.
    value: Annotated[int, Meta(ge=-EXACT_MAX, le=EXACT_MAX)] | None = None
    partitions: Annotated[list[Annotated[int, Meta(ge=0, le=10_000)]], Meta(max_length=10_000)] | None = None
    #: Only show what would change.
    dry_run: bool = False


@family.get("/groups", query=GroupsQuery, answer=list[calls.GroupSummary])
async def list_groups(exchange: Exchange[GroupsQuery, None]) -> Any:
    """List all stream groups, by name."""
    query = exchange.query
    groups: list[calls.GroupSummary] = await exchange.call(calls.ListGroups())
    if query.topic:
        groups = [group for group in groups if query.topic in group.topics]
    if query.state:
        groups = [group for group in groups if group.state == query.state]
    return page(exchange, groups, limit=query.limit, offset=query.offset)


@family.get("/groups/{group}", answer=calls.GroupInfo)
async def show_group(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a group, with its members and how far behind it is."""
    return await _group(exchange)


@family.delete("/groups/{group}")
async def delete_group(exchange: Exchange[NoQuery, None]) -> None:
    """Delete a group and its progress; it must have no members."""
    await exchange.call(calls.DeleteGroup(name=exchange.path["group"]))


@family.get("/groups/{group}/lag", query=LagQuery, answer=GroupLags)
async def show_lag(exchange: Exchange[LagQuery, None]) -> GroupLags:
    """Show how far behind a group is, in all and per partition."""
    query = exchange.query
    lags = [entry for entry in (await _group(exchange)).lag if query.topic in ("", entry.topic)]
    return GroupLags(
        group=exchange.path["group"],
        lag=sum(entry.lag for entry in lags),
        lag_ms=max((entry.lag_ms for entry in lags), default=0),
        partitions=page(exchange, lags, limit=query.limit, offset=query.offset),
    )


@family.get("/groups/{group}/members", query=Page, answer=list[calls.MemberInfo])
async def list_members(exchange: Exchange[Page, None]) -> Any:
    """List the members of a group and what each of them reads."""
    members = (await _group(exchange)).members
    return page(exchange, members, limit=exchange.query.limit, offset=exchange.query.offset)


@family.delete("/groups/{group}/members/{member}")
async def evict_member(exchange: Exchange[NoQuery, None]) -> None:
    """Remove a member; its partitions go to the others. A member that is alive joins again."""
    await exchange.call(calls.EvictMember(group=exchange.path["group"], member_id=exchange.path["member"]))


@family.post("/groups/{group}/reset", body=Reset, answer=list[calls.OffsetEntry])
async def reset_group(exchange: Exchange[NoQuery, Reset]) -> Any:
    """Move a group without members to other offsets; the answer has those that were, or would be, set."""
    body = exchange.body
    return await exchange.call(
        calls.ResetOffsets(
            group=exchange.path["group"],
            topic=body.topic,
            to=body.to,
            value=body.value,
            partitions=body.partitions,
            dry_run=body.dry_run,
        )
    )


@family.post("/groups/{group}/rebalance", answer=calls.GroupSummary)
async def rebalance_group(exchange: Exchange[NoQuery, None]) -> Any:
    """Assign the partitions of a group anew, whoever has them now, in a new generation."""
    return await exchange.call(calls.RebalanceGroup(name=exchange.path["group"]))


@family.post("/groups/{group}/pause", answer=calls.GroupSummary)
async def pause_group(exchange: Exchange[NoQuery, None]) -> Any:
    """Pause a group: none of its members reads.

    The members finish what they have in hand, commit, give their partitions back and stay in the group. A restart does
    not end the pause. Queue groups are paused by their policy: `PUT /queues/{topic}/{group}` with `paused`.
    """
    return await exchange.call(calls.PauseGroup(name=exchange.path["group"]))


@family.post("/groups/{group}/resume", answer=calls.GroupSummary)
async def resume_group(exchange: Exchange[NoQuery, None]) -> Any:
    """Resume a paused group."""
    return await exchange.call(calls.PauseGroup(name=exchange.path["group"], paused=False))


async def _group(exchange: Exchange[Any, None]) -> calls.GroupInfo:
    info: calls.GroupInfo = await exchange.call(calls.DescribeGroup(name=exchange.path["group"]))
    return info

"""A group as the JSON document that is its fact in the state log.

The document is the whole durable state; replaying the log keeps the last one per group.  Keys that are missing have
defaults, so documents of earlier versions can be read.  Those of newer ones are not read: their state log says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from millstream.groups.ownership import check_exclusive
from millstream.groups.records import (
    REBALANCE_MS,
    SESSION_MS,
    GroupState,
    Member,
    RebalanceProtocol,
    Strategy,
    TopicPartition,
)

__all__ = ["from_document", "to_document"]


def to_document(state: GroupState) -> dict[str, Any]:
    check_exclusive(state)
    return {
        "name": state.name,
        "strategy": state.strategy.value,
        "protocol": state.protocol.value,
        "generation": state.generation,
        "draining": state.draining,
        "paused": state.paused,
        "created_at_ms": state.created_at_ms,
        "rebalanced_at_ms": state.rebalanced_at_ms,
        "emptied_at_ms": state.emptied_at_ms,
        "begun": list(state.begun),
        "former": {instance_id: list(member_ids) for instance_id, member_ids in state.former.items()},
        "members": [_member_document(member) for member in state.members.values()],
    }


def from_document(document: Mapping[str, Any]) -> GroupState:
    members = [_member(entry) for entry in document.get("members", ())]
    state = GroupState(
        name=document["name"],
        strategy=Strategy(document["strategy"]),
        protocol=RebalanceProtocol(document["protocol"]),
        generation=document["generation"],
        draining=document.get("draining", False),
        paused=document.get("paused", False),
        members={member.member_id: member for member in members},
        created_at_ms=document.get("created_at_ms", 0),
        rebalanced_at_ms=document.get("rebalanced_at_ms", 0),
        emptied_at_ms=document.get("emptied_at_ms"),
        begun=tuple(document.get("begun", ())),
        former={instance_id: tuple(member_ids) for instance_id, member_ids in document.get("former", {}).items()},
    )
    check_exclusive(state)
    return state


def _member_document(member: Member) -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "client_id": member.client_id,
        "address": member.address,
        "topics": list(member.topics),
        "instance_id": member.instance_id,
        "session_ms": member.session_ms,
        "rebalance_ms": member.rebalance_ms,
        "joined_at_ms": member.joined_at_ms,
        "target": _by_topic(member.target),
        "owned": _by_grant(member.owned),
        "lapsed": _by_topic(member.lapsed),
        "revoke_generation": member.revoke_generation,
    }


def _member(entry: Mapping[str, Any]) -> Member:
    return Member(
        member_id=entry["member_id"],
        client_id=entry.get("client_id", ""),
        address=entry.get("address", ""),
        topics=tuple(entry["topics"]),
        instance_id=entry.get("instance_id"),
        session_ms=entry.get("session_ms", SESSION_MS),
        rebalance_ms=entry.get("rebalance_ms", REBALANCE_MS),
        joined_at_ms=entry.get("joined_at_ms", 0),
        target=frozenset(_partitions(entry["target"])),
        owned={p: grant["generation"] for grant in entry["owned"] for p in _partitions(grant["partitions"])},
        lapsed=frozenset(_partitions(entry.get("lapsed", {}))),
        revoke_generation=entry["revoke_generation"],
    )


def _by_grant(owned: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    """Owned partitions by the generation of their grant; most come in a few large grants."""
    grants: dict[int, list[TopicPartition]] = {}
    for partition, generation in owned.items():
        grants.setdefault(generation, []).append(partition)
    return [{"generation": key, "partitions": _by_topic(granted)} for key, granted in sorted(grants.items())]


def _by_topic(partitions: Collection[TopicPartition]) -> dict[str, list[int]]:
    """Topic names are long and repeat; numbers are short."""
    numbers: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        numbers.setdefault(topic, []).append(number)
    return numbers


def _partitions(numbers: Mapping[str, list[int]]) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for topic, entries in numbers.items() for number in entries]

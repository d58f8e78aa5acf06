"""A group survives being written down, whatever it was in the middle of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millstream.groups.core import decide_heartbeat, decide_join, decide_lapse, new_group
from millstream.groups.documents import from_document, to_document
from millstream.groups.records import (
    GroupState,
    Heartbeat,
    Join,
    RebalanceProtocol,
    TopicPartition,
)

TOPICS = {"orders.eu": 3, "orders.us": 2}


def rebalancing(protocol: RebalanceProtocol) -> GroupState:
    state = new_group("workers", now_ms=17)
    first = Join("a", "billing", "10.0.0.1:1", ("orders.*",), "seat-a", 5_000, 9_000, protocol=protocol)
    state = decide_join(state, first, topics=TOPICS, now_ms=18).state
    second = Join("b", "billing", "10.0.0.2:1", ("orders.#", "audit"))
    return decide_join(state, second, topics=TOPICS, now_ms=19).state


@pytest.mark.parametrize("protocol", RebalanceProtocol)
def test_a_document_brings_back_a_group_in_the_middle_of_a_rebalance(protocol: RebalanceProtocol) -> None:
    state = rebalancing(protocol)
    assert from_document(json.loads(json.dumps(to_document(state)))) == state
    given_back = decide_heartbeat(state, Heartbeat("a", 2, frozenset())).state
    assert given_back != state
    assert from_document(json.loads(json.dumps(to_document(given_back)))) == given_back


def test_a_document_knows_what_has_to_be_let_go_of() -> None:
    state = rebalancing(RebalanceProtocol.COOPERATIVE)
    gone = [TopicPartition("orders.eu", number) for number in range(3)]
    state = decide_lapse(state, gone, topics=TOPICS, now_ms=20).state
    assert state.members["a"].lapsed
    assert from_document(json.loads(json.dumps(to_document(state)))) == state


def test_a_document_knows_who_had_a_place_before() -> None:
    state = rebalancing(RebalanceProtocol.COOPERATIVE)
    state = decide_join(
        state, Join("c", "billing", "10.0.0.1:1", ("orders.*",), "seat-a"), topics=TOPICS, now_ms=20
    ).state
    assert state.former == {"seat-a": ("a",)}
    assert from_document(json.loads(json.dumps(to_document(state)))) == state


def test_an_empty_group_survives_too() -> None:
    state = new_group("workers", now_ms=17)
    assert from_document(to_document(state)) == state


def test_unknown_keys_are_ignored_and_optional_ones_have_defaults() -> None:
    state = rebalancing(RebalanceProtocol.COOPERATIVE)
    document = to_document(state)
    document["colour"] = "blue"
    for member in document["members"]:
        member["mood"] = "fine"
        del member["address"], member["joined_at_ms"]
    recovered = from_document(document)
    assert recovered.generation == state.generation
    assert recovered.members["a"].owned == state.members["a"].owned
    assert recovered.members["a"].address == ""


def test_a_partition_owned_twice_is_neither_written_nor_read() -> None:
    state = rebalancing(RebalanceProtocol.COOPERATIVE)
    document = to_document(state)
    document["members"][1]["owned"] = document["members"][0]["owned"]
    with pytest.raises(AssertionError, match="owns what another owns"):
        from_document(document)
    stolen = replace(state.members["b"], owned={TopicPartition("orders.eu", 0): 1})
    with pytest.raises(AssertionError, match="owns what another owns"):
        to_document(replace(state, members={**state.members, "b": stolen}))

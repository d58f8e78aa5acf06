"""What the registry knows, and that it need not look at everything to know it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count

import pytest

from millstream.broker.registry import PartitionCounts, Registry, Topic
from millstream.ids import schedule_uid
from millstream.topics import TopicConfig


@pytest.fixture
def registry() -> Registry:
    return Registry(topics_max=100, partitions_max=1000, namespaces_max=100)


def create(
    registry: Registry, name: str, *, partitions: int = 1, uids: Iterator[int], namespace: str = "default"
) -> Topic:
    facts = registry.decide_create_topic(
        namespace, name, partitions=partitions, config=TopicConfig(), now_ms=0, draw_uid=lambda: next(uids)
    )
    registry.replay(facts)
    return registry.get(namespace, name)


class _OneByOne(dict[str, Topic]):
    """Topics that can be asked for by name only."""

    def items(self) -> object:  # type: ignore[override]
        raise AssertionError("somebody looks at all topics")

    __iter__ = items  # type: ignore[assignment]


def test_counting_the_partitions_of_one_topic_does_not_look_at_the_others(registry: Registry) -> None:
    topic = create(registry, "a", partitions=3, uids=count(1))
    counts = PartitionCounts(_OneByOne(a=topic))
    assert counts["a"] == counts.get("a") == 3
    assert counts.get("b") is None
    assert "b" not in counts


def test_counts_leave_out_what_is_being_deleted(registry: Registry) -> None:
    uids = count(1)
    create(registry, "a", partitions=3, uids=uids)
    going = create(registry, "b", uids=uids)
    counts = registry.partition_counts("default")
    assert dict(counts) == {"a": 3, "b": 1}
    going.deleting = True
    assert (dict(counts), len(counts), counts.get("b")) == ({"a": 3}, 1, None)
    assert dict(registry.partition_counts("nowhere")) == {}


def test_a_partition_is_found_by_its_uid_until_its_topic_goes(registry: Registry) -> None:
    registry.replay(registry.decide_create_namespace("other", now_ms=0))
    uids = count(10)
    first = create(registry, "a", partitions=3, uids=uids)
    second = create(registry, "a", uids=uids, namespace="other")
    assert registry.place_of(12) == (first, 2)
    assert registry.place_of(13) == (second, 0)
    registry.replay({first.key: {**first.document(), "partition_uids": [10, 11, 12, 99]}})
    assert registry.place_of(99) == (first, 3)
    registry.replay({first.key: None})
    assert registry.place_of(12) is None
    registry.replay(registry.decide_delete_namespace("other", force=True))
    assert registry.place_of(13) is None


def test_no_two_partitions_get_the_same_uid_nor_that_of_the_schedules_of_another(registry: Registry) -> None:
    drawn = chain([7, 7, schedule_uid(7), 8], count(100))
    assert create(registry, "a", partitions=2, uids=drawn).partition_uids == [7, 8]
    again = chain([8, schedule_uid(7), 9], count(200))
    assert create(registry, "b", uids=again).partition_uids == [9]

"""Many topics of one partition each, and many partitions of one topic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import millstream
from benchmarks.bodies import make_bodies
from benchmarks.scale.axis import BATCH, Axis, Effort, Figures, each, standard_batch
from benchmarks.scale.link import Link, publish_frame
from benchmarks.scale.world import World

__all__ = ["PARTITIONS", "TOPICS"]

_KEYS_PER_PARTITION = 16
_Place = tuple[str, int]
#: Policy, what it is called, and how many times fewer requests.
_SYNCS = (("never", "no fsync", 1), ("interval", "fsync every second", 1), ("group", "fsync before confirm", 5))


def _measure_topics(data: Path, count: int, effort: Effort) -> Figures:
    figures: Figures = {}
    with World(data) as world:
        link = world.connect()
        names = [f"topic-{number}" for number in range(count)]
        with world.cost() as cost:
            link.calls("topic.create", [{"name": name} for name in names])
        figures |= each("create a topic", cost, count)
        figures |= _publish(world, link, [(name, 0) for name in names], effort)
        commit = {"group": "readers", "offsets": [{"topic": names[-1], "partition": 0, "offset": 1}]}
        with world.cost() as cost:
            link.calls("group.commit", [commit] * effort.rounds)
        figures |= each("commit of a stream group", cost, effort.rounds)
        figures |= _restart(world)
    return figures


def _measure_partitions(data: Path, count: int, effort: Effort) -> Figures:
    figures: Figures = {}
    with World(data) as world:
        link = world.connect()
        link.call("topic.create", name="wide", partitions=count)
        figures |= _publish(world, link, [("wide", number) for number in range(count)], effort)
        figures |= _publish_keyed(world, count, effort)
        figures |= _restart(world)
    return figures


def _publish(world: World, link: Link, places: Sequence[_Place], effort: Effort) -> Figures:
    """Round robin over all places: what the first batch costs, and what the others cost."""
    batch = standard_batch()
    frames = [publish_frame(topic, number, batch) for topic, number in places]
    with world.cost() as first:
        link.publish(frames)
    figures = each(f"first batch of {BATCH} to each", first, len(frames))
    for fsync, name, requests in _SYNCS:
        frames = [publish_frame(topic, number, batch, fsync=fsync) for topic, number in places]
        many = list(islice(cycle(frames), max(effort.requests // requests, len(frames))))
        with world.cost() as cost:
            link.publish(many)
        figures |= each(f"batch of {BATCH}, {name}", cost, len(many))
    figures[f"batch of {BATCH}, {name}, ms by the clock"] = cost.seconds / len(many) * 1000
    figures["memory with all of them open, MB"] = world.memory_bytes() / 1e6
    figures["doing nothing, processor ms a second"] = world.idle_ms_a_second()
    return figures


def _publish_keyed(world: World, partitions: int, effort: Effort) -> Figures:
    """Through the SDK, which makes a batch for each partition: more partitions, smaller batches."""
    keys = [b"%d-key" % number for number in range(partitions * _KEYS_PER_PARTITION)]
    bodies = make_bodies(max(effort.messages, 2 * len(keys)), 100)
    with millstream.connect(f"127.0.0.1:{world.port}") as client, client.producer("wide", linger_ms=5) as producer:
        for key in keys:
            producer.send(b"warm", key=key)
        producer.flush()
        with world.cost() as cost:
            for body, key in zip(bodies, cycle(keys), strict=False):
                producer.send(body, key=key)
            producer.flush()
    return each("message with a key, by the SDK", cost, len(bodies))


def _restart(world: World) -> Figures:
    world.stop()
    cost = world.start()
    return {
        "start, s": cost.seconds,
        "start, processor s": cost.broker_ns / 1e9,
        "memory after a start, MB": world.memory_bytes() / 1e6,
    }


TOPICS = Axis(
    "topics",
    "Topics of one partition each",
    (1, 10, 100, 1_000, 10_000),
    (1, 100, 1_000),
    _measure_topics,
)
PARTITIONS = Axis(
    "partitions",
    "Partitions of one topic",
    (1, 10, 100, 1_000),
    (1, 100, 1_000),
    _measure_partitions,
)

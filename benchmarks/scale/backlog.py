"""A backlog that nobody has read: what it costs those who go on publishing, and those who read it."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.bodies import make_bodies
from benchmarks.machine import settle_machine
from benchmarks.scale.axis import BATCH, Axis, Effort, Figures, each, standard_batch
from benchmarks.scale.link import Link, batch_of, publish_frame
from benchmarks.scale.world import World

__all__ = ["BACKLOG"]

_FILLING = 1_000  # messages of a batch
_LEAST = 100_000  # there is something to read at the first point, too
_LEASED = 1_000
_TOPIC = "backlog"


def _measure(data: Path, count: int, effort: Effort) -> Figures:
    figures: Figures = {}
    with World(data) as world:
        link = world.connect()
        link.call("topic.create", name=_TOPIC)
        filling = publish_frame(_TOPIC, 0, batch_of(make_bodies(_FILLING, 100)))
        frame = publish_frame(_TOPIC, 0, standard_batch())
        end = max(count, _LEAST)
        link.publish([filling] * (end // _FILLING), window=16)
        figures["memory, MB"] = world.memory_bytes() / 1e6
        settle_machine()  # a large backlog has used up the memory that was touched before
        with world.cost() as cost:
            link.publish([frame] * effort.requests)
        figures |= each(f"batch of {BATCH} published", cost, effort.requests)
        figures |= _read(world, link, end, effort)
        figures |= _work(world, link, effort)
        figures["memory afterwards, MB"] = world.memory_bytes() / 1e6
        link.close()
        world.stop()
        started = world.start()
        figures["start, s"] = started.seconds
        link = world.connect()
        with world.cost() as cost:
            link.publish([frame])
        figures["first publish after a start, ms by the clock"] = cost.seconds * 1000
    return figures


def _read(world: World, link: Link, end: int, effort: Effort) -> Figures:
    """From the oldest message on, and anywhere."""
    offset = 0
    with world.cost() as cost:
        while offset < min(effort.messages, end):
            offset, _ = link.fetch(_TOPIC, offset)
    figures = each("message read from the beginning on", cost, offset)
    places = random.Random(1).choices(range(end), k=3 * effort.rounds)
    with world.cost() as cost:
        for place in places:
            link.fetch(_TOPIC, place, max_bytes=1)
    return figures | each(f"batch of {_FILLING:,} read anywhere", cost, len(places))


def _work(world: World, link: Link, effort: Effort) -> Figures:
    """A queue group that has all of it before it: the broker looks through it once, for priorities."""
    with world.cost() as looking:
        opened = link.call("queue.open", topic=_TOPIC, group="workers", start="earliest")
        world.wait_until_idle()
    consumer, done = int(opened["consumer"]), 0
    with world.cost() as cost:
        while done < effort.messages and (leased := link.lease(consumer, _LEASED)):
            done += leased
    figures = each("message leased and acknowledged", cost, done)
    return figures | {"first queue group on it, processor s": looking.broker_ns / 1e9}


BACKLOG = Axis(
    "backlog",
    "Messages that nobody has read",
    (0, 1_000_000, 10_000_000, 50_000_000),
    (0, 100_000, 1_000_000),
    _measure,
)

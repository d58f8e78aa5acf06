"""Many groups on one topic: stream groups, readers that wait for more, and queue groups."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scale.axis import BATCH, Axis, Effort, Figures, each, standard_batch
from benchmarks.scale.link import Link, publish_frame
from benchmarks.scale.world import World

__all__ = ["GROUPS"]

_LEASED = 1_000
_WAIT_MS = 60_000


def _measure(data: Path, count: int, effort: Effort) -> Figures:
    figures: Figures = {}
    with World(data) as world:
        link = world.connect()
        for topic in ("streams", "tail", "queues"):
            link.call("topic.create", name=topic)
        figures |= _stream_groups(world, link, count, effort)
        figures |= _readers(world, link, count, effort)
        figures |= _queue_groups(world, link, count, effort)
        figures["memory, MB"] = world.memory_bytes() / 1e6
        figures["doing nothing, processor ms a second"] = world.idle_ms_a_second()
    return figures


def _stream_groups(world: World, link: Link, count: int, effort: Effort) -> Figures:
    frame = publish_frame("streams", 0, standard_batch())
    link.publish([frame])
    offsets = [{"topic": "streams", "partition": 0, "offset": 1}]
    commits = [{"group": f"group-{number}", "offsets": offsets} for number in range(count)]
    commits *= max(1, effort.rounds // count)
    link.calls("group.commit", commits[:count])
    with world.cost() as cost:
        link.calls("group.commit", commits)
    figures = each("commit of a stream group", cost, len(commits))
    with world.cost() as cost:
        link.publish([frame] * effort.requests)
    return figures | each(f"batch of {BATCH}, stream groups that are away", cost, effort.requests)


def _readers(world: World, link: Link, count: int, effort: Effort) -> Figures:
    """Everybody waits at the end of the log; each batch goes to all of them."""
    frame, readers, end = publish_frame("tail", 0, standard_batch()), world.connect(), 0
    rounds = max(5, effort.requests // count)
    with world.cost() as cost:
        for _ in range(rounds):
            for _ in range(count):
                readers.send_fetch("tail", end, wait_ms=_WAIT_MS)
            link.publish([frame])
            for _ in range(count):
                readers.answer()
            end += BATCH
    readers.close()
    return each(f"batch of {BATCH} to a reader that waits", cost, rounds * count)


def _queue_groups(world: World, link: Link, count: int, effort: Effort) -> Figures:
    frame = publish_frame("queues", 0, standard_batch())
    link.publish([frame])
    opened = [{"topic": "queues", "group": f"group-{number}", "start": "earliest"} for number in range(count)]
    with world.cost() as cost:
        consumers = [int(answer["consumer"]) for answer in link.calls("queue.open", opened)]
    figures = each("open a queue group", cost, count)
    with world.cost() as cost:
        link.publish([frame] * effort.requests)
    figures |= each(f"batch of {BATCH}, queue groups", cost, effort.requests)
    # So many for each group that the whole work is about the same.
    share, done = max(_LEASED, effort.messages // count), 0
    with world.cost() as cost:
        for consumer in consumers:
            wanted = done + share
            while done < wanted and (leased := link.lease(consumer, _LEASED)):
                done += leased
    figures |= each("message leased and acknowledged", cost, done)
    with world.cost() as cost:
        for _ in range(effort.requests // 10):
            link.publish([frame])
    return figures | each(f"batch of {BATCH}, one at a time, queue groups", cost, effort.requests // 10)


GROUPS = Axis(
    "groups",
    "Groups on one topic",
    (1, 10, 100, 500),
    (1, 10, 100),
    _measure,
)

"""Many connections: most of them idle, or all of them busy."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scale.axis import BATCH, Axis, Effort, Figures, each, standard_batch
from benchmarks.scale.link import Link, publish_frame
from benchmarks.scale.world import World, files_limit

__all__ = ["CONNECTIONS"]

_SPARE_FILES = 200


def _measure(data: Path, count: int, effort: Effort) -> Figures:
    if files_limit(count + _SPARE_FILES) < count + _SPARE_FILES:
        raise SystemExit(f"{count} connections need as many open files: ulimit -n {count + _SPARE_FILES}")
    figures: Figures = {}
    with World(data) as world:
        link = world.connect()
        link.call("topic.create", name="busy")
        frame = publish_frame("busy", 0, standard_batch())
        link.publish([frame] * effort.requests)  # so that the broker has taken the memory it works with
        with world.cost() as opened:
            links = [world.connect() for _ in range(count)]
        figures |= each("open a connection", opened, count)
        figures["memory with all of them open, MB"] = world.memory_bytes() / 1e6
        figures["doing nothing, processor ms a second"] = world.idle_ms_a_second()
        with world.cost() as cost:
            link.publish([frame] * effort.requests)
        figures |= each(f"batch of {BATCH} on one, the others idle", cost, effort.requests)
        took = sorted(_one_at_a_time(link, frame) for _ in range(effort.rounds))
        figures["one at a time on one, the others idle, p50, us"] = took[len(took) // 2] * 1e6
        figures["one at a time on one, the others idle, p99, us"] = took[len(took) * 99 // 100] * 1e6
        turns = max(2, effort.requests // count)
        with world.cost() as cost:
            _all_at_once(links, frame, turns)
        figures |= each(f"batch of {BATCH} on each in turn, all busy", cost, turns * count)
        figures["memory with all of them busy, MB"] = world.memory_bytes() / 1e6
        for other in links:
            other.close()
    return figures


def _one_at_a_time(link: Link, frame: bytes) -> float:
    started = time.perf_counter()
    link.publish([frame])
    return time.perf_counter() - started


def _all_at_once(links: Sequence[Link], frame: bytes, turns: int) -> None:
    """Each connection has one publish under way, and sends the next when it is answered."""
    left = dict.fromkeys(links, turns)
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link.socket, selectors.EVENT_READ, link)
            link.socket.sendall(frame)
        while left:
            for key, _ in selector.select():
                link = key.data
                if not link.receive():
                    continue
                link.answer()
                left[link] -= 1
                if left[link]:
                    link.socket.sendall(frame)
                else:
                    del left[link]
                    selector.unregister(link.socket)


CONNECTIONS = Axis(
    "connections",
    "Connections",
    (1, 10, 100, 1_000, 5_000),
    (1, 100, 1_000),
    _measure,
)

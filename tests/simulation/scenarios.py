"""What takes place in a run: the workloads that a seed chooses."""

from __future__ import annotations

from typing import Any

from tests.simulation.history import History
from tests.simulation.letters import Replays
from tests.simulation.queues import QueueGroup
from tests.simulation.streams import Publishers, StreamGroup
from tests.simulation.world import World, simulate


def workloads(world: World) -> list[Any]:
    chosen: list[Any] = [Publishers(world, "orders", messages=world.random.choice((20, 50, 90)))]
    if world.random.random() < 0.6:
        chosen.append(StreamGroup(world, "orders", members=world.random.randrange(1, 4)))
    for number in range(world.random.choice((0, 1, 1, 2))):
        chosen.append(QueueGroup(world, "orders", f"workers{number}"))
    if world.random.random() < 0.3:
        chosen.append(Replays(world, "orders"))
    return chosen


def unsynced_workloads(world: World) -> list[Any]:
    """The same where messages are shown, and in two of three runs confirmed, before they are on disk."""
    config = ({"fsync": "never"}, {"fsync": "interval"}, {"visible": "written"})[world.seed % 3]
    chosen: list[Any] = [Publishers(world, "orders", messages=world.random.choice((20, 50, 90)), config=config)]
    # Some take so long that others have published before they see that the broker was away.
    chosen.append(StreamGroup(world, "orders", members=world.random.randrange(1, 4), pauses_s=(0.0, 0.0, 0.3, 3.0)))
    if world.random.random() < 0.5:
        chosen.append(QueueGroup(world, "orders", "workers"))
    return chosen


def simulate_seed(seed: int, *, unsynced: bool = False, verbose: bool = False) -> History:
    return simulate(seed, unsynced_workloads if unsynced else workloads, verbose=verbose)

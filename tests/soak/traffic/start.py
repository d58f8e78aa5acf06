"""A process of its own for each worker, until it is told to end, or killed.

They are forked from a server that has loaded everything already: on a busy machine a worker is back within moments.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final

from tests.soak.traffic.world import Worker, World

__all__ = ["start_worker"]

KINDS: Final = {
    "orders": ("streams", "produce"),
    "readers": ("streams", "consume"),
    "jobs": ("queues", "produce"),
    "later": ("queues", "schedule"),
    "sync": ("queues", "consume"),
    "keyed": ("queues", "consume"),
    "web": ("web", "produce"),
    "pages": ("web", "consume"),
    "sensors": ("mqtt", "publish"),
    "screens": ("mqtt", "subscribe"),
}


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sorted({f"tests.soak.traffic.{module}" for module, _ in KINDS.values()}))
    return context


def start_worker(kind: str, name: str, folder: Path) -> ForkServerProcess:
    process = _context().Process(target=work_as, args=(kind, name, str(folder)), name=name, daemon=True)
    process.start()
    return process


def work_as(kind: str, name: str, folder: str) -> None:
    """What the process does; what it has to complain about goes to a file."""
    with Path(folder, "workers.log").open("a", buffering=1) as complaints:
        os.dup2(complaints.fileno(), sys.stderr.fileno())
        os.dup2(complaints.fileno(), sys.stdout.fileno())
    module, function = KINDS[kind]
    work: Callable[[Worker], None] = getattr(importlib.import_module(f"tests.soak.traffic.{module}"), function)
    work(Worker(World.load(Path(folder)), name))

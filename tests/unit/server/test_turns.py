"""Short turns on the processor: asked for without rights, for this thread and those that it starts."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from millstream.server import turns

T = TypeVar("T")


def _in_a_thread(work: Callable[[], T]) -> T:
    """Turns belong to a thread: the tests' own keeps the ones it has."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def _turn_ns() -> int:
    memory = ctypes.create_string_buffer(turns._ATTRIBUTES.size)
    get_attributes = turns._CALLS[platform.machine()][1]
    assert ctypes.CDLL(None).syscall(get_attributes, 0, memory, len(memory.raw), 0) == 0
    return int(turns._ATTRIBUTES.unpack(memory.raw)[5])


@pytest.mark.skipif(platform.machine() not in turns._CALLS, reason="asks only where the number of the call is known")
def test_threads_started_later_have_short_turns_too() -> None:
    def ask_then_start() -> tuple[bool, int]:
        return turns.take_short_turns(), _in_a_thread(_turn_ns)

    before_ns = _turn_ns()
    granted, turn_ns = _in_a_thread(ask_then_start)

    assert (turn_ns == 200_000) == granted
    assert _turn_ns() == before_ns


def test_a_process_keeps_the_niceness_it_was_given() -> None:
    def ask() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        turns.take_short_turns()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)

    assert _in_a_thread(ask) == (7, os.SCHED_OTHER)


def test_a_policy_chosen_by_an_operator_stays() -> None:
    def ask() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return turns.take_short_turns(), os.sched_getscheduler(0)

    assert _in_a_thread(ask) == (False, os.SCHED_BATCH)


def test_elsewhere_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "m68k")
    assert not turns.take_short_turns()

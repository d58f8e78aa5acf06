"""The loop in virtual time, its processes and its threads."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
import uuid
from typing import Any

import pytest

from millstream.testing.threads import Event, Thread
from millstream.testing.virtual_loop import Stuck, VirtualLoop, run


def test_a_day_passes_at_once_and_timers_keep_their_order() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        order: list[str] = []
        for delay_s, name in ((86_400, "day"), (1, "second"), (3_600, "hour")):
            loop.call_later(delay_s, order.append, name)
        await asyncio.sleep(90_000)
        return order

    started_s = time.monotonic()
    assert run(main) == ["second", "hour", "day"]
    assert time.monotonic() - started_s < 5


def test_the_whole_program_lives_in_virtual_time_and_the_real_world_comes_back() -> None:
    async def main(loop: VirtualLoop) -> float:
        clocks = (time.time, time.monotonic, time.perf_counter)
        clocks_ns = (time.time_ns, time.monotonic_ns, time.perf_counter_ns)
        before, before_ns = [clock() for clock in clocks], [clock() for clock in clocks_ns]
        await asyncio.sleep(100)
        after, after_ns = [clock() for clock in clocks], [clock() for clock in clocks_ns]
        passed = [late - soon for late, soon in zip(after, before, strict=True)]
        passed += [(late - soon) / 1e9 for late, soon in zip(after_ns, before_ns, strict=True)]
        assert passed == pytest.approx([100] * 6)
        return time.time()

    real = time.time
    run(main)
    assert time.time is real


def test_a_wall_clock_that_jumps_moves_no_timer() -> None:
    async def main(loop: VirtualLoop) -> None:
        clock = loop.processes[0].clock
        wall_us = clock.now_us()
        clock.jump(-3600)
        assert clock.now_us() - wall_us == -3_600_000_000
        before_ms = clock.monotonic_ms()
        await clock.advance("30s")
        assert clock.monotonic_ms() - before_ms == 30_000

    run(main)


def test_one_seed_is_one_run() -> None:
    async def main(_: VirtualLoop) -> Any:
        return random.random(), secrets.token_hex(8), uuid.uuid4(), random.SystemRandom().random()

    assert run(main, seed=4) == run(main, seed=4)
    assert run(main, seed=4) != run(main, seed=5)


def test_everybody_waiting_for_nothing_is_found_out() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stuck, match="everybody waits"):
        run(main)


def test_running_in_circles_is_found_out() -> None:
    async def main(_: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110 - the very thing
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="time does not go on"):
        run(main)


def test_a_killed_process_has_no_last_word() -> None:
    words: list[str] = []

    async def victim() -> None:
        asyncio.get_running_loop().call_later(5, words.append, "timer")
        helper = asyncio.create_task(asyncio.sleep(1))
        try:
            await helper
            words.append("alive")
            await asyncio.sleep(10)
            words.append("not killed")
        finally:
            words.append("finally")

    async def main(loop: VirtualLoop) -> list[str]:
        process = loop.process("victim")
        process.start(victim())
        await asyncio.sleep(2)
        process.kill()
        await asyncio.sleep(100)
        return list(words)

    assert run(main) == ["alive"]


def test_a_process_that_is_killed_from_within_does_nothing_more_than_finish_the_step() -> None:
    done: list[str] = []

    async def main(loop: VirtualLoop) -> list[str]:
        process = loop.process("victim")

        async def suicide() -> None:
            process.kill()
            done.append("rest of the step")
            loop.call_soon(done.append, "callback")
            await asyncio.sleep(0)
            done.append("next step")

        process.start(suicide())
        await asyncio.sleep(1)
        return list(done)

    assert run(main) == ["rest of the step"]


def test_threads_block_in_virtual_time_and_take_turns() -> None:
    async def main(loop: VirtualLoop) -> list[object]:
        notes: list[object] = []
        bell = Event()

        def work() -> None:
            notes.append(bell.wait(5))
            notes.append(time.monotonic())
            notes.append(bell.wait(60))
            notes.append(time.monotonic())

        thread = Thread(work)
        thread.start()
        loop.call_later(20, bell.set)
        await asyncio.to_thread(thread.join)
        assert not thread.is_alive()
        return notes

    assert run(main) == [False, pytest.approx(5), True, pytest.approx(20)]


def test_a_thread_of_a_killed_process_never_goes_on() -> None:
    notes: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        bell = Event()

        def work() -> None:
            notes.append("begun")
            bell.wait()
            notes.append("woken")

        async def start() -> None:
            Thread(work).start()

        process = loop.process("victim")
        process.start(start())
        await asyncio.sleep(1)
        process.kill()
        bell.set()
        await asyncio.sleep(1)

    before = threading.active_count()
    run(main)
    assert notes == ["begun"]
    assert threading.active_count() == before, "the thread was left behind"


def test_other_threads_of_the_program_stay_in_the_real_world() -> None:
    async def main(_: VirtualLoop) -> float:
        await asyncio.sleep(10_000_000)
        seen: list[float] = []
        thread = threading.Thread(target=lambda: seen.append(time.monotonic()))
        thread.start()
        thread.join()
        return seen[0]

    assert run(main) == pytest.approx(time.monotonic(), abs=60)

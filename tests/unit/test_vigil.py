"""When a loop stays awake: while requests and answers come at once, again and again, and not a moment longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from millstream.vigil import Vigil


class _Loop:
    """Calls soon when it is told to, and shows what waits."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class _World:
    def __init__(self, stay_us: int = 200) -> None:
        self.loop = _Loop()
        self.now_us = 1_000_000
        self.vigil = Vigil(self.loop, stay_us, lambda: self.now_us * 1000)  # type: ignore[arg-type]

    def go_on(self, client: str, times: int = 1, every_us: int = 100) -> None:
        for _ in range(times):
            self.now_us += every_us
            self.vigil.step(client)
            self.loop.turn()

    def publish(self, client: str, *, disk_us: int, times: int = 1) -> None:
        """A request, which the disk delays, and its answer."""
        for _ in range(times):
            self.now_us += 100
            self.vigil.step(client, awaits_disk=True)
            self.loop.turn()
            self.now_us += disk_us
            self.vigil.step(client)
            self.loop.turn()


def test_a_client_that_asks_at_once_again_and_again_keeps_the_loop_awake() -> None:
    world = _World()
    world.go_on("one", times=32)
    assert not world.loop.soon, "a few requests may be all there are"
    world.go_on("one", times=4)
    assert world.loop.soon


def test_it_falls_asleep_when_the_next_request_does_not_come() -> None:
    world = _World()
    world.go_on("one", times=40)
    world.now_us += 200
    world.loop.turn()
    assert world.loop.soon
    world.now_us += 1
    world.loop.turn()
    assert not world.loop.soon
    world.go_on("one", times=5)
    assert not world.loop.soon, "the client has to show its pace again"


def test_who_is_late_now_and_then_is_waited_for_all_the_same() -> None:
    world = _World()
    world.go_on("one", times=100)
    for _ in range(20):
        world.go_on("one", every_us=500)
        world.go_on("one", times=19)
        assert world.loop.soon


@pytest.mark.parametrize("prompt", [0, 1, 5, 10])
def test_who_is_late_more_often_is_not_waited_for_however_prompt_it_was_before(prompt: int) -> None:
    world = _World()
    world.go_on("one", times=1000)
    for _ in range(20):
        world.go_on("one", every_us=500)
        world.go_on("one", times=prompt)
    world.now_us += 201
    world.loop.turn()
    world.go_on("one", times=prompt)
    assert not world.loop.soon


@pytest.mark.parametrize("every_us", [201, 1000])
def test_a_client_that_takes_its_time_is_not_waited_for(every_us: int) -> None:
    world = _World()
    world.go_on("one", times=100, every_us=every_us)
    assert not world.loop.soon


def test_the_disk_may_take_twice_as_long_as_a_client() -> None:
    world = _World()
    world.publish("one", disk_us=400, times=20)
    assert world.loop.soon
    world.now_us += 201
    world.loop.turn()
    assert not world.loop.soon, "now it is the client who is late"


def test_a_slow_disk_is_not_waited_for() -> None:
    world = _World()
    world.publish("one", disk_us=401, times=100)
    assert not world.loop.soon


def test_a_second_client_ends_it() -> None:
    world = _World()
    world.go_on("one", times=40)
    world.go_on("two")
    world.loop.turn()
    assert not world.loop.soon
    for _ in range(50):
        world.go_on("one")
        world.go_on("two")
    assert not world.loop.soon


def test_it_can_be_switched_off() -> None:
    world = _World(stay_us=0)
    world.go_on("one", times=100, every_us=1)
    assert not world.loop.soon


def test_it_looks_out_only_once_at_a_time() -> None:
    world = _World()
    for _ in range(50):
        world.now_us += 10
        world.vigil.step("one")
    assert len(world.loop.soon) == 1


def test_nothing_is_kept_of_a_client_that_is_gone_nor_waited_for() -> None:
    class _Client:
        pass

    world, client = _World(), _Client()
    for _ in range(40):
        world.now_us += 100
        world.vigil.step(client)
        world.loop.turn()
    assert world.loop.soon
    seen = weakref.ref(client)
    world.vigil.forget(client)
    del client
    assert seen() is None
    world.loop.turn()
    assert not world.loop.soon


def test_another_client_that_goes_does_not_disturb_the_one_that_is_waited_for() -> None:
    world = _World()
    world.go_on("one", times=40)
    world.vigil.forget("two")
    world.go_on("one")
    assert world.loop.soon

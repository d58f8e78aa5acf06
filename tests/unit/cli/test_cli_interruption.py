"""A signal ends the loop between two items, and never between using an item and noting that it was used."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from millstream.cli.interruption import Insisted, Interruption, _Heard, cut_short, endless, listen


@pytest.fixture(autouse=True)
def no_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have heard is long ago."""
    monkeypatch.setattr(_Heard, "number", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_work_lets_it_finish(number: int) -> None:
    done = []
    with Interruption() as interruption:
        for item in interruption.until_asked(range(5)):
            if item == 2:
                os.kill(os.getpid(), number)
            done.append(item)
    assert done == [0, 1, 2]
    assert interruption.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_ends_the_wait(number: int) -> None:
    def source() -> Iterator[int]:
        yield 0
        os.kill(os.getpid(), number)
        pytest.fail("the wait went on")

    with Interruption() as interruption:
        assert list(interruption.until_asked(source())) == [0]
    assert interruption.asked


def test_a_second_signal_interrupts_whatever_is_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interruption() as interruption:
        for _ in interruption.until_asked(range(5)):
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(_Heard, "at_s", time.monotonic() - 1)
            with pytest.raises(Insisted):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_at_once_is_one(number: int) -> None:
    """`timeout` sends it to the program and then to the group of the program."""
    done = []
    with Interruption() as interruption:
        for item in interruption.until_asked(range(5)):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append(item)
    assert done == [0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_says_which_signal_has_cut_something_short(number: int, code: int) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        listen()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert cut_short() == code
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_who_reads_without_an_end_may_be_ended_at_any_time_but_not_by_force() -> None:
    with endless():
        raise KeyboardInterrupt
    with pytest.raises(Insisted), endless():
        raise Insisted


def test_without_a_signal_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert list(interruption.until_asked("abc")) == ["a", "b", "c"]
    assert not interruption.asked
    assert signal.getsignal(signal.SIGINT) is before


def test_errors_of_the_source_pass_through() -> None:
    def source() -> Iterator[int]:
        yield 0
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), Interruption() as interruption:
        list(interruption.until_asked(source()))

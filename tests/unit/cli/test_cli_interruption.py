"""A signal ends the loop between two items, and never between using an item and noting that it was used."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from millstream.cli.interruption import Interruption


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


def test_a_second_signal_interrupts_whatever_is_going_on() -> None:
    with Interruption() as interruption:
        for _ in interruption.until_asked(range(5)):
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)


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

"""What a test says that has waited in vain."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import eventually, eventually_async


def test_who_waits_in_vain_is_told_for_what_and_what_there_was_instead() -> None:
    letters: list[str] = []
    with pytest.raises(AssertionError, match=r"not within 0.01 s: a letter; the last answer was \[\]"):
        eventually(lambda: letters, "a letter", within_s=0.01)
    with pytest.raises(AssertionError, match=r"lambda: len\(letters\) == 3.*; the last answer was False"):
        eventually(lambda: len(letters) == 3, within_s=0.01)
    with pytest.raises(AssertionError, match="the last answer was 0"):
        eventually(letters.__len__, within_s=0.01)


def test_a_loop_waits_for_answers_that_come_later() -> None:
    asked = 0

    async def third_time() -> int:
        nonlocal asked
        asked += 1
        return asked // 3

    async def never() -> None:
        await asyncio.Event().wait()

    async def refused() -> None:
        raise TimeoutError("the broker does not answer")

    async def body() -> None:
        await eventually_async(third_time)
        await eventually_async(lambda: asked == 3)
        with pytest.raises(AssertionError, match=r"not within 0.01 s: an answer"):
            await eventually_async(never, "an answer", within_s=0.01)
        with pytest.raises(TimeoutError, match="the broker does not answer"):
            await eventually_async(refused)

    asyncio.run(body())

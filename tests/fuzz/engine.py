"""Runs targets: for a moment in the tests, for minutes with libFuzzer, and once more to see which lines they reach."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.doors import HttpTarget, MqttTarget, NativeTarget, WebSocketTarget
from tests.fuzz.files import BackupTarget, ConfigTarget, LogTarget, PipelineTarget
from tests.fuzz.target import HERE, Harm, Target, listening, read_inputs, write_inputs

__all__ = ["TARGETS", "Runner", "brief_run", "replay", "smallest"]

#: Of a brief run, however slow the machine is.
_RUNS_MIN = 12

TARGETS: dict[str, Callable[[], Target]] = {
    kind.name: kind
    for kind in (
        *(NativeTarget, MqttTarget, HttpTarget, WebSocketTarget),
        *(LogTarget, BackupTarget, PipelineTarget, ConfigTarget),
    )
}


@dataclass
class Runner:
    """Tries inputs one after the other, and keeps those that do harm."""

    target: Target
    save_to: Path | None = None
    runs: int = 0
    #: What went wrong, by where.
    harms: dict[str, str] = field(default_factory=dict)
    _history: list[bytes] = field(default_factory=list)

    def run(self, data: bytes) -> None:
        self.runs += 1
        self._history.append(data)
        try:
            self.target.try_input(data)
        except Harm as harm:
            self._found(harm)
        if self.target.is_worn:
            self._renew()

    def _renew(self) -> None:
        self.target.renew()
        self._history.clear()

    def _found(self, harm: Harm) -> None:
        place = _without_numbers(harm.place)
        if place not in self.harms:
            self.harms[place] = str(harm)
            if self.save_to is not None:
                name = re.sub(r"\W+", "-", place)[:80].strip("-").lower()
                write_inputs(self.save_to / self.target.name / f"{name}.txt", self._enough(place))
        self._renew()

    def _enough(self, place: str) -> list[bytes]:
        """The last input if it does it alone, otherwise those before it that it takes."""
        inputs = list(self._history)
        if self._does_it(inputs[-1:], place):
            return inputs[-1:]
        size = len(inputs) // 2
        while size:
            at = 0
            while at < len(inputs) - 1:
                fewer = inputs[:at] + inputs[at + size :]
                if fewer and self._does_it(fewer, place):
                    inputs = fewer
                else:
                    at += size
            size //= 2
        return inputs

    def _does_it(self, inputs: Sequence[bytes], place: str) -> bool:
        self.target.renew()
        for data in inputs:
            try:
                self.target.try_input(data)
            except Harm as harm:
                return _without_numbers(harm.place) == place
        return False


def _without_numbers(place: str) -> str:
    """Times and sizes differ from run to run, lines from version to version."""
    kind, _, rest = place.partition(" at ")
    where = rest.split(": ", 1)[0]
    return f"{kind} at {where}" if where else re.sub(r"[\d.]+", "N", place)


def brief_run(name: str, seconds: float, seed: int = 0) -> Runner:
    """Seeds and what comes of them by chance, for so many seconds of the processor, and a few of them at least.

    They are the same in each run, as far as it gets.
    """
    with listening():
        target = TARGETS[name]()
        runner, random = Runner(target), Random(seed)
        until_s = time.process_time() + seconds
        try:
            while runner.runs < _RUNS_MIN or time.process_time() < until_s:
                data = random.choice(target.corpus)
                runner.run(target.mutate(data, random) if runner.runs % 4 else data)
        finally:
            target.renew()
    return runner


def replay(name: str, file: Path) -> None:
    """Inputs that once did harm, in their order.  Raises Harm."""
    with listening():
        target = TARGETS[name]()
        try:
            for data in read_inputs(file):
                target.try_input(data)
        finally:
            target.renew()


class _Lines:
    """Lines of the product that are reached while this is in force."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, int]] = set()
        self._inside = str(HERE.parents[1] / "src" / "millstream")

    def __enter__(self) -> _Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._inside) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def smallest(name: str, inputs: Iterable[bytes], *, seconds: float = 60.0) -> tuple[list[bytes], int]:
    """Of inputs, the short ones first, those that reach lines which no other has reached; and how many these are."""
    with listening():
        target = TARGETS[name]()
        lines, kept, until_s = _Lines(), [], time.monotonic() + seconds
        seeds = set(target.seeds())
        try:
            for data in (*sorted(seeds, key=len), *sorted(set(inputs) - seeds, key=len)):
                before = len(lines.reached)
                with lines:
                    try:
                        target.try_input(data)
                    except Harm:
                        continue
                if len(lines.reached) > before and data not in seeds:
                    kept.append(data)
                if target.is_worn:
                    target.renew()
                if time.monotonic() > until_s:
                    break
        finally:
            target.renew()
    return kept, len(lines.reached)

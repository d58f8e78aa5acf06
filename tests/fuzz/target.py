"""What is fuzzed, and what counts as harm."""

from __future__ import annotations

import base64
import gc
import logging
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Final

import structlog

from tests.fuzz.mutation import bend, mutate_units

__all__ = ["HERE", "Harm", "Target", "listening", "notice", "read_inputs", "write_inputs"]

HERE: Final = Path(__file__).parent
#: Of real time, on a machine that has other things to do.
_HANGS_S: Final = 30.0
#: What one small input may make the process grow by.
GROWTH_BYTES_MAX: Final = 256 * 1024 * 1024


class Harm(Exception):
    """An input did what no input may do.  Its text says what, and where."""

    @property
    def place(self) -> str:
        """The same for the same mistake."""
        return str(self).split("\n", 1)[0]


class Target:
    """One reader of bytes.  Kinds say how inputs look and what to do with one."""

    name: str
    #: Of inputs.
    bytes_max = 64 * 1024
    #: Nothing that one client sends may keep all others waiting for so long; seconds of the processor.
    slow_s = 1.0

    def seeds(self) -> list[bytes]:
        """Inputs that are in order."""
        raise NotImplementedError

    def split(self, data: bytes) -> list[bytes]:
        """The units of an input."""
        return [data]

    def join(self, units: Sequence[bytes]) -> bytes:
        """Units as an input, with what belongs around them."""
        return b"".join(units)

    def change(self, random: Random, unit: bytes) -> bytes:
        """A unit with something else in it."""
        return bend(random, unit)

    def use(self, data: bytes) -> None:
        """Give it to the reader; raises whatever it raises, beyond what it may."""
        raise NotImplementedError

    def kept_waiting_s(self, took_s: float) -> float:
        """How long others had to wait for the last input, which took so much of the processor."""
        return took_s

    #: Whether inputs so far may have left too much behind.
    is_worn = True

    def renew(self) -> None:
        """Forget all inputs so far."""

    # --- the same for all ----------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> list[bytes]:
        file = HERE / "corpus" / f"{self.name}.txt"
        return [*self.seeds(), *(read_inputs(file) if file.exists() else ())]

    @cached_property
    def _known_units(self) -> list[bytes]:
        return list(dict.fromkeys(unit for data in self.corpus for unit in self.split(data))) or [b""]

    def mutate(self, data: bytes, random: Random) -> bytes:
        if not random.randrange(8):
            return bend(random, data)[: self.bytes_max]
        return self.join(mutate_units(random, self.split(data), self._known_units, self.change))[: self.bytes_max]

    def try_input(self, data: bytes) -> None:
        """Raises Harm."""
        before_bytes, began_s = _peak_bytes(), time.process_time()
        complaints.clear()
        try:
            with _hang_is_an_error():
                self.use(data)
        except Harm:
            raise
        except Exception as problem:
            raise Harm(_described(problem)) from problem
        finally:
            took_s = time.process_time() - began_s
        if complaints:
            raise Harm(complaints[0])
        if (waited_s := self.kept_waiting_s(took_s)) > self.slow_s:
            raise Harm(f"took {waited_s:.1f} s")
        if _peak_bytes() - before_bytes > GROWTH_BYTES_MAX:
            raise Harm(f"took {(_peak_bytes() - before_bytes) >> 20} MiB of memory")


def read_inputs(file: Path) -> list[bytes]:
    return [base64.b64decode(line) for line in file.read_text().splitlines()]


def write_inputs(file: Path, inputs: Sequence[bytes]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{base64.b64encode(data).decode()}\n" for data in inputs))


# --- what is noticed ---------------------------------------------------------------------------------------------

#: What the broker logged as an exception since the last input: it promises that there is none.
complaints: Final[list[str]] = []


def _described(problem: BaseException) -> str:
    frames = traceback.extract_tb(problem.__traceback__)
    inside = [frame for frame in frames if "/millstream/" in frame.filename] or frames[-1:]
    where = f"{inside[-1].filename.rpartition('/millstream/')[2]}:{inside[-1].lineno}" if inside else "?"
    said = str(problem).split("\n", 1)[0][:200]
    return f"{type(problem).__name__} at {where}: {said}\n" + "".join(traceback.format_exception(problem))


def notice(problem: object, event: str = "") -> None:
    complaints.append(_described(problem) if isinstance(problem, BaseException) else f"{event}: {problem}")


def _listen(_logger: Any, method: str, entry: Any) -> Any:
    about = entry.get("exc_info")
    if about is True:
        about = sys.exc_info()[1]
    if isinstance(about, BaseException):
        notice(about)
    elif method in ("exception", "critical"):
        notice(entry, "logged")
    raise structlog.DropEvent


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            notice(record.exc_info[1])
        elif record.levelno >= logging.ERROR:
            notice(record.getMessage(), record.name)


@contextmanager
def listening() -> Iterator[None]:
    """While this lasts, what is logged goes to `complaints` instead."""
    gc.collect()  # what asyncio has to say about brokers that were abandoned before is none of ours
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    structlog.configure(processors=[_listen], cache_logger_on_first_use=False)
    root.handlers[:] = [_Handler()]
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Hangs(Exception):
    """It goes on and on."""


@contextmanager
def _hang_is_an_error() -> Iterator[None]:
    def ring(_number: int, _frame: object) -> None:
        raise Hangs(f"no end after {_HANGS_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, _HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if callable(before):  # pytest has one, too
            signal.setitimer(signal.ITIMER_REAL, others_s)

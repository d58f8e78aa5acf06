"""What the broker lets itself be asked for, from how much disk and memory it has left.

| mode | entered when | allowed |
|---|---|---|
| normal | | everything |
| throttled | memory is above the warning limit | everything; confirmations are delayed |
| read-only | the disk is nearly full, or its state cannot be stored | everything but publishing |
| emergency | memory is above the critical limit | existing connections, everything but publishing |
| maintenance | an operator says so | administration |

A limit that was crossed counts until there is some room to spare, so that the broker does not flap.  Memory must be
over a limit twice in a row: it jumps.  The disk once: a full disk forgives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["Mode", "ModeRules", "Modes", "Situation"]

Mode: TypeAlias = Literal["normal", "throttled", "read-only", "emergency", "maintenance"]

#: How far below (memory) or above (disk) its limit a measure must be before the limit is forgotten.
_MEMORY_FACTOR: Final = 0.9
_DISK_FACTOR: Final = 1.1
_AGREEING: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRules:
    """The limits; 0 = not watched."""

    free_bytes_min: int
    memory_bytes_warning: int = 0
    memory_bytes_critical: int = 0


class Situation(NamedTuple):
    """What was measured."""

    free_bytes: int
    memory_bytes: int = 0
    #: Why the broker cannot record what it must remember, if so.
    storage_failure: str | None = None


class _Limit:
    """A limit that memory crosses: it takes two samples to enter, and some room to leave."""

    __slots__ = ("_above", "_bytes", "crossed")

    def __init__(self, limit_bytes: int) -> None:
        self._bytes = limit_bytes
        self._above = 0
        self.crossed = False

    def observe(self, memory_bytes: int) -> None:
        if not self._bytes:
            return
        self._above = self._above + 1 if memory_bytes >= self._bytes else 0
        if self._above >= _AGREEING:
            self.crossed = True
        elif memory_bytes < self._bytes * _MEMORY_FACTOR:
            self.crossed = False


class Modes:
    """The mode and the reason for it."""

    def __init__(self, rules: ModeRules) -> None:
        self._rules = rules
        self._warning = _Limit(rules.memory_bytes_warning)
        self._critical = _Limit(rules.memory_bytes_critical)
        self._disk_is_full = False
        self._maintenance: str | None = None
        self._situation = Situation(free_bytes=rules.free_bytes_min)
        self.mode: Mode = "normal"
        self.reason = ""

    @property
    def accepts_messages(self) -> bool:
        return self.mode in ("normal", "throttled")

    @property
    def accepts_connections(self) -> bool:
        return self.mode != "emergency"

    @property
    def serves(self) -> bool:
        """Whether messages are handed out."""
        return self.mode != "maintenance"

    def observe(self, situation: Situation) -> bool:
        """Take in a measurement; True when the mode changed."""
        self._situation = situation
        self._warning.observe(situation.memory_bytes)
        self._critical.observe(situation.memory_bytes)
        limit = self._rules.free_bytes_min
        self._disk_is_full = situation.free_bytes < limit * (_DISK_FACTOR if self._disk_is_full else 1)
        return self._decide()

    def maintain(self, reason: str | None) -> bool:
        """An operator begins maintenance, or ends it (None); True when the mode changed."""
        self._maintenance = reason
        return self._decide()

    def _decide(self) -> bool:
        before = self.mode
        rules, now = self._rules, self._situation
        if self._maintenance is not None:
            self.mode, self.reason = "maintenance", self._maintenance or "an operator works on the broker"
        elif self._critical.crossed:
            limit = rules.memory_bytes_critical
            self.mode = "emergency"
            self.reason = f"the broker uses {now.memory_bytes:,} bytes of memory; the limit is {limit:,}"
        elif now.storage_failure is not None:
            self.mode, self.reason = "read-only", f"the broker cannot record its state: {now.storage_failure}"
        elif self._disk_is_full:
            self.mode = "read-only"
            few = "below" if now.free_bytes < rules.free_bytes_min else "not yet 10 % above"
            self.reason = f"the disk has {now.free_bytes:,} bytes left, {few} storage.free_bytes_min"
            self.reason += f" ({rules.free_bytes_min:,})"
        elif self._warning.crossed:
            limit = rules.memory_bytes_warning
            self.mode = "throttled"
            self.reason = f"the broker uses {now.memory_bytes:,} bytes of memory; it slows down above {limit:,}"
        else:
            self.mode, self.reason = "normal", ""
        return self.mode != before

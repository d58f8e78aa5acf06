"""What a page of the documentation asks its reader to type: commands and programs, in their order."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Step", "block", "resembles", "steps"]

ROOT = Path(__file__).parents[3]

_FENCE = re.compile(r"^( *)```(console|python)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
#: What differs from run to run, and the word that stands for it.
_PASSING = (
    (r"\b01[0-9A-HJKMNP-TV-Z]{24}\b", "<id>"),
    (r"\bms_[0-9a-f]{12}_\S+", "<key>"),
    (r"(:\d+){3}:[0-9a-f]{16}\b", "<receipt>"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z?", "<time>"),
    (r"\+[\d.]+ (ms|s|m|h|d)\b", "<later>"),
    (r"(?<=[a-z0-9]):\d{4,5}\b", ":<port>"),
    (r"(?<=\S)#\d+\b", "#<n>"),
    (r"\s+# .*", ""),
    (r"\s+", " "),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A command with what it is said to print, or a program."""

    page: str
    line: int
    language: str
    text: str
    shown: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def steps(page: str) -> list[Step]:
    text = (ROOT / page).read_text()
    found = []
    for fence in _FENCE.finditer(text):
        language, block = fence[2], textwrap.dedent(fence[3])
        first = text.count("\n", 0, fence.start()) + 2
        if language == "python":
            found.append(Step(page, first, language, block))
            continue
        for command in _COMMAND.finditer(block):
            line = first + block.count("\n", 0, command.start())
            found.append(Step(page, line, language, re.sub(r"\\\n\s*", " ", command[1]), command[2]))
    return found


def block(page: str, language: str) -> str:
    """The only block of this language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def resembles(said: str, shown: str) -> bool:
    """Whether this is what the page shows, whatever the time and the ids.  Of JSON a page may show a part: `…`."""
    if shown.lstrip().startswith(("{", "[")):
        keys = set(re.findall(r'"(\w+)":', shown))
        return keys <= _keys(json.loads(said)) if "…" in shown else keys == _keys(json.loads(said))
    return _outline(said) == _outline(shown)


def _keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_keys, value))
    return set(value).union(*map(_keys, value.values())) if isinstance(value, dict) else set()


def _outline(text: str) -> list[str]:
    lines = text.splitlines()
    for pattern, word in _PASSING:
        lines = [re.sub(pattern, word, line) for line in lines]
    return [line.strip() for line in lines if line.strip()]

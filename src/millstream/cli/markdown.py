"""What the reference pages are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["NOTICE", "cell", "table"]

NOTICE: Final = "<!-- Written by `python -m millstream.cli.reference`; do not edit. -->"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: str, rows: Iterable[str]) -> str:
    """Rows under a header, all as `| one | two |`."""
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows])

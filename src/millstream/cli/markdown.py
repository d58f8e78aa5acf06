"""What the reference pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["NOTICE", "cell", "paragraphs", "table"]

NOTICE: Final = "<!-- Written by `python -m millstream.cli.reference`; do not edit. -->"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: str, rows: Iterable[str]) -> str:
    """Rows under a header, all as `| one | two |`."""
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows])


def paragraphs(text: str | None) -> Iterator[str]:
    """A text of the code as lines, one for each paragraph."""
    for paragraph in (text or "").split("\n\n"):
        if paragraph.strip():
            yield " ".join(paragraph.split())

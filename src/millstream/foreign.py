"""Text of others within our own words: shown, never obeyed.

A consumer's name, or an error text that somebody sent, may hold characters that a terminal acts upon or that turn the
direction of writing.  Putting such text between isolating characters does not help, because the text may close the
isolation itself.  So these characters are made visible.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["in_a_sentence", "visible"]

# Everything a terminal acts upon except tab and newline, bytes that are no text (decoded to surrogates), and what
# embeds, overrides or isolates a direction of writing.
_ACTS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with everything that would act upon what stands around it written as a number."""
    return _ACTS.sub(lambda match: _number(ord(match[0])), text)


def in_a_sentence(text: str) -> str:
    """As `visible`, on one line, to be a part of a sentence."""
    return visible(" ".join(text.split()))


def _number(sign: int) -> str:
    return f"\\u{sign:04x}" if 0x100 <= sign < 0xD800 else f"\\x{sign & 0xFF:02x}"

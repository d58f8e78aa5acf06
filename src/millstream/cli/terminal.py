"""Text of others on a terminal: shown, never obeyed."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["terminal_safe"]

# Everything a terminal acts upon except tab and newline, and bytes that are no text (decoded to surrogates): a message
# must not be able to move the cursor or worse.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff]")


def terminal_safe(text: str) -> str:
    """The text with everything that a terminal would act upon made visible."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)

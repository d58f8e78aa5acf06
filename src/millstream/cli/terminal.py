"""Text of others on a terminal: shown, never obeyed."""

from __future__ import annotations

from millstream.foreign import visible

__all__ = ["terminal_safe"]


def terminal_safe(text: str) -> str:
    """The text with everything that a terminal would act upon made visible."""
    return visible(text)

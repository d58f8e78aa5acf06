"""What all control calls and answers have in common, so that each family of calls can have a module of its own."""

from __future__ import annotations

import msgspec

__all__ = ["AnswerForm", "CallForm"]


class CallForm(msgspec.Struct, kw_only=True, tag_field="op", omit_defaults=True):
    """A request: a JSON object whose `op` (the class's tag) names it."""


class AnswerForm(msgspec.Struct, kw_only=True):
    """A JSON object that answers a call, or a part of one."""

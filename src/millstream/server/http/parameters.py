"""Query parameters and fields that many endpoints have, with their bounds; these are in the OpenAPI document too."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from millstream.durations import DURATION_MS_MAX
from millstream.settings import EXACT_MAX

__all__ = ["Count", "DurationMs", "Limit", "Page", "TimeMs", "WaitMs"]

Limit = Annotated[int, Meta(ge=1, le=1000, description="Entries in one answer.")]
Count = Annotated[int, Meta(ge=0, le=EXACT_MAX)]
#: Until the end of the year 9999.
TimeMs = Annotated[int, Meta(ge=0, le=253_402_300_799_999, description="UTC, milliseconds since 1970.")]
DurationMs = Annotated[int, Meta(ge=0, le=DURATION_MS_MAX, description="Milliseconds.")]
WaitMs = Annotated[int, Meta(ge=0, le=60_000, description="How long to wait if there is nothing, in milliseconds.")]


class Page(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a list."""

    limit: Limit = 50
    #: Entries to leave out at the beginning.
    offset: Count = 0

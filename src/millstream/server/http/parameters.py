"""Query parameters and fields that many endpoints have, with their bounds; these are in the OpenAPI document too."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = ["Count", "DurationMs", "Limit", "Page", "TimeMs", "WaitMs"]

#: Whole numbers beyond this are not exact in every reader of JSON.
EXACT_MAX: Final = 2**53

Limit = Annotated[int, Meta(ge=1, le=1000, description="Entries in one answer.")]
Count = Annotated[int, Meta(ge=0, le=EXACT_MAX)]
#: Until the end of the year 9999.
TimeMs = Annotated[int, Meta(ge=0, le=253_402_300_799_999, description="UTC, milliseconds since 1970.")]
DurationMs = Annotated[int, Meta(ge=0, le=36_500 * 86_400_000, description="Milliseconds.")]
WaitMs = Annotated[int, Meta(ge=0, le=60_000, description="How long to wait if there is nothing, in milliseconds.")]


class Page(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a list."""

    limit: Limit = 50
    #: Entries to leave out at the beginning.
    offset: Count = 0

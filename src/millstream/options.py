"""Headers that speak to the broker or to the SDK, not to the application.  Their names begin with `millstream-`.

The broker looks into headers only of batches that say so with the OPTIONS flag; the SDK sets it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BROKER_OPTIONS", "CORRELATION_ID", "DEDUP_ID", "LEASE_MS", "MAX_RETRIES", "REPLY_TO", "SCHEDULED_ID"]

#: A publish that repeats one with the same id, within the topic's dedup window, is not stored again.
DEDUP_ID: Final = "millstream-dedup-id"
#: How long a lease of this message lasts.
LEASE_MS: Final = "millstream-lease-ms"
#: How often this message is tried again, whatever the retry policy says.
MAX_RETRIES: Final = "millstream-max-retries"
#: Those the broker acts on.
BROKER_OPTIONS: Final = frozenset((DEDUP_ID, LEASE_MS, MAX_RETRIES))

#: The id under which the message was scheduled.
SCHEDULED_ID: Final = "millstream-scheduled-id"
REPLY_TO: Final = "millstream-reply-to"
CORRELATION_ID: Final = "millstream-correlation-id"

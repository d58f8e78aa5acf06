"""Which partition a key lives in: one rule for every client and for the broker itself."""

from __future__ import annotations

import mmh3

__all__ = ["key_partition"]


def key_partition(key: bytes, partitions: int) -> int:
    """Murmur3 (32 bit, seed 0, unsigned) modulo the number of partitions, in every language."""
    number: int = mmh3.hash(key, 0, False)
    return number % partitions

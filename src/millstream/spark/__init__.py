"""Spark reads and writes Millstream."""

from __future__ import annotations

from millstream.spark.session import session

__all__ = ["session"]

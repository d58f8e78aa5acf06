"""Spark looks for modules of this kind of name and registers what they call DefaultSource: the format `millstream`."""

from millstream.spark.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]

"""What the broker answers about pipelines, under the names that users write."""

from __future__ import annotations

from typing import Final

from millstream.wire.pipeline_calls import PipelineInfo
from millstream.wire.stage_calls import QueryInfo, StageInfo, StagesAborted

__all__ = ["QUERIES_MAX", "PipelineInfo", "QueryInfo", "StageInfo", "StagesAborted"]

#: In one answer; those that have something staged come first.
QUERIES_MAX: Final = 1_000

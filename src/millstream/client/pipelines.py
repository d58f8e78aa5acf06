"""What the broker answers about pipelines, under the names that users write."""

from __future__ import annotations

from millstream.wire.pipeline_calls import PipelineInfo

__all__ = ["PipelineInfo"]

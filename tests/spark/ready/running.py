"""Ready pipelines as a file names them, run as the runner runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from millstream.spark.pipelines.compiling import CompiledQuery, compile_pipeline
from millstream.spark.pipelines.loading import check_pipeline
from tests.spark.world import World


class Ready:
    """Pipelines of one broker in one directory."""

    def __init__(self, spark: Any, address: str, directory: Path, name: str = "tested") -> None:
        self.name = name
        self.spark = spark
        self.address = address
        self.directory = directory

    def query(self, ready: str, **options: Any) -> CompiledQuery:
        document = {"name": self.name, "broker": self.address, "ready": ready, "options": options}
        if ready in ("archive", "replay"):
            document["checkpoint"] = options.pop("checkpoint", "checkpoint")
        checked, mistakes = check_pipeline(yaml.safe_dump(document), self.directory)
        assert checked is not None, mistakes
        (query,) = compile_pipeline(self.spark, checked)
        return query

    def run(self, ready: str, stopped: Callable[[], bool] = lambda: False, **options: Any) -> int:
        """To its end; what a stream has to read now is all there is."""
        query = self.query(ready, **options)
        if not query.query.is_stream:
            return query.run_once("run-1", stopped)
        running = query.start({"availableNow": True})
        assert running.awaitTermination(120)
        return 0

    def facts(self, ready: str, **options: Any) -> dict[str, Any]:
        """What a report says to programs; what it says to people is beside it."""
        self.run(ready, report="report.html", json_file="report.json", **options)
        facts: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return facts

    @property
    def page(self) -> str:
        return (self.directory / "report.html").read_text()


__all__ = ["Ready", "World"]

"""Telling the broker how a pipeline is, and hearing whether it is to stop.  A broker that is away stops nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from millstream.errors import MillstreamError
from millstream.spark.connection import BrokerConnection
from millstream.spark.options import SinkOptions, Target
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.progress import Standing
from millstream.wire.pipeline_calls import PipelineWish

__all__ = ["Heartbeat", "Reporter", "report_target"]

#: Reports come again: none is worth a long wait.
_TIMEOUT_S = 2.0


def report_target(checked: Checked) -> Target:
    """The broker that a pipeline works with."""
    options = checked.sink_options(None)
    for source in checked.definition.sources.values():
        if source.kind != "parquet" and "bootstrap.servers" in (given := checked.source_options(source)):
            names = ("bootstrap.servers", "namespace", "token", "tls.ca")
            options = {name: given[name] for name in names if name in given}
            break
    return replace(SinkOptions.of(options).target, timeout_s=_TIMEOUT_S)


class Reporter:
    """Reports to one broker, over a connection of its own."""

    def __init__(self, target: Target, complain: Callable[[str], None]) -> None:
        self._connection = BrokerConnection(target)
        self._complain = complain
        self._complained = ""
        self._lock = threading.Lock()
        #: By a clock that only ticks.
        self.reported_s = time.monotonic()

    def report(self, standing: Standing) -> bool:
        """Whether the pipeline is wished to stop."""
        with self._lock:
            self.reported_s = time.monotonic()
            return self._report(standing)

    def _report(self, standing: Standing) -> bool:
        try:
            wish: PipelineWish = self._connection.call(standing.report(), PipelineWish)
        except MillstreamError as problem:
            if str(problem) != self._complained:
                self._complained = str(problem)
                self._complain(f"the broker does not hear how the pipeline is: {problem}")
            return False
        self._complained = ""
        return wish.stop

    def close(self) -> None:
        self._connection.close()


class Heartbeat:
    """Reports while nobody else does: Spark may take minutes to start, or to write what is no stream."""

    def __init__(
        self, reporter: Reporter, standing: Standing, stop: Callable[[], None], *, silence_s: float = 5.0
    ) -> None:
        self._reporter = reporter
        self._standing = standing
        self._stop = stop
        self._silence_s = silence_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pipeline-heartbeat", daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(self._silence_s / 2):
            silent_s = time.monotonic() - self._reporter.reported_s
            if silent_s >= self._silence_s and self._reporter.report(self._standing):
                self._stop()

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

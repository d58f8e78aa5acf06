"""A pipeline while it runs: the signals that end it, and what is shown of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from millstream.cli.output import duration_text, print_json_line, stderr, stdout
from millstream.cli.terminal import terminal_safe
from millstream.spark.pipelines.checkpoints import own_checkpoint
from millstream.spark.pipelines.definition import described
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.progress import BatchDone, Standing
from millstream.spark.pipelines.reporting import Heartbeat, Reporter, report_target
from millstream.spark.pipelines.runner import Runner
from millstream.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Screen", "run_pipeline"]

_STYLES: Final = {"running": "green", "waiting": "green", "finished": "green", "failed": "bold red"}
_OVER: Final = ("stopped", "finished", "failed")
#: What a report may say about what a pipeline does, with room for the rest of it.
_DEFINITION_BYTES_MAX: Final = 15_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run_pipeline(
    checked: Checked,
    *,
    until: Literal["stopped", "available-now", "once"],
    master: str | None,
    conf: Mapping[str, str],
    as_json: bool,
) -> Standing:
    """Run a pipeline to its end, and say on the way what it does."""
    own_checkpoint(checked, conf)
    standing = _standing(checked)
    reporter = Reporter(report_target(checked), _complain)
    started: list[SparkSession] = []

    def start() -> SparkSession:
        settings = {**checked.definition.spark, **conf}
        spark = session(f"millstream-{checked.definition.name}", master=master, conf=settings)
        spark.sparkContext.setLogLevel(os.environ.get("MILLSTREAM_SPARK_LOG", "OFF"))
        started.append(spark)
        signals.listen()  # Spark takes SIGINT for itself
        return spark

    watcher = Screen(as_json=as_json)
    runner = Runner(checked, standing, session=start, report=reporter.report, watcher=watcher, until=until)
    signals = _Signals(runner.stop)
    try:
        with signals, watcher, Heartbeat(reporter, standing, runner.stop):
            return runner.run()
    finally:
        reporter.close()
        for spark in started[-1:]:
            _end(spark)


def _standing(checked: Checked) -> Standing:
    definition = described(checked.document)
    if len(msgspec.json.encode(definition)) > _DEFINITION_BYTES_MAX:
        definition = {"description": checked.definition.description[:1000]}
    return Standing(
        name=checked.definition.name,
        run=uuid.uuid4().hex,
        sources=checked.topics_read()[:100],
        sinks=checked.topics_written()[:100],
        definition=definition,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ms=time.time_ns() // 1_000_000,
    )


def _complain(sentence: str) -> None:
    stderr.print(f"[yellow]note:[/]  {escape(terminal_safe(sentence))}", soft_wrap=True)


def _end(spark: SparkSession) -> None:
    try:
        spark.stop()
    except Exception as problem:  # the JVM may be gone already
        if os.environ.get("MILLSTREAM_DEBUG"):
            _complain(f"Spark did not stop in order: {problem}")


class _Signals:
    """The first signal asks for an end after the batch, the second one ends."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._asked = False
        self._before: list[Any] = []

    def listen(self) -> list[Any]:
        return [signal.signal(number, self._on_signal) for number in _SIGNALS]

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._stop()

    def __enter__(self) -> None:
        self._before = self.listen()

    def __exit__(self, *_: object) -> None:
        for number, before in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, before)


class Screen:
    """What is shown: a table that lives on a terminal, lines elsewhere, JSON for programs."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._live: Live | None = (
            None if as_json or not stdout.is_terminal else Live(console=stdout, auto_refresh=False)
        )
        self._said = ("", "")

    def __enter__(self) -> Screen:
        self._context().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context().__exit__(*error)

    def _context(self) -> AbstractContextManager[object]:
        return self._live or nullcontext()

    def changed(self, standing: Standing) -> None:
        if self._live is not None:
            self._live.update(render(standing), refresh=True)
            return
        said = (standing.state, standing.error)
        if said == self._said or {standing.state, self._said[0]} == {"running", "waiting"}:
            return
        news = standing.error if standing.error != self._said[1] or standing.state == "restarting" else ""
        self._said = said
        line = Text.assemble(f"{standing.name}: ", (standing.state, _STYLES.get(standing.state, "yellow")))
        stderr.print(line.append(f": {terminal_safe(news)}" if news else ""), soft_wrap=True)

    def batch(self, standing: Standing, done: BatchDone) -> None:
        if self._as_json:
            print_json_line({"pipeline": standing.name, **done.document()})
            sys.stdout.flush()
        elif self._live is not None:
            self._live.update(render(standing), refresh=True)
        else:
            lag = "" if done.lag < 0 else f", {done.lag:,} behind"
            rate = f"{done.rows:,} rows in {duration_text(done.took_ms)}, {done.rows_per_s:,.0f} per second"
            stdout.print(f"{done.query} batch {done.batch}: {rate}{lag}", markup=False, soft_wrap=True)


def render(standing: Standing) -> RenderableType:
    """A pipeline as a table: a line for each of its queries."""
    head = Text.assemble(
        (standing.name, "bold"),
        "  ",
        (standing.state, f"bold {_STYLES.get(standing.state, 'yellow')}"),
        f"  {standing.rows:,} rows  {standing.rows_per_s:,.0f}/s",
        "" if standing.lag < 0 else f"  {standing.lag:,} behind",
        f"  restarts {standing.restarts:,}" if standing.restarts else "",
    )
    if standing.error:
        head.append(f"\n{terminal_safe(standing.error)}", style="red")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in ("query", "state", "batch", "rows", "rows/s", "lag", "took"):
        table.add_column(column, justify="left" if column in ("query", "state") else "right", no_wrap=True)
    over = standing.state if standing.state in _OVER else ""
    for name, done in standing.latest.items():
        lag = standing.lags.get(name, -1)
        table.add_row(
            Text(name),
            over or ("waiting" if name in standing.idle else "running"),
            f"{done.batch:,}",
            f"{done.rows:,}",
            f"{0 if name in standing.idle else done.rows_per_s:,.0f}",
            "-" if lag < 0 else f"{lag:,}",
            duration_text(done.took_ms),
        )
    return Group(head, Text(), table)

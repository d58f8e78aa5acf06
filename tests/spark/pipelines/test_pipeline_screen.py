"""What `millstream pipeline run` shows, and that looking at a file starts nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

from millstream.cli.pipeline_run import Screen, render
from millstream.spark.pipelines.progress import BatchDone, Standing

DONE = BatchDone("topics", 3, 12_345, 4115.0, 42, 3000, "2026-01-01T00:00:00Z")


def standing() -> Standing:
    shown = Standing("clean", "run-1", state="running", restarts=2, error="the broker was away [red]\x1b[2J")
    shown.take(DONE)
    return shown


def test_the_table_has_everything_that_matters_and_no_markup_of_strangers() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(standing()))
    text = console.export_text()
    for words in ("clean  running", "12,345 rows", "4,115/s", "42 behind", "restarts 2", "topics", "3 s", "[red]"):
        assert words in text
    assert "\x1b" not in text


def test_without_a_terminal_there_is_a_line_for_each_batch_and_each_state(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(as_json=False)
    with screen:
        screen.changed(standing())
        screen.changed(standing())
        screen.batch(standing(), DONE)
    shown = capsys.readouterr()
    assert shown.out == "topics batch 3: 12,345 rows in 3 s, 4,115 per second, 42 behind\n"
    assert shown.err.count("clean: running: the broker was away") == 1


def test_every_restart_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    screen, shown = Screen(as_json=False), Standing("clean", "run-1", state="running")
    with screen:
        for state in ("restarting", "running", "restarting"):
            shown.state, shown.error = state, "topic 'payments' does not exist"
            screen.changed(shown)
    assert capsys.readouterr().err.splitlines() == [
        "clean: restarting: topic 'payments' does not exist",
        "clean: running",
        "clean: restarting: topic 'payments' does not exist",
    ]


def test_a_file_is_validated_without_loading_spark() -> None:
    look = "import sys, millstream.spark.pipelines.loading; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0

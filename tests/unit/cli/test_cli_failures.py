"""A command that cannot do what was asked says one sentence, gives one hint, and ends with the code for its kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from millstream import errors
from millstream.cli import status
from millstream.cli.failure import ExitCode, UsageProblem, exit_code_of

Run = Callable[..., Any]


class Failing:
    """Stands in for the output of `millstream version`, the simplest command there is, and fails as told."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def print(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.TopicNotFound, ExitCode.REQUEST),
        (errors.ConfigInvalid, ExitCode.USAGE),
        (UsageProblem, ExitCode.USAGE),
        (errors.ConnectionLost, ExitCode.UNREACHABLE),
        (errors.RequestTimeout, ExitCode.UNREACHABLE),
        (errors.DataDirLocked, ExitCode.STORAGE),
        (errors.DataDamaged, ExitCode.STORAGE),
    ],
)
def test_exit_codes_by_kind(error: type[errors.MillstreamError], expected: ExitCode) -> None:
    assert exit_code_of(error("")) == expected


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_an_output_without_room_is_no_bug() -> None:
    command = [sys.executable, "-m", "millstream.cli.main", "errors", "list"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == ExitCode.REQUEST
    assert ended.stderr.startswith("error: the output cannot be written: No space left on device [OUTPUT]\nhint: ")


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (("topic", "creat"), "no such command 'creat'", "See `millstream topic --help`."),
        (("topic", "create"), "missing argument 'NAME'", "See `millstream topic create --help`."),
        (("publish", "orders", "--no-such"), "no such option: --no-such", "See `millstream publish --help`."),
        (("topic", "create", "x", "-c", "novalue"), "'novalue' is not of the form key=value", "--help"),
        (("topic", "alter", "x"), "nothing to change", "--help"),
        (("consume", "x", "--from", "soon"), "'soon' is not a place to start", "--help"),
        (("consume", "x", "--timeout", "long"), "'long' is not a duration", "--help"),
        (("consume", "x", "--format", "{valeu}"), "does not know {valeu}", "--help"),
        (("consume", "x", "--format", "{value"), "cannot be understood", "--help"),
        (("consume", "x", "--group", "g", "--partition", "1"), "leave out --partition", "--help"),
        (("publish", "x", "value", "--whole"), "either values or an input", "--help"),
        (("publish", "x", "--whole", "--json-lines"), "exclude each other", "--help"),
        (("group", "reset", "g", "t", "--to", "12"), "'12' is not a place to move to", "--help"),
        (("bench", "publish", "--size", "huge"), "--size 'huge' is not allowed", "--help"),
        (("config", "show", "--port", "many"), "server.port = many (--port) is not allowed", "millstream config show"),
        (("config", "show", "--config", "no-such.yaml"), "cannot read no-such.yaml", "--help"),
        (("errors", "explain", "TOPIC_NOT_FOND"), "did you mean TOPIC_NOT_FOUND?", "--help"),
    ],
)
def test_usage_errors_are_a_sentence_a_hint_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], sentence: str, hint: str
) -> None:
    outcome = run(*arguments)
    first, second = outcome.err.splitlines()
    assert outcome.code == 2
    assert outcome.out == ""
    assert first.startswith("error: ")
    assert sentence in first
    assert first.endswith("]")
    assert second.startswith("hint: ")
    assert hint in second


def test_no_arguments_teach_instead_of_complaining(run: Run) -> None:
    outcome = run()
    assert outcome.code == 2
    for command in ("serve", "topic create", "publish", "consume", "group lag"):
        assert f"$ millstream {command}" in outcome.out + outcome.err


def test_a_bug_shows_no_traceback_unless_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "stdout", Failing(ZeroDivisionError("division by zero")))
    outcome = run("version")
    assert outcome.code == 1
    assert outcome.err.startswith("error: ZeroDivisionError: division by zero [INTERNAL]\n")
    assert "Traceback" not in outcome.err
    monkeypatch.setenv("MILLSTREAM_DEBUG", "1")
    assert "Traceback" in run("version").err


def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "stdout", Failing(KeyboardInterrupt()))
    outcome = run("version")
    assert (outcome.code, outcome.err) == (130, "")


def test_errors_keep_brackets_and_are_not_wrapped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts grep for these lines; neither markup nor the width of a terminal may change them."""
    text = "key [red]x[/red] " + "long " * 60

    monkeypatch.setattr(status, "stdout", Failing(errors.TopicNotFound(text.strip())))
    outcome = run("version")
    assert outcome.code == 1
    assert f"error: {text.strip()} [TOPIC_NOT_FOUND]\n" in outcome.err


def test_a_reader_that_leaves_is_no_failure() -> None:
    """`millstream errors list | head -0` ends quietly."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "millstream", "errors", "list"], stdout=writing, stderr=subprocess.PIPE
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")

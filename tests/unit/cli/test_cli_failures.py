"""A command that cannot do what was asked says one sentence, gives one hint, and ends with the code for its kind."""

from __future__ import annotations

import json
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
        (("topic", "list", "--ca"), "--ca needs a value", "--help"),
        (("topic", "alter", "x"), "nothing to change", "--help"),
        (("consume", "x", "--from", "soon"), "'soon' is not a place to start", "--help"),
        (("consume", "x", "--timeout", "long"), "--timeout 'long' is not a length of time", "--help"),
        (("subscribe", "x", "--timeout", "long"), "--timeout 'long' is not a length of time", "--help"),
        (("top", "--interval", "often"), "--interval 'often' is not a length of time", "--help"),
        (("top", "--interval", "10ms"), "--interval is 200ms to 1h", "--help"),
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
        (("consume", "x", "--from", "99999999d"), "'99999999d' is not a place to start", "--help"),
        (("topic", "peek", "x", "--until", "99999999d"), "--until '99999999d' is not a time", "--help"),
        (("topic", "peek", "x", "--from", "5", "--offset", "7"), "--from and --offset exclude each other", "--help"),
        (("audit", "--since", "99999999999999d"), "--since '99999999999999d' is not a time", "--help"),
        (("audit", "--limit", "0"), "invalid value for '--limit'", "--help"),
        (("trace", "--from", "99999999d"), "--from '99999999d' is not a time", "--help"),
        (("schedule", "list", "x", "--after", "99999999d"), "--after '99999999d' is not a time", "--help"),
        (("schedule", "move", "x", "99999999999999d"), "WHEN '99999999999999d' is not a time", "--help"),
        (("publish", "x", "hi", "--deliver-at", "99999999d"), "--deliver-at '99999999d' is not a time", "--help"),
        (("publish", "x", "hi", "--delay", "junk"), "--delay 'junk' is not a length of time", "--help"),
        (("publish", "x", "hi", "--ttl", "99999999999999d"), "is more than a hundred years", "--help"),
        (("lease", "x", "--wait", "99999999999999d"), "--wait '99999999999999d' is more than", "--help"),
        (("extend", "t:0:0:1:0000010175cc0b28", "--by", "0s"), "--by is more than 0", "--help"),
        (("webhook", "create", "x", "http://x", "--timeout", "junk"), "--timeout 'junk' is not a length", "--help"),
        (("webhook", "create", "x", "http://x", "--retry", "1s,junk"), "--retry 'junk' is not a length", "--help"),
        (("webhook", "create", "x", "http://x", "--rate", "nan"), "invalid value for '--rate'", "--help"),
        (("webhook", "rotate", "x", "--keep", "junk"), "--keep 'junk' is not a length of time", "--help"),
        (("key", "create", "-r", "read", "--expires", "junk"), "--expires 'junk' is not a length of time", "--help"),
        (("key", "create", "-r", "read", "--expires", "0"), "--expires is more than 0", "--help"),
        (("key", "rotate", "x", "--grace", "junk"), "--grace 'junk' is not a length of time", "--help"),
        (("key", "create", "-r", "read", "--data", ""), "--data is empty", "--help"),
        (("backup", ""), "FILE is empty", "--help"),
        (("backup", "", "--verify"), "FILE is empty", "--help"),
        (("restore", "x", "--data", ""), "--data is empty", "--help"),
        (("dlq", "list", "--max", "99999999999999999999"), "invalid value for '--max'", "--help"),
        (("dlq", "list", "--topic", ""), "--topic is empty", "--help"),
        (("dlq", "list", "--header", "=x"), "--header '=x' names no header", "--help"),
        (("dlq", "replay", "--all", "--to", ""), "--to is empty", "--help"),
        (("dlq", "replay", "--all", "--rate", "inf"), "invalid value for '--rate'", "--help"),
        (("dlq", "replay", "--all", "--set-header", "x"), "--set-header 'x' is not of the form", "--help"),
        (("dlq", "replay", "--all", "--value-file", "no-such"), "cannot read no-such: No such file", "--help"),
        (("dlq", "purge", "--topic", "", "--reason", "POISON", "--yes"), "--topic is empty", "--help"),
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


def test_a_choice_is_refused_in_words_of_ours(run: Run) -> None:
    assert "invalid value for 'MODE': 'bogus' is not one of " in run("mode", "bogus").err


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


@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "said"),
    [
        (">&-", ("errors", "list"), 0, ""),
        ("2>&-", ("errors", "list"), 0, ""),
        ("2>&-", ("topic", "creat"), 2, ""),
        ("<&-", ("topic", "delete", "x", "--yes", "--broker", "127.0.0.1:1"), 3, "nobody listens"),
        ("<&-", ("group", "delete", "x"), 2, "there is no terminal to ask on"),
        ("<&-", ("backup", "-", "--verify"), 1, "empty file"),
    ],
)
def test_streams_that_the_shell_has_closed_are_empty_ones(
    redirection: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """As some service managers start programs.  Python has None in their place."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "millstream", *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_letters_that_the_output_does_not_have_are_no_bug() -> None:
    """A terminal of another encoding than UTF-8, or PYTHONIOENCODING."""
    shown = {}
    for option in ("--json", "--insecure"):
        shown[option] = subprocess.run(
            [sys.executable, "-m", "millstream", "config", "show", "--data", "bücher/→", option],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        )
        assert (shown[option].returncode, shown[option].stderr) == (0, b"")
    assert json.loads(shown["--json"].stdout)["storage.data"]["value"] == "bücher/→"
    assert "bücher/\\u2192".encode("latin-1") in shown["--insecure"].stdout

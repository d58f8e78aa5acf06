"""The broker's log: one line per event, whichever library it comes from."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from millstream.broker.logs import Sparing, details
from millstream.config import LogSettings
from millstream.server.logs import set_log_level, set_up_logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    details.on = False
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_start_with_time_level_and_event() -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(), stream)
    structlog.get_logger("millstream.broker").info("recovered", partitions=3)
    entry = json.loads(stream.getvalue())
    assert list(entry) == ["time", "level", "event", "logger", "partitions"]
    assert (entry["level"], entry["event"], entry["partitions"]) == ("info", "recovered", 3)
    assert entry["logger"] == "millstream.broker"
    assert entry["time"].endswith("Z")


def test_auto_is_text_on_a_terminal() -> None:
    stream = Terminal()
    set_up_logs(LogSettings(), stream)
    structlog.get_logger().warning("disk is nearly full")
    assert "disk is nearly full" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_what_clients_call_themselves_does_nothing_to_the_terminal() -> None:
    """A name could clear the screen of who watches the log, or turn the rest of the line around."""
    stream = Terminal()
    set_up_logs(LogSettings(format="text"), stream)
    structlog.get_logger().warning("client is gone", client="\u202egro.liame\x1b[2J")
    logging.getLogger("library").warning("no answer from %s", "\u202e\x1b[2J")
    said = stream.getvalue()
    assert "\\u202egro.liame\\x1b[2J" in said
    assert "no answer from \\u202e\\x1b[2J" in said
    assert "\u202e" not in said
    assert "\x1b[2J" not in said


def test_text_to_a_file_has_no_colours() -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(format="text"), stream)
    structlog.get_logger().warning("plain", topic="orders")
    assert "\x1b" not in stream.getvalue()
    assert "topic=orders" in stream.getvalue()


def test_levels_below_the_one_set_are_left_out() -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(level="warning"), stream)
    structlog.get_logger().info("left out")
    structlog.get_logger().error("kept")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["kept"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_entries_of_other_libraries_look_the_same(log_format: str) -> None:
    """asyncio reports a forgotten exception through the standard library; it must not be lost or break the format."""
    stream = io.StringIO()
    set_up_logs(LogSettings.model_validate({"format": log_format}), stream)
    logging.getLogger("asyncio").error("Task exception was never retrieved: %s", "boom")
    logging.getLogger("asyncio").debug("left out")
    (line,) = stream.getvalue().splitlines()
    assert "Task exception was never retrieved: boom" in line
    if log_format == "json":
        assert (json.loads(line)["level"], json.loads(line)["logger"]) == ("error", "asyncio")


def test_an_exception_stays_on_its_json_line() -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(format="json"), stream)
    try:
        raise ZeroDivisionError("of wheat")
    except ZeroDivisionError:
        structlog.get_logger().exception("milling failed")
    entry = json.loads(stream.getvalue())
    assert "ZeroDivisionError: of wheat" in entry["exception"]


def test_setting_up_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logs(LogSettings(), first)
    set_up_logs(LogSettings(), second)
    structlog.get_logger().info("here")
    logging.getLogger("other").error("and here")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 2


def test_the_level_changes_for_loggers_that_exist_already() -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(), stream)
    log = structlog.get_logger("millstream.broker")
    log.debug("not yet")
    set_log_level("debug")
    log.debug("now")
    set_log_level("error")
    log.warning("not any more")
    logging.getLogger("asyncio").warning("nor this")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["now"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_what_a_client_says_cannot_begin_a_line_or_act_on_a_terminal(log_format: str) -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings.model_validate({"format": log_format}), stream)
    structlog.get_logger().info("closing a connection", reason="no\n2026-01-01 [info] all is well \x1b[2J\r\x9b2J")
    assert stream.getvalue().count("\n") == 1
    assert not set("\x1b\r\x9b") & set(stream.getvalue())


def test_details_are_on_exactly_while_the_level_is_debug() -> None:
    set_up_logs(LogSettings(level="debug"), io.StringIO())
    assert details.on
    set_log_level("info")
    assert not details.on
    set_log_level("debug")
    assert details.on


def test_what_others_cause_is_written_a_few_times_and_then_counted() -> None:
    stream, now_ms = io.StringIO(), 0
    set_up_logs(LogSettings(), stream)
    log, sparing = structlog.get_logger("millstream.tcp"), Sparing(lambda: now_ms)
    for number in range(1_000):
        sparing.write(log.info, "connection refused", number=number)
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == list(range(20))
    now_ms = 1_000
    sparing.write(log.info, "connection refused", number=1_000)
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert (last["number"], last["left_out"]) == (1_000, 980)
    now_ms = 2_000
    sparing.write(log.info, "connection refused", number=1_001)
    assert "left_out" not in json.loads(stream.getvalue().splitlines()[-1])

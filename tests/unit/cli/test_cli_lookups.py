"""Commands that need no broker: version, errors, config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.config import setting_fields
from millstream.errors import catalogue

Run = Callable[..., Any]


def test_version(run: Run) -> None:
    assert run("version").out.startswith("millstream ")
    assert set(run("version", "--json").json) == {"version", "python"}


def test_every_error_is_listed_and_explained(run: Run) -> None:
    listed = run("errors", "list", "--json").json
    assert {entry["number"] for entry in listed} == set(catalogue())
    for entry in listed:
        assert run("errors", "explain", entry["code"], "--json").json == entry
        assert run("errors", "explain", str(entry["number"]), "--json").json == entry
        assert entry["meaning"]
        assert entry["remedy"]


def test_explain_says_what_to_do(run: Run) -> None:
    out = run("errors", "explain", "topic-not-found").out
    assert "TOPIC_NOT_FOUND (1)" in out
    assert "millstream topic create NAME" in out


def test_config_show_says_where_values_come_from(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "millstream.yaml"
    file.write_text("server:\n  backlog: 64\n", encoding="utf-8")
    monkeypatch.setenv("MILLSTREAM_TOPICS__AUTO_CREATE", "false")
    shown = run(
        "config", "show", "--config", str(file), "--port", "0", "--set", "storage.segment_bytes=1MiB", "--json"
    ).json
    assert list(shown) == [key for key, _ in setting_fields()]
    assert shown["server.backlog"] == {"value": 64, "from": f"{file} line 2"}
    assert shown["topics.auto_create"] == {"value": False, "from": "MILLSTREAM_TOPICS__AUTO_CREATE"}
    assert shown["server.port"] == {"value": 0, "from": "--port"}
    assert shown["storage.segment_bytes"] == {"value": 1_048_576, "from": "--set"}
    assert shown["server.host"] == {"value": "127.0.0.1", "from": "default"}


def test_config_show_for_people_has_units(run: Run) -> None:
    lines = {line.split()[0]: line for line in run("config", "show").out.splitlines() if line.strip()}
    assert "64 MiB" in lines["storage.segment_bytes"]
    assert "7 d" in lines["topics.retention_ms"]


def test_a_home_directory_in_a_file_is_expanded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/miller")
    file = tmp_path / "millstream.yaml"
    file.write_text("storage: {data: ~/grain}\n", encoding="utf-8")
    assert run("config", "show", "--config", str(file), "--json").json["storage.data"]["value"] == "/home/miller/grain"


def test_a_file_that_is_not_text_is_a_config_error(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "millstream.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    outcome = run("config", "show", "--config", str(file))
    assert outcome.code == 2
    assert "is not UTF-8 text" in outcome.err


def test_config_show_says_which_port_of_http_and_mqtt_an_option_sets(run: Run) -> None:
    shown = run("config", "show", "--http-port", "8181", "--mqtt-port", "1884", "--json").json
    assert shown["http.port"] == {"value": 8181, "from": "--http-port"}
    assert shown["mqtt.port"] == {"value": 1884, "from": "--mqtt-port"}


@pytest.mark.parametrize("code", ["USAGE", "OUTPUT"])
def test_what_only_commands_report_is_explained_too(run: Run, code: str) -> None:
    """They stand in brackets behind a sentence like all others."""
    assert "what to do" in run("errors", "explain", code).out
    assert run("errors", "explain", code.lower(), "--json").json["code"] == code


def test_the_version_is_asked_for_as_of_other_programs(run: Run) -> None:
    assert run("--version") == run("version")


def test_help_is_asked_for_as_of_other_programs(run: Run) -> None:
    assert run("help").out == run("--help").out
    assert run("help", "topic", "list").out == run("topic", "list", "--help").out

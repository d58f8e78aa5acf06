"""Manners that every command must have, checked over the whole tree so that a new one cannot forget them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text

from millstream.cli.main import app


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if not children:
        yield path, command
        return
    for name, child in children.items():
        yield from commands(child, f"{path} {name}".strip())


TREE = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", TREE)
def test_help_ends_in_examples_that_use_the_command(path: str) -> None:
    epilog = TREE[path].epilog or ""
    assert "Examples" in epilog
    assert f"millstream {path}" in epilog


@pytest.mark.parametrize("path", TREE)
def test_the_terminal_decides_where_help_breaks(path: str) -> None:
    assert [part for part in TREE[path].help.split("\n\n") if "\n" in part] == []


@pytest.mark.parametrize("path", TREE)
def test_every_option_is_explained(path: str) -> None:
    for parameter in TREE[path].params:
        if getattr(parameter, "hidden", False):
            continue
        assert parameter.help, f"millstream {path}: {parameter.name} has no help"
        if parameter.param_type_name == "option" and not parameter.is_flag:
            assert parameter.metavar, f"millstream {path}: {parameter.name} needs a metavar, the reference shows it"


@pytest.mark.parametrize("path", TREE)
def test_nothing_of_an_explanation_is_taken_for_markup(path: str) -> None:
    for parameter in TREE[path].params:
        assert Text.from_markup(parameter.help or "").plain == (parameter.help or "")


@pytest.mark.parametrize("path", TREE)
def test_no_option_hides_another(path: str) -> None:
    """`schedule list -n 5` was taken for a namespace, and `--help` said that it is a limit."""
    names = [name for parameter in TREE[path].params for name in (*parameter.opts, *parameter.secondary_opts)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", ["config show", "doctor"])
def test_what_looks_at_the_settings_takes_the_options_of_serve(path: str) -> None:
    def options(command: Any) -> set[str]:
        return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}

    assert options(TREE["serve"]) <= options(TREE[path])


@pytest.mark.parametrize("path", sorted(TREE.keys() - {"serve"}))
def test_every_command_offers_json(path: str) -> None:
    assert any("--json" in parameter.opts for parameter in TREE[path].params)


@pytest.mark.parametrize("path", ["consume", "subscribe", "lease", "topic peek", "dlq list", "log dump"])
def test_who_prints_json_line_by_line_says_so(path: str) -> None:
    said = next(parameter.help for parameter in TREE[path].params if parameter.name == "as_json")
    assert "one object per line" in said


@pytest.mark.parametrize("path", TREE)
def test_whatever_takes_a_time_says_that_it_is_utc(path: str) -> None:
    lengths = ("timeout", "interval", "wait", "length", "expires", "grace", "keep", "by", "retry_after")
    times = [it for it in TREE[path].params if it.metavar in ("PLACE", "WHEN", "TIME") and it.name not in lengths]
    said = [it.help for it in times]
    assert not said or any("(UTC)" in text for text in said)
    assert all("(UTC)" in text or "in the same forms" in text for text in said)


def test_shell_completion_stays_on(capsys: pytest.CaptureFixture[str]) -> None:
    names = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    assert {"--install-completion", "--show-completion"} <= names

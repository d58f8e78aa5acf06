"""Options that are declared together are options of every command that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from millstream.cli.bundles import Commands


@dataclass(frozen=True)
class Window:
    since: Annotated[str, typer.Option("--since")] = "ever"


@dataclass(frozen=True)
class Page(Window):
    limit: Annotated[int, typer.Option("--limit")] = 10


app = Commands()


@app.command("first")
def _first(name: str, loud: bool = False, *, page: Page) -> None:
    """The first."""
    typer.echo(f"{name} {loud} {page}")


@app.command()
def second(*, window: Window) -> int:
    """A sentence that is longer than
    a line, with [brackets].
    """
    typer.echo(window)
    return 3


def test_the_fields_of_a_bundle_are_options_in_their_place() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [parameter.name for parameter in commands["first"].params] == ["name", "loud", "since", "limit"]
    assert commands["first"].help == "The first."
    assert [parameter.name for parameter in commands["second"].params] == ["since"]


def test_the_terminal_decides_where_help_breaks() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands["second"].help == "A sentence that is longer than a line, with \\[brackets]."


def test_a_command_gets_its_bundle_back_as_one() -> None:
    outcome = CliRunner().invoke(app, ["first", "orders", "--limit", "3"])
    assert outcome.output == "orders False Page(since='ever', limit=3)\n"


def test_what_a_command_returns_is_its_exit_code_for_the_caller() -> None:
    assert typer.main.get_command(app)(["second"], standalone_mode=False) == 3


def test_a_command_is_still_a_function_with_its_own_signature() -> None:
    assert second(window=Window("1d")) == 3

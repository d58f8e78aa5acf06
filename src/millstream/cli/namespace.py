"""`millstream namespace`: worlds of names that do not see each other."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, open_client
from millstream.cli.output import JsonOption, examples, print_json, print_table, stdout
from millstream.names import DEFAULT_NAMESPACE

app = typer.Typer(no_args_is_help=True, help="Create, list and delete namespaces.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and '-'.")]


@app.command(epilog=examples("millstream namespace create team-a", "millstream topic create orders -n team-a"))
def create(name: NameArgument, broker: BrokerOption = DEFAULT_BROKER) -> None:
    """Create a namespace."""
    with open_client(broker, DEFAULT_NAMESPACE) as client:
        client.create_namespace(name)
    stdout.print(f"namespace [bold]{name}[/]")


@app.command("list", epilog=examples("millstream namespace list", "millstream namespace list --json"))
def list_namespaces(as_json: JsonOption = False, broker: BrokerOption = DEFAULT_BROKER) -> None:
    """List namespaces."""
    with open_client(broker, DEFAULT_NAMESPACE) as client:
        names = client.namespaces()
    if as_json:
        print_json(names)
    else:
        print_table(("namespace",), [(name,) for name in names])


@app.command(epilog=examples("millstream namespace delete team-a", "millstream namespace delete team-a --force --yes"))
def delete(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="With all its topics and messages.")] = False,
    yes: YesOption = False,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete a namespace."""
    confirm(f"Delete namespace {name}{' with all its topics' if force else ''}?", yes=yes)
    with open_client(broker, DEFAULT_NAMESPACE) as client:
        client.delete_namespace(name, force=force)
    stdout.print(f"deleted namespace [bold]{name}[/]")

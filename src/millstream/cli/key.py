"""`millstream key`: who may use a broker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millstream.cli.arguments import parse_span, refuse_empty
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import BrokerOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
    document_of,
    examples,
    print_done,
    print_json,
    print_table,
    stderr,
    stdout,
    time_text,
)
from millstream.cli.settings import ConfigFileOption, read_settings

if TYPE_CHECKING:
    from millstream.client.access import NewKey
    from millstream.config import Settings

app = Commands(no_args_is_help=True, help="Create, list, rotate and revoke API keys.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The key's id, which is the part before the secret.")]


@app.command(
    epilog=examples(
        "millstream key create --role admin --name alice",
        "millstream key create --role produce --role consume --scope 'default:orders.#'",
        "millstream key create --role read --scope 'team-a:#' --expires 30d",
        "# the first key, while the broker does not run",
        "millstream key create --role admin --data /var/lib/millstream",
    )
)
def create(
    roles: Annotated[
        list[str],
        typer.Option(
            "--role",
            "-r",
            metavar="ROLE",
            help="What the key may do: admin, produce, consume or read; may be repeated.",
        ),
    ],
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            "-s",
            metavar="NAMESPACE:TOPIC",
            help="Where the key is valid, with patterns; without it, everywhere.",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Whose key it is, for people.")] = "",
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="How long the key is valid, such as 30d; without it, for ever."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="The data directory of a broker that does not run.")
    ] = None,
    config: ConfigFileOption = None,
    *,
    given: BrokerOptions,
) -> None:
    """Create a key and show it, this once only."""
    refuse_empty(data, "--data")
    lasts = None if expires is None else parse_span(expires, "--expires")
    if lasts is not None and not lasts:
        raise UsageProblem("--expires is more than 0; leave it out for a key that does not expire")
    if data is not None:
        settings, _ = read_settings(config, {"storage.data": data}, None)
        made = _create_offline(settings, roles, scopes or [], name, lasts)
    else:
        with given.client() as client:
            made = client.keys.create(*roles, scopes=scopes or [], name=name, expires_in=lasts)
    _print_new(made, given.as_json)


@app.command("list", epilog=examples("millstream key list", "millstream key list --json"))
def list_keys(*, given: BrokerOptions) -> None:
    """List keys, without their secrets."""
    with given.client() as client:
        keys = client.keys.list()
    if given.as_json:
        print_json([document_of(key) for key in keys])
        return
    print_table(
        ("id", "name", "roles", "scopes", "created", "expires", "last used"),
        [
            (
                key.id,
                key.name,
                " ".join(key.roles),
                " ".join(key.scopes) or "everything",
                time_text(key.created_ms),
                _moment(key.expires_ms),
                _moment(key.last_used_ms),
            )
            for key in keys
        ],
        empty="no keys",
    )


@app.command(epilog=examples("millstream key rotate 1f2e3d4c5b6a", "millstream key rotate 1f2e3d4c5b6a --grace 0s"))
def rotate(
    key_id: IdArgument,
    grace: Annotated[str, typer.Option("--grace", metavar="TIME", help="How long the old secret stays valid.")] = "24h",
    *,
    given: BrokerOptions,
) -> None:
    """Give a key a new secret and show it, this once only."""
    still_good = parse_span(grace, "--grace")
    with given.client() as client:
        _print_new(client.keys.rotate(key_id, still_good), given.as_json)


@app.command(epilog=examples("millstream key revoke 1f2e3d4c5b6a", "millstream key revoke 1f2e3d4c5b6a --yes"))
def revoke(key_id: IdArgument, yes: YesOption = False, *, given: BrokerOptions) -> None:
    """Revoke a key, and end the connections of whoever uses it."""
    confirm(f"Revoke key {key_id}?", yes=yes)
    with given.client() as client:
        client.keys.revoke(key_id)
    print_done(f"revoked key [bold]{escape(key_id)}[/]", as_json=given.as_json, key=key_id, revoked=True)


def _create_offline(
    settings: Settings, roles: Sequence[str], scopes: list[str], name: str, expires: timedelta | None
) -> NewKey:
    from millstream.access.keys import Key
    from millstream.client.access import create_call
    from millstream.config import LogSettings
    from millstream.server import lifecycle  # here, so that no other command waits for the broker to load
    from millstream.server.logs import set_up_logs

    call = create_call(roles, scopes, name, expires)
    # Says what is wrong with it before a directory is made for it.
    Key(id="", name=name, roles=call.roles, scopes=call.scopes, created_ms=0, secrets=[])
    set_up_logs(LogSettings(level="warning"), sys.stderr)
    return asyncio.run(lifecycle.offline(settings, lambda broker: broker.access.create(call)))


def _print_new(made: NewKey, as_json: bool) -> None:
    if as_json:
        print_json(document_of(made))
        return
    stdout.print(made.key, soft_wrap=True)
    if stderr.is_terminal:
        stderr.print("[dim]Keep it now: it is shown this once. Clients take it from MILLSTREAM_KEY.[/]")


def _moment(time_ms: int) -> str | None:
    return time_text(time_ms) if time_ms else None

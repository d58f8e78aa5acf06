"""`millstream namespace`: worlds of names that do not see each other."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import BrokerOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import bytes_text, document_of, examples, print_done, print_json, print_table

app = Commands(no_args_is_help=True, help="Create, list and delete namespaces.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name: lower-case letters, digits and '-'.")]


@app.command(epilog=examples("millstream namespace create team-a", "millstream topic create orders -n team-a"))
def create(name: NameArgument, *, given: BrokerOptions) -> None:
    """Create a namespace."""
    with given.client() as client:
        client.create_namespace(name)
    print_done(f"namespace [bold]{name}[/]", as_json=given.as_json, namespace=name, created=True)


@app.command("list", epilog=examples("millstream namespace list", "millstream namespace list --json"))
def list_namespaces(*, given: BrokerOptions) -> None:
    """List namespaces."""
    with given.client() as client:
        names = client.namespaces()
    if given.as_json:
        print_json(names)
    else:
        print_table(("namespace",), [(name,) for name in names])


@app.command(epilog=examples("millstream namespace delete team-a", "millstream namespace delete team-a --force --yes"))
def delete(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Delete it with all its topics and messages.")] = False,
    yes: YesOption = False,
    *,
    given: BrokerOptions,
) -> None:
    """Delete a namespace."""
    confirm(f"Delete namespace {name}{' with all its topics' if force else ''}?", yes=yes)
    with given.client() as client:
        client.delete_namespace(name, force=force)
    print_done(f"deleted namespace [bold]{name}[/]", as_json=given.as_json, namespace=name, deleted=True)


@app.command(
    epilog=examples(
        "millstream namespace quota team-a",
        "millstream namespace quota team-a --topics 100 --partitions 400 --storage 10GiB --messages-per-second 5000",
        "millstream namespace quota team-a --unlimited",
    )
)
def quota(
    name: NameArgument,
    topics: Annotated[int | None, typer.Option("--topics", metavar="N", help="At most this many topics.")] = None,
    partitions: Annotated[
        int | None, typer.Option("--partitions", metavar="N", help="At most this many partitions, over all its topics.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="SIZE", help="At most this much on disk, such as 10GiB.")
    ] = None,
    messages: Annotated[
        int | None,
        typer.Option("--messages-per-second", metavar="N", help="How many messages it may publish per second."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--bytes-per-second", metavar="SIZE", help="How many bytes it may publish per second, such as 10MiB."
        ),
    ] = None,
    connections: Annotated[
        int | None, typer.Option("--connections", metavar="N", help="At most this many clients.")
    ] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Remove all limits.")] = False,
    *,
    given: BrokerOptions,
) -> None:
    """Show the limits of a namespace and how much of them is used; with options, change the limits.

    Limits that are not named stay as they are. 0 means no limit.
    """
    limits = {
        "topics": topics,
        "partitions": partitions,
        "storage_bytes": _bytes(storage, "--storage"),
        "publish_messages_per_s": messages,
        "publish_bytes_per_s": _bytes(size, "--bytes-per-second"),
        "connections": connections,
    }
    changes = {limit: amount for limit, amount in limits.items() if amount is not None}
    with given.client() as client:
        info = client.quota(name)
        if changes or unlimited:
            before = {} if unlimited else {limit: getattr(info, limit) for limit in limits}
            info = client.set_quota(name, **{**before, **changes})
    if given.as_json:
        print_json(document_of(info))
        return
    print_table(
        ("limit", "allowed", "used"),
        [
            ("topics", _limit(info.topics), info.topics_used),
            ("partitions", _limit(info.partitions), info.partitions_used),
            (
                "storage",
                bytes_text(info.storage_bytes) if info.storage_bytes else None,
                bytes_text(info.storage_bytes_used),
            ),
            ("messages published a second", _limit(info.publish_messages_per_s), None),
            ("bytes published a second", _limit(info.publish_bytes_per_s), None),
            ("connections", _limit(info.connections), info.connections_used),
        ],
        numbers="allowed|used",
    )


def _limit(amount: int) -> int | None:
    return amount or None


def _bytes(text: str | None, option: str) -> int | None:
    from millstream.config import parse_bytes  # only here: no other command waits for the model to load

    size = None if text is None else parse_bytes(text)
    if size is not None and not isinstance(size, int):
        raise UsageProblem(f"{option} {text!r} is not a size such as 512KiB or 10GiB")
    return size

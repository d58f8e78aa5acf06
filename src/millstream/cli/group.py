"""`millstream group`: readers with durable progress."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

import typer
from rich.markup import escape
from rich.text import Text

from millstream.cli.arguments import RESET_FORMS, parse_reset
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import NamespaceOptions
from millstream.cli.output import (
    count_text,
    document_of,
    duration_text,
    examples,
    print_done,
    print_facts,
    print_json,
    print_table,
    stderr,
    stdout,
)
from millstream.cli.terminal import terminal_safe

app = Commands(no_args_is_help=True, help="Inspect and move consumer groups.")


class _Lag(Protocol):
    """How far a group is behind in one partition, as the broker answers."""

    topic: str
    partition: int
    committed: int | None
    end: int
    lag: int
    lag_ms: int
    member_id: str | None
    failed: str | None


class _Standing(Protocol):
    """Whether a group reads, as the broker answers."""

    state: str
    paused: bool


class _Summary(_Standing, Protocol):
    """A group in a few words, as the broker answers."""

    name: str
    members: int
    generation: int


GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]


@app.command("list", epilog=examples("millstream group list", "millstream group list --json"))
def list_groups(*, given: NamespaceOptions) -> None:
    """List groups."""
    with given.client() as client:
        groups = client.groups()
    if given.as_json:
        print_json(document_of(groups))
        return
    print_table(
        ("group", "state", "members", "generation", "topics"),
        [
            (group.name, _state_text(group), group.members, group.generation, ", ".join(group.topics))
            for group in groups
        ],
        empty="no groups",
        numbers="members|generation",
    )


@app.command(epilog=examples("millstream group show audit", "millstream group show audit --json | jq .members"))
def show(name: GroupArgument, *, given: NamespaceOptions) -> None:
    """Show a group: its members, what each of them reads, and how far behind it is."""
    with given.client() as client:
        group = client.group(name)
    if given.as_json:
        print_json(document_of(group))
        return
    print_facts(
        [
            ("group", Text(group.name, style="bold")),
            ("state", _state_text(group)),
            ("generation", group.generation),
            ("assignment", f"{group.strategy}, {group.protocol}"),
        ]
    )
    stdout.print()
    print_table(
        ("member", "client", "address", "reads", "last heard of"),
        [
            (
                member.member_id,
                member.client_id,
                member.address,
                _partitions_text((owned.topic, owned.partitions) for owned in member.partitions),
                f"{duration_text(member.last_heartbeat_ms_ago)} ago",
            )
            for member in group.members
        ],
        empty="no members",
    )
    if group.lag:
        stdout.print()
        _print_lag(group.lag)


@app.command(epilog=examples("millstream group lag audit", "watch -n 2 millstream group lag audit"))
def lag(name: GroupArgument, *, given: NamespaceOptions) -> None:
    """Show how many messages a group has yet to read, and how old the oldest of them is."""
    with given.client() as client:
        group = client.group(name)
    if given.as_json:
        print_json(document_of(group.lag))
        return
    _print_lag(group.lag)
    if len(group.lag) > 1:
        stdout.print(f"\n{count_text(sum(entry.lag for entry in group.lag))} [dim]to read in all[/]")


@app.command(
    epilog=examples(
        "# look first",
        "millstream group reset audit orders --to earliest --dry-run",
        "millstream group reset audit orders --to 2026-01-31T09:30",
        "millstream group reset audit orders --to shift:-10 --partition 0 --yes",
    )
)
def reset(
    name: GroupArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic whose offsets move.")],
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help=f"Where to move: {RESET_FORMS}.")],
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="N", min=0, help="Move only this partition; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, but change nothing.")] = False,
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Move a group to another place in a topic.

    The group must have no live members.
    """
    kind, value = parse_reset(to, datetime.datetime.now(datetime.UTC))
    with given.client() as client:
        before = {entry.partition: entry.offset for entry in client.committed(name, [topic])}
        planned = client.reset_group(name, topic, kind, value, partitions=partition, dry_run=True)
        asks = not (yes or dry_run)
        if asks or not given.as_json:
            rows = [(entry.partition, before.get(entry.partition), entry.offset) for entry in planned]
            print_table(
                ("partition", "from", "to", "moves by"),
                [(*row, _moves_by(row[1], row[2])) for row in rows],
                numbers="partition|from|to|moves by",
                console=stderr if given.as_json else stdout,
            )
        if dry_run:
            outcome = planned
        else:
            confirm(f"Move group {name} on {topic} to these offsets?", yes=yes)
            outcome = client.reset_group(name, topic, kind, value, partitions=partition)
    if given.as_json:
        changes = [
            {"topic": topic, "partition": entry.partition, "from": before.get(entry.partition), "to": entry.offset}
            for entry in outcome
        ]
        print_json({"group": name, "dry_run": dry_run, "offsets": changes})
    else:
        stderr.print("nothing was changed (--dry-run)" if dry_run else f"moved group {name}")


@app.command(epilog=examples("millstream group delete audit", "millstream group delete audit --yes"))
def delete(name: GroupArgument, yes: YesOption = False, *, given: NamespaceOptions) -> None:
    """Delete a group and its committed offsets.

    The group must have no live members.
    """
    confirm(f"Delete group {name} and its committed offsets?", yes=yes)
    with given.client() as client:
        client.delete_group(name)
    print_done(f"deleted group [bold]{name}[/]", as_json=given.as_json, group=name, deleted=True)


@app.command(
    epilog=examples(
        "# find the member's id", "millstream group show audit", "millstream group evict audit worker-3-f7e8d9"
    )
)
def evict(
    name: GroupArgument,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="The member's id.")],
    *,
    given: NamespaceOptions,
) -> None:
    """Remove a member from its group.

    Its partitions go to the other members. A member that is alive joins again.
    """
    with given.client() as client:
        client.evict_member(name, member)
    said = f"evicted [bold]{escape(terminal_safe(member))}[/] from group [bold]{name}[/]"
    print_done(said, as_json=given.as_json, group=name, member=member, evicted=True)


@app.command(epilog=examples("millstream group rebalance audit"))
def rebalance(name: GroupArgument, *, given: NamespaceOptions) -> None:
    """Assign the partitions of a group anew, whoever has them now."""
    with given.client() as client:
        _print_summary(client.rebalance_group(name), given.as_json)


@app.command(epilog=examples("millstream group pause audit", "millstream group resume audit"))
def pause(name: GroupArgument, *, given: NamespaceOptions) -> None:
    """Pause a group: none of its members reads.

    The members give their partitions back but stay in the group. A restart does not end the pause.
    """
    with given.client() as client:
        _print_summary(client.pause_group(name), given.as_json)


@app.command(epilog=examples("millstream group resume audit"))
def resume(name: GroupArgument, *, given: NamespaceOptions) -> None:
    """Resume a paused group."""
    with given.client() as client:
        _print_summary(client.resume_group(name), given.as_json)


def _print_summary(group: _Summary, as_json: bool) -> None:
    if as_json:
        print_json(document_of(group))
        return
    print_facts(
        [
            ("group", group.name),
            ("state", _state_text(group)),
            ("generation", group.generation),
            ("members", group.members),
        ]
    )


def _state_text(group: _Standing) -> str:
    return f"{group.state}, paused" if group.paused else group.state


def _print_lag(lags: Sequence[_Lag]) -> None:
    print_table(
        ("topic", "partition", "committed", "end", "lag", "oldest unread", "member"),
        [
            (
                entry.topic,
                entry.partition,
                entry.committed,
                None if entry.failed else entry.end,
                Text("unknown", style="red")
                if entry.failed
                else Text(count_text(entry.lag), style="yellow" if entry.lag else ""),
                duration_text(entry.lag_ms) if entry.lag else None,
                entry.member_id,
            )
            for entry in lags
        ],
        empty="the group has no offsets and reads no topics",
        numbers="partition|committed|end|lag|oldest unread",
    )
    for entry in lags:
        if entry.failed:
            stdout.print(Text(terminal_safe(f"{entry.topic} {entry.partition}: {entry.failed}"), style="red"))


def _partitions_text(owned: Iterable[tuple[str, Sequence[int]]]) -> str:
    """`orders 0-2, 5`: neighbours as ranges, since a member may hold thousands."""
    return "; ".join(f"{topic} {_ranges(partitions)}" for topic, partitions in owned)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _moves_by(before: int | None, after: int) -> str | None:
    return None if before is None else f"{after - before:+,}"

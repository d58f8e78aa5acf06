"""`millstream dlq`: messages that queues have given up on."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from millstream.cli.arguments import PAST_FORMS, parse_headers, parse_past, refuse_empty
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import LinesOptions, NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.letters import (
    letter_document,
    print_letter,
    print_letters,
    print_plan,
    print_replay,
    print_replays,
    print_statistics,
)
from millstream.cli.output import (
    document_of,
    examples,
    plural,
    print_json,
    print_json_line,
    stderr,
    stdout,
)
from millstream.cli.progress import Meter

if TYPE_CHECKING:
    from millstream.client.blocking.letters import Replay
    from millstream.client.letters import LetterOptions, ReplayOptions
    from millstream.dead_letters import ReplayInfo

app = Commands(no_args_is_help=True, help="Look at dead letters, send them again or remove them.")

_WHICH = "Which letters"
_REASONS = "REJECTED, MAX_RETRIES_EXCEEDED, MAX_DELIVERIES_EXCEEDED, TOTAL_TIMEOUT_EXCEEDED, TTL_EXPIRED or POISON."

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The dead letter's id.")]
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.")]
EverythingOption = Annotated[bool, typer.Option("--all", help="All dead letters.", rich_help_panel=_WHICH)]


@dataclass(frozen=True)
class Filters:
    """Which letters: those that meet every condition that is given."""

    topic: Annotated[
        str | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Only letters from this topic, or from a pattern such as orders.#",
            rich_help_panel=_WHICH,
        ),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="GROUP", help="Only letters that this queue group gave up on.", rich_help_panel=_WHICH
        ),
    ] = None
    reason: Annotated[
        str | None,
        typer.Option("--reason", metavar="REASON", help=f"Only this reason: {_REASONS}", rich_help_panel=_WHICH),
    ] = None
    error: Annotated[
        str | None,
        typer.Option(
            "--error", metavar="TEXT", help="Only letters whose last error contains this.", rich_help_panel=_WHICH
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="NAME[=VALUE]",
            help="Only letters with this header; may be repeated.",
            rich_help_panel=_WHICH,
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Only letters with this key.", rich_help_panel=_WHICH),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help=f"Only letters that died at or after {PAST_FORMS}.", rich_help_panel=_WHICH
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="TIME",
            help="Only letters that died before this, in the same forms.",
            rich_help_panel=_WHICH,
        ),
    ] = None

    def options(self) -> LetterOptions:
        """As the client takes them."""
        texts = {"--topic": self.topic, "--group": self.group, "--reason": self.reason, "--error": self.error}
        for option, text in texts.items():
            refuse_empty(text, option)
        options: LetterOptions = {
            "topic": self.topic or "",
            "group": self.group or "",
            "reason": self.reason or "",
            "error": self.error or "",
        }
        headers: dict[str, str | None] = {}
        for pair in self.header or []:
            name, equals, value = pair.partition("=")
            if not name:
                raise UsageProblem(f"--header {pair!r} names no header: use NAME or NAME=VALUE")
            headers[name] = value if equals else None
        options["headers"] = headers
        if self.key is not None:
            options["key"] = self.key
        now = datetime.datetime.now(datetime.UTC)
        options["since"] = None if self.since is None else parse_past(self.since, now, "--since")
        options["until"] = None if self.until is None else parse_past(self.until, now, "--until")
        return options


def _require_choice(ids: list[str] | None, which: LetterOptions, everything: bool, verb: str) -> None:
    """A forgotten option must not mean everything."""
    filtered = any(which.values()) or "key" in which
    chosen = sum((bool(ids), filtered, everything))
    if chosen != 1:
        problem = "which letters" if not chosen else "only one of ids, filters and --all"
        raise UsageProblem(f"say {problem} to {verb}: ids, filters such as --reason, or --all")


@app.command(
    "list",
    epilog=examples(
        "millstream dlq list",
        "millstream dlq list --topic 'orders.#' --error timeout --since 1d",
        "millstream dlq list --json --max 10 | jq -r .id",
    ),
)
def list_letters(
    *,
    filters: Filters,
    limit: Annotated[
        int, typer.Option("--max", metavar="N", min=1, max=1_000_000, help="Show at most this many.")
    ] = 100,
    given: LinesOptions,
) -> None:
    """List dead letters by topic, in the order in which they died."""
    which = filters.options()
    with given.client() as client:
        letters = client.dead_letters.list(limit=limit, **which)
    if given.as_json:
        for letter in letters:
            print_json_line(letter_document(letter))
        return
    print_letters(letters)
    if len(letters) == limit:
        stderr.print(f"[dim]the first {limit:,}; --max shows more, `millstream dlq stats` counts them all[/]")


@app.command(epilog=examples("millstream dlq show 01JD3QZ8M0K5X7T2B9WCE4R6VA"))
def show(letter_id: IdArgument, *, given: NamespaceOptions) -> None:
    """Show a dead letter: where it came from, how it died, every attempt, and the whole message."""
    with given.client() as client:
        letter = client.dead_letters.show(letter_id)
    if given.as_json:
        print_json(letter_document(letter))
    else:
        print_letter(letter)


@app.command(epilog=examples("millstream dlq stats", "millstream dlq stats --topic orders --since 1d"))
def stats(
    *,
    filters: Filters,
    given: NamespaceOptions,
) -> None:
    """Count dead letters by reason, topic, group, error and age."""
    which = filters.options()
    with given.client() as client:
        statistics = client.dead_letters.stats(**which)
    if given.as_json:
        print_json(document_of(statistics))
    else:
        print_statistics(statistics)


@app.command(
    epilog=examples(
        "# look first",
        "millstream dlq replay --topic orders --error 'db down' --dry-run",
        "millstream dlq replay --topic orders --error 'db down' --rate 100",
        "# one letter, repaired, to another topic",
        "millstream dlq replay 01JD3QZ8M0K5X7T2B9WCE4R6VA --value '{\"amount\": 5}' --to orders.repaired",
    )
)
def replay(
    ids: IdsArgument = None,
    *,
    filters: Filters,
    everything: EverythingOption = False,
    target: Annotated[
        str | None, typer.Option("--to", metavar="TOPIC", help="Send to this topic, not to the topics they came from.")
    ] = None,
    value: Annotated[str | None, typer.Option("--value", metavar="TEXT", help="Replace the value.")] = None,
    value_file: Annotated[
        Path | None, typer.Option("--value-file", metavar="FILE", help="Replace the value with the contents of a file.")
    ] = None,
    set_header: Annotated[
        list[str] | None, typer.Option("--set-header", metavar="NAME=VALUE", help="Set a header; may be repeated.")
    ] = None,
    remove_header: Annotated[
        list[str] | None, typer.Option("--remove-header", metavar="NAME", help="Remove a header; may be repeated.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", min=0.001, max=1e9, help="Send at most this many messages per second."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, but send nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the replay is over.")] = True,
    given: NamespaceOptions,
) -> None:
    """Send dead letters again as new messages, in the order in which they first came in.

    The broker does the work, continues after a restart, and sends each letter once.
    """
    which = filters.options()
    _require_choice(ids, which, everything, "replay")
    refuse_empty(target, "--to")
    if value is not None and value_file is not None:
        raise UsageProblem("--value and --value-file exclude each other")
    options: ReplayOptions = {
        **which,
        "target": target,
        "value": _contents(value_file) if value_file is not None else value,
        "set_headers": dict(parse_headers(set_header or [], "--set-header")),
        "remove_headers": remove_header or [],
        "rate": rate,
    }
    with given.client() as client:
        if dry_run:
            plan = client.dead_letters.plan_replay(ids or [], everything=everything, **options)
            if given.as_json:
                print_json(document_of(plan))
            else:
                print_plan(plan)
                stderr.print("nothing was sent (--dry-run)")
            return
        started = client.dead_letters.replay(ids or [], everything=everything, **options)
        # A replay of nothing says itself why it is one.
        if not given.as_json and started.plan is not None and started.plan.total:
            for warning in started.plan.warnings:
                stderr.print(Text(f"note: {warning}", style="yellow"))
        info = _follow(started, shown=not given.as_json) if wait else started.info
    if given.as_json:
        print_json(document_of(info))
    else:
        print_replay(info)
    if info.status == "failed":
        raise typer.Exit(1)


def _contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise UsageProblem(f"cannot read {file}: {problem.strerror}") from None


def _follow(replay: Replay, *, shown: bool) -> ReplayInfo:
    """Wait for a replay, with a bar that says how far it is."""
    from millstream.client.letters import POLL_S

    seen = 0
    try:
        with Meter("replaying", replay.info.total, shown=shown) as meter:
            while not replay.is_over:
                time.sleep(POLL_S)
                info = replay.progress()
                meter.advance(info.replayed + info.failed - seen, info.reason or None)
                seen = info.replayed + info.failed
    except KeyboardInterrupt:
        stderr.print(f"the replay goes on; `millstream dlq abort {replay.id}` ends it")
        raise
    return replay.info


@app.command(epilog=examples("millstream dlq replays", "millstream dlq replays r-5f0c2a9b1d3e"))
def replays(
    replay_id: Annotated[str | None, typer.Argument(metavar="ID", help="Show this replay, with what failed.")] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """List running replays and the reports of those that are over, or show one of them."""
    with given.client() as client:
        if replay_id is None:
            infos = client.dead_letters.replays()
        else:
            infos = [client.dead_letters.replay_status(replay_id).info]
    if given.as_json:
        print_json(document_of(infos if replay_id is None else infos[0]))
    elif replay_id is None:
        print_replays(infos)
    else:
        print_replay(infos[0])


@app.command(epilog=examples("millstream dlq abort r-5f0c2a9b1d3e"))
def abort(
    replay_id: Annotated[str, typer.Argument(metavar="ID", help="The replay's id.")], *, given: NamespaceOptions
) -> None:
    """Abort a replay.

    What it has sent stays sent; the rest stays where it is.
    """
    with given.client() as client:
        info = client.dead_letters.replay_status(replay_id).abort()
    if given.as_json:
        print_json(document_of(info))
    else:
        print_replay(info)


@app.command(
    epilog=examples(
        "# look first",
        "millstream dlq purge --reason TTL_EXPIRED --until 14d --dry-run",
        "millstream dlq purge --reason TTL_EXPIRED --until 14d",
        "millstream dlq purge --all --yes",
    )
)
def purge(
    ids: IdsArgument = None,
    *,
    filters: Filters,
    everything: EverythingOption = False,
    limit: Annotated[int | None, typer.Option("--max", metavar="N", min=1, help="Remove at most this many.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be removed, but remove nothing.")
    ] = False,
    yes: YesOption = False,
    given: NamespaceOptions,
) -> None:
    """Remove dead letters for good."""
    which = filters.options()
    _require_choice(ids, which, everything, "purge")
    with given.client() as client:
        letters = client.dead_letters
        if dry_run or not yes:
            outcome = letters.purge(ids or [], everything=everything, dry_run=True, limit=limit, **which)
        if not dry_run:
            if not yes:
                confirm(f"Remove {plural(outcome.total, 'dead letter')} for good?", yes=yes)
            outcome = letters.purge(ids or [], everything=everything, limit=limit, **which)
    if given.as_json:
        print_json({"dry_run": dry_run, **document_of(outcome)})
    elif dry_run:
        print_statistics(outcome)
        stderr.print("nothing was removed (--dry-run)")
    else:
        stdout.print(f"removed {plural(outcome.total, 'dead letter')}")

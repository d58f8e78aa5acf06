"""`millstream subscribe`: messages as they are published, to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.arguments import parse_timeout_s
from millstream.cli.connection import LinesOptions
from millstream.cli.interruption import Interruption, endless
from millstream.cli.output import examples, plural, stderr
from millstream.cli.rendering import make_renderer

if TYPE_CHECKING:
    from millstream.client import Message, Subscription

__all__ = ["EPILOG", "subscribe"]

EPILOG: Final = examples(
    "millstream subscribe 'orders.*.created' 'logs.#'",
    "# the next message of any topic, then stop",
    "millstream subscribe '#' --max 1 --json",
)


def subscribe(
    patterns: Annotated[
        list[str],
        typer.Argument(
            metavar="PATTERN...", help="Topics or patterns: * stands for one level, # at the end for all that follow."
        ),
    ],
    max_messages: Annotated[
        int | None, typer.Option("--max", "-m", min=1, metavar="N", help="Stop after this many messages.")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help="Stop when no message has come for this long, such as 10s or 5m."
        ),
    ] = None,
    line_format: Annotated[
        str, typer.Option("--format", metavar="TEXT", help="How to print a message; see `millstream consume`.")
    ] = "{topic}\\t{value}",
    *,
    given: LinesOptions,
) -> None:
    """Print messages of matching topics as they are published.

    Topics that are created later are included. Messages published earlier are not shown: use `millstream consume` for
    them. If messages come faster than they can be printed, some are left out, and their number is reported.
    """
    quiet_s = parse_timeout_s(timeout)
    render = make_renderer(line_format, as_json=given.as_json, terminal=sys.stdout.isatty())
    write, flush, count = sys.stdout.buffer.write, sys.stdout.buffer.flush, 0
    missed = 0
    with (
        endless(),
        given.client() as client,
        client.subscribe(*patterns) as subscription,
        Interruption() as interruption,
    ):
        for message in interruption.until_asked(_until_quiet(subscription, quiet_s)):
            write(render(message))
            flush()
            count += 1
            if count == max_messages:
                break
        missed = subscription.missed
    if missed:
        stderr.print(f"{plural(missed, 'message')} came too fast and were left out")
    elif stderr.is_terminal:
        stderr.print(f"[dim]{plural(count, 'message')}[/]")


def _until_quiet(subscription: Subscription, quiet_s: float | None) -> Iterator[Message]:
    while (message := subscription.next(quiet_s)) is not None:
        yield message

"""`millstream consume`: messages of a topic to standard output."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.arguments import START_FORMS, parse_start, parse_timeout_s
from millstream.cli.connection import LinesOptions
from millstream.cli.failure import ExitCode, UsageProblem
from millstream.cli.interruption import Interruption, endless
from millstream.cli.output import examples, plural, stderr
from millstream.cli.rendering import make_renderer
from millstream.names import is_pattern

if TYPE_CHECKING:
    from millstream.client import Client, Message, Stream

__all__ = ["EPILOG", "consume"]

EPILOG: Final = examples(
    "# everything there is, then wait for more",
    "millstream consume orders",
    "millstream consume orders --from 15m --no-follow",
    "# share the work: run it twice",
    "millstream consume orders --group audit",
    "millstream consume orders --format '{partition}:{offset} {key} {value}'",
)

_POLL_S: Final = 0.25
_HINT_S: Final = 1.0
_UNASSIGNED_S: Final = 10.0  # long enough for a rebalance, short enough for a script that expects an end


def consume(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="The topic to read, or a pattern such as orders.* or orders.#")
    ],
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-g", metavar="NAME", help="Read as a member of this group, and remember the progress."
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option("--from", metavar="PLACE", help=f"Where to begin: {START_FORMS}."),
    ] = "earliest",
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="N", min=0, help="Read only this partition; may be repeated."),
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max", "-m", min=1, metavar="N", help="Stop after this many messages.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for new messages, or stop at the end.")
    ] = True,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help="Stop when no message has come for this long, such as 10s or 5m."
        ),
    ] = None,
    line_format: Annotated[
        str, typer.Option("--format", metavar="TEXT", help="How to print a message; see above.")
    ] = "{value}",
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Skip messages that fail their checksum.")
    ] = False,
    *,
    given: LinesOptions,
) -> None:
    """Print the messages of a topic.

    A format may contain {value}, {key}, {headers}, {topic}, {partition}, {offset}, {timestamp}, {priority} and {id};
    \\n and \\t are a newline and a tab.

    With --json, each message is one JSON object on a line. A header that occurs several times is a list there, and a
    header that is not text is base64 after the prefix base64:.

    With --group, what was printed is committed, and --from counts only where the group has no committed offset yet. In
    a pipe, what fits into it counts as printed, read or not: `| head -2` may commit more than two messages, and --max 2
    commits two.

    Topics and partitions that are created later are read from their first message.
    """
    if group is not None and partition:
        raise UsageProblem("--group assigns partitions by itself; leave out --partition")
    place = parse_start(start, datetime.datetime.now(datetime.UTC))
    render = make_renderer(line_format, as_json=given.as_json, terminal=sys.stdout.isatty())
    quiet_s = parse_timeout_s(timeout)
    write, flush, count = sys.stdout.buffer.write, sys.stdout.buffer.flush, 0
    printed: Message | None = None
    interruption = Interruption()
    with (
        endless() if follow else nullcontext(),
        given.client() as client,
        client.stream(
            topic,
            group=group,
            start=place,
            partitions=partition or None,
            on_damage="skip" if skip_damaged else "raise",
        ) as stream,
        interruption,
    ):
        incoming = _until_quiet(stream, quiet_s) if follow else _until_end(client, stream, topic, quiet_s)
        for message in interruption.until_asked(incoming):
            write(render(message))
            # Whoever reads a pipe wants a message when it comes, not when 8 KiB of them have.
            flush()
            printed = message
            count += 1
            if count == max_messages:
                break
        if group is not None and printed is not None:
            # For the stream the last message is in hand until the next is asked for; here it is out and done.
            stream.commit(printed)
    if stderr.is_terminal:
        stderr.print(f"[dim]{plural(count, 'message')}[/]")
    if interruption.asked and not follow:  # when following, Ctrl-C is how it ends and not a failure
        raise typer.Exit(ExitCode.INTERRUPTED)


def _until_quiet(stream: Stream, quiet_s: float | None) -> Iterator[Message]:
    hint = stderr.is_terminal and quiet_s is None
    while True:
        message = stream.next(_HINT_S if hint else quiet_s)
        if message is not None:
            yield message
        elif hint:  # otherwise nobody knows whether it hangs
            stderr.print("[dim]waiting for messages; Ctrl-C ends[/]")
            hint = False
        else:
            return


def _until_end(client: Client, stream: Stream, topic: str, quiet_s: float | None) -> Iterator[Message]:
    """The messages that were there when we came.

    The end is where positions say it is, not where the last message was: compaction may have removed that one.  They
    are looked at only when a partition may be through, because asking for them costs more than a message.
    """
    names = [found.name for found in client.topics(topic)] if is_pattern(topic) else [topic]
    if not names:
        stderr.print(f"no topic matches {topic}", markup=False)
        return
    ends = {
        (name, partition): offset for name in names for partition, offset in client.offsets(name, at="latest").items()
    }
    heard_s = time.monotonic()
    look = True
    while not (look and _at_end(stream, ends)):
        message = stream.next(_POLL_S)
        if message is not None:
            heard_s = time.monotonic()
            end = ends.get((message.topic, message.partition), 0)
            look = message.offset + 1 >= end
            if message.offset < end:
                yield message
            continue
        look = True
        silent_s = time.monotonic() - heard_s
        if quiet_s is not None and silent_s >= quiet_s:
            return
        if silent_s >= _UNASSIGNED_S and not stream.assignment():
            stderr.print("no partition was assigned to this member: the others of the group hold them all")
            return


def _at_end(stream: Stream, ends: Mapping[tuple[str, int], int]) -> bool:
    """Whether everything up to `ends` was handed out from the partitions this stream holds, if it holds any."""
    positions = stream.position()
    return bool(positions) and all(offset >= ends.get(place, 0) for place, offset in positions.items())

"""`millstream lease`, `ack`, `nack`, `reject`, `extend`: work on a queue from a shell."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer
from rich.text import Text

from millstream.cli.arguments import parse_span
from millstream.cli.connection import LinesOptions, NamespaceOptions
from millstream.cli.failure import ExitCode, UsageProblem
from millstream.cli.output import examples, print_json, print_json_line, print_table, stderr, time_text
from millstream.cli.rendering import json_content
from millstream.cli.terminal import terminal_safe
from millstream.errors import InvalidArgument
from millstream.receipts import ReceiptHandle

if TYPE_CHECKING:
    from millstream.client.queue_requests import LeasedMessage

LEASE_EPILOG: Final = examples(
    "millstream lease orders --group billing",
    "# wait for one, keep it for five minutes",
    "millstream lease orders --wait 30s --lease 5m",
    "# settle with the receipt that was printed",
    "millstream ack orders:0:42:1:a1b2c3d4e5f67890",
    "# work through a queue in a shell",
    "millstream lease orders --max 100 --json | jq -r .receipt | xargs millstream ack",
)
ACK_EPILOG: Final = examples("millstream ack orders:0:42:1:a1b2c3d4e5f67890")
NACK_EPILOG: Final = examples("millstream nack orders:0:42:1:a1b2c3d4e5f67890 --reason 'db down' --retry-after 10s")
REJECT_EPILOG: Final = examples("millstream reject orders:0:42:1:a1b2c3d4e5f67890 --reason 'bad payload'")
EXTEND_EPILOG: Final = examples("millstream extend orders:0:42:1:a1b2c3d4e5f67890 --by 2m")

_Action = Literal["ack", "nack", "reject", "extend"]
_WORDS: Final = {
    "done": "done",
    "retried": "will be tried again",
    "dead": "is a dead letter now",
    "receipt_invalid": "refused: the lease has ended or was settled; nothing was changed",
    "gone": "refused: the message is not in the log any more, and is not delivered again",
}
_REFUSED: Final = ("receipt_invalid", "gone")

ReceiptsArgument = Annotated[
    list[str], typer.Argument(metavar="RECEIPT...", help="Receipts, as `millstream lease` prints them.")
]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="The reason, which is kept with the message.")
]


def lease(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    group: Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="The queue group.")] = "default",
    maximum: Annotated[
        int, typer.Option("--max", "-m", metavar="N", min=1, max=1000, help="Lease at most this many messages.")
    ] = 1,
    wait: Annotated[str, typer.Option("--wait", metavar="TIME", help="Wait this long for a message.")] = "0s",
    length: Annotated[
        str,
        typer.Option(
            "--lease", metavar="TIME", help="How long the messages are yours.", show_default="as the queue says"
        ),
    ] = "",
    auto_ack: Annotated[
        bool, typer.Option("--auto-ack", help="Ack the messages when they are sent; what is not printed is lost.")
    ] = False,
    *,
    given: LinesOptions,
) -> None:
    """Lease messages of a queue and print them with their receipts.

    The messages are yours until the lease ends, even after this command has ended. Settle them with ack, nack or
    reject, or let the lease run out, so that another consumer gets them. With --auto-ack there is nothing to settle.
    """
    wait_for = parse_span(wait, "--wait")
    with given.client() as client:
        messages = client.queues.lease(
            topic,
            group,
            max=maximum,
            wait=wait_for,
            lease=_length(length, "--lease"),
            auto_ack=auto_ack,
        )
    if given.as_json:
        for message in messages:
            print_json_line(_document(message))
        return
    # What is done already has nothing to settle it with, and no end.
    settling = () if auto_ack else ("receipt", "until")
    print_table(
        (*settling, "delivery", "key", "value"),
        [
            (
                *(() if auto_ack else (message.receipt, time_text(message.deadline_ms))),
                message.delivery,
                _text(message.key),
                _text(message.value),
            )
            for message in messages
        ],
        empty="no message is ready",
        numbers="delivery",
    )


def ack(receipts: ReceiptsArgument, *, given: NamespaceOptions) -> None:
    """Ack messages: they are done."""
    _settle("ack", receipts, given)


def nack(
    receipts: ReceiptsArgument,
    reason: ReasonOption = "",
    retry_after: Annotated[
        str,
        typer.Option(
            "--retry-after",
            metavar="TIME",
            help="How long to wait before the next try.",
            show_default="by the retry policy",
        ),
    ] = "",
    *,
    given: NamespaceOptions,
) -> None:
    """Nack messages: they failed and should be tried again."""
    _settle("nack", receipts, given, reason=reason, delay=_length(retry_after, "--retry-after"))


def reject(receipts: ReceiptsArgument, reason: ReasonOption = "", *, given: NamespaceOptions) -> None:
    """Reject messages: they will never succeed and become dead letters."""
    _settle("reject", receipts, given, reason=reason)


def extend(
    receipts: ReceiptsArgument,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="TIME",
            help="How long the messages stay yours, from now.",
            show_default="the lease's own length",
        ),
    ] = "",
    *,
    given: NamespaceOptions,
) -> None:
    """Keep messages for longer, and print until when.

    They can be kept for at most the group's processing_ms since they were leased.
    """
    length = _length(by, "--by")
    if length is not None and not length:
        raise UsageProblem("--by is more than 0; leave it out for the lease's own length")
    _settle("extend", receipts, given, delay=length)


def _settle(
    action: _Action,
    receipts: Sequence[str],
    given: NamespaceOptions,
    *,
    reason: str = "",
    delay: timedelta | None = None,
) -> None:
    for receipt in receipts:
        try:
            ReceiptHandle.parse(receipt)
        except InvalidArgument:
            raise UsageProblem(
                f"{receipt[:80]!r} is not a receipt as `millstream lease` prints them; nothing was changed"
            ) from None
    with given.client() as client:
        outcomes = client.queues.settle(action, receipts, reason=reason, delay=delay)
    if given.as_json:
        print_json([msgspec.to_builtins(outcome) for outcome in outcomes])
    else:
        rows = [
            (
                outcome.receipt,
                Text(_WORDS[outcome.result], style="red" if outcome.result in _REFUSED else ""),
                time_text(outcome.deadline_ms) if outcome.deadline_ms else "",
            )
            for outcome in outcomes
        ]
        if action == "extend":
            print_table(("receipt", "result", "until"), rows)
        else:
            print_table(("receipt", "result"), [row[:2] for row in rows])
    refused = sum(outcome.result in _REFUSED for outcome in outcomes)
    if refused:
        stderr.print(f"[red]{refused} of {len(outcomes)} receipts were refused[/]")
        raise typer.Exit(ExitCode.REQUEST)


def _document(message: LeasedMessage) -> dict[str, Any]:
    return {
        "receipt": message.receipt,
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "delivery": message.delivery,
        "failures": message.failures,
        "deadline_ms": message.deadline_ms,
        "timestamp_ms": message.timestamp_ms,
        "priority": message.priority,
        **json_content(message.key, message.headers, message.value),
    }


def _length(text: str, option: str) -> timedelta | None:
    return parse_span(text, option) if text else None


def _text(data: bytes | None) -> str | None:
    return None if data is None else terminal_safe(data.decode("utf-8", "surrogateescape"))

"""`millstream webhook`: messages of queues, delivered by HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from millstream.cli.arguments import parse_pairs, parse_span
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
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
    time_text,
)
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.client.webhooks import WebhookCreated, WebhookInfo, WebhookSettings

app = Commands(no_args_is_help=True, help="Deliver messages of queues by HTTP POST.")

_HOW = "How it delivers"

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.")]
SecretOption = Annotated[
    str | None,
    typer.Option(
        "--secret",
        envvar="MILLSTREAM_WEBHOOK_SECRET",
        metavar="TEXT",
        help="The key of the signatures. If left out, the broker generates one.",
    ),
]


@dataclass(frozen=True)
class Delivery:
    """How a webhook delivers."""

    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            metavar="NAME=VALUE",
            help="A header sent with every request; may be repeated. Values are not shown again.",
            rich_help_panel=_HOW,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="N", min=1, max=100, help="Requests at a time, 1 to 100 (1).", rich_help_panel=_HOW
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="N",
            min=0,
            max=10_000,
            help="At most this many requests per second; 0 sets no limit (0).",
            rich_help_panel=_HOW,
        ),
    ] = None
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help="How long the receiver may take to answer (10s).", rich_help_panel=_HOW
        ),
    ] = None
    retry: Annotated[
        str | None,
        typer.Option(
            "--retry",
            metavar="TIMES",
            help="Waits before further attempts (1s,5s,30s); then the message is a dead letter. 'none' tries once.",
            rich_help_panel=_HOW,
        ),
    ] = None
    client_errors: Annotated[
        Literal["reject", "retry"] | None,
        typer.Option(
            "--client-errors",
            metavar="reject|retry",
            help="What a 4xx answer means, other than 408, 410 and 429 (reject).",
            rich_help_panel=_HOW,
        ),
    ] = None
    payload: Annotated[
        Literal["json", "raw"] | None,
        typer.Option(
            "--payload",
            metavar="json|raw",
            help="Send a JSON document about the message, or its value as it is (json).",
            rich_help_panel=_HOW,
        ),
    ] = None

    def settings(self) -> WebhookSettings:
        """The settings that were given, as the client takes them."""
        settings: WebhookSettings = {}
        if self.header:
            settings["headers"] = parse_pairs(self.header, "--header")
        if self.concurrency is not None:
            settings["concurrency"] = self.concurrency
        if self.rate is not None:
            settings["rate"] = self.rate
        if self.timeout is not None:
            settings["timeout"] = parse_span(self.timeout, "--timeout")
        if self.retry is not None:
            waits = [] if self.retry == "none" else self.retry.split(",")
            settings["retry_delays"] = [parse_span(wait.strip(), "--retry") for wait in waits]
        if self.client_errors is not None:
            settings["reject_client_errors"] = self.client_errors == "reject"
        if self.payload is not None:
            settings["payload"] = self.payload
        return settings


@app.command(
    epilog=examples(
        "millstream webhook create orders https://example.com/hook",
        "# four at a time, at most 50 a second, of a group of their own",
        "millstream webhook create orders https://example.com/hook --group crm --concurrency 4 --rate 50",
        "millstream webhook create 'orders.#' https://example.com/hook -H 'Authorization=Bearer abc' --retry 1s,1m,10m",
    )
)
def create(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic, or a pattern such as orders.#")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to send the messages: an http or https URL.")],
    group: Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="The queue group.")] = "default",
    secret: SecretOption = None,
    start: Annotated[
        Literal["earliest", "latest"] | None,
        typer.Option("--start", metavar="earliest|latest", help="Where a new group begins (earliest)."),
    ] = None,
    *,
    delivery: Delivery,
    given: NamespaceOptions,
) -> None:
    """Deliver the messages of a queue group to a URL.

    The secret is shown only once.
    """
    settings = delivery.settings()
    with given.client() as client:
        made = client.webhooks.create(topic, url, group=group, secret=secret, start=start or "", **settings)
    _print_created(made, given.as_json)


@app.command("list", epilog=examples("millstream webhook list", "millstream webhook list --topic orders --json"))
def list_webhooks(
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only webhooks of this topic.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", "-g", metavar="GROUP", help="Only webhooks of this group.")
    ] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """List webhooks with their state.

    Messages that were delivered or failed are counted since the broker started.
    """
    with given.client() as client:
        found = client.webhooks.list(topic=topic, group=group)
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("id", "topic", "group", "url", "state", "delivered", "failed", "in flight", "last error"),
        [
            (
                info.id,
                info.topic,
                info.group,
                info.url,
                _state(info),
                info.delivered,
                info.failed,
                info.in_flight,
                info.paused_reason or (info.last_error if info.state == "failing" else ""),
            )
            for info in found
        ],
        empty="no webhooks",
        numbers="delivered|failed|in flight",
    )


@app.command(epilog=examples("millstream webhook show wh-5f0c6d1e2a3b"))
def show(webhook_id: IdArgument, *, given: NamespaceOptions) -> None:
    """Show a webhook: its settings, its state and its last error."""
    with given.client() as client:
        _print_one(client.webhooks.show(webhook_id), given.as_json)


@app.command(
    epilog=examples(
        "millstream webhook update wh-5f0c6d1e2a3b --url https://example.com/new",
        "millstream webhook update wh-5f0c6d1e2a3b --concurrency 8 --rate 0",
    )
)
def update(
    webhook_id: IdArgument,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Where to send messages from now on.")] = None,
    *,
    delivery: Delivery,
    given: NamespaceOptions,
) -> None:
    """Change settings of a webhook.

    What is not given stays as it is. Headers that are given replace all that were set before.
    """
    settings = delivery.settings()
    if url is None and not settings:
        raise UsageProblem("say what to change, such as --url or --concurrency")
    with given.client() as client:
        _print_one(client.webhooks.update(webhook_id, url=url, **settings), given.as_json)


@app.command(epilog=examples("millstream webhook pause wh-5f0c6d1e2a3b"))
def pause(webhook_id: IdArgument, *, given: NamespaceOptions) -> None:
    """Stop sending messages to a webhook.

    Messages in hand go back to the queue.
    """
    with given.client() as client:
        _print_one(client.webhooks.pause(webhook_id), given.as_json)


@app.command(epilog=examples("millstream webhook resume wh-5f0c6d1e2a3b"))
def resume(webhook_id: IdArgument, *, given: NamespaceOptions) -> None:
    """Resume a paused webhook."""
    with given.client() as client:
        _print_one(client.webhooks.resume(webhook_id), given.as_json)


@app.command(
    epilog=examples(
        "millstream webhook rotate wh-5f0c6d1e2a3b",
        "# the old secret has leaked: it must not sign any more",
        "millstream webhook rotate wh-5f0c6d1e2a3b --keep 0s",
    )
)
def rotate(
    webhook_id: IdArgument,
    secret: SecretOption = None,
    keep: Annotated[
        str,
        typer.Option("--keep", metavar="TIME", help="How long requests are signed with the previous secret as well."),
    ] = "24h",
    *,
    given: NamespaceOptions,
) -> None:
    """Give a webhook a new secret.

    The secret is shown only once.
    """
    kept = parse_span(keep, "--keep")
    with given.client() as client:
        _print_created(client.webhooks.rotate(webhook_id, secret=secret, keep=kept), given.as_json)


@app.command(epilog=examples("millstream webhook delete wh-5f0c6d1e2a3b --yes"))
def delete(webhook_id: IdArgument, yes: YesOption = False, *, given: NamespaceOptions) -> None:
    """Delete a webhook.

    Its queue group stays, with the messages in it.
    """
    confirm(f"Delete the webhook {webhook_id}?", yes=yes)
    with given.client() as client:
        client.webhooks.delete(webhook_id)
    print_done(f"deleted webhook [bold]{webhook_id}[/]", as_json=given.as_json, webhook=webhook_id, deleted=True)


@app.command("test", epilog=examples("millstream webhook test wh-5f0c6d1e2a3b"))
def send_test(webhook_id: IdArgument, *, given: NamespaceOptions) -> int:
    """Send a signed test request, which is no message, and show what the receiver answered."""
    with given.client() as client:
        tested = client.webhooks.test(webhook_id)
    if given.as_json:
        print_json(document_of(tested))
    elif tested.delivered:
        stdout.print(f"answered {tested.status} after {duration_text(tested.took_ms)}")
    else:
        stdout.print(terminal_safe(tested.error), markup=False)
    return 0 if tested.delivered else 1


def _print_created(made: WebhookCreated, as_json: bool) -> None:
    if as_json:
        print_json(document_of(made))
        return
    _print_one(made.webhook, as_json=False)
    print_facts([("secret", Text(made.secret, style="bold"))])
    stderr.print("[dim]The secret is not shown again.[/]")


def _print_one(info: WebhookInfo, as_json: bool) -> None:
    if as_json:
        print_json(document_of(info))
        return
    reason = terminal_safe(info.paused_reason)
    print_facts(
        [
            ("id", Text(info.id, style="bold")),
            ("topic", info.topic),
            ("group", info.group),
            ("url", info.url),
            ("state", Text.assemble(_state(info), f": {reason}" if reason else "")),
            ("delivered", count_text(info.delivered)),
            ("failed attempts", f"{info.failed:,}, {info.consecutive_failures:,} in a row"),
            ("dead letters", count_text(info.dead)),
            ("in flight", f"{info.in_flight} of {info.concurrency}"),
            ("last delivery", time_text(info.last_delivery_ms) if info.last_delivery_ms else None),
            ("last status", info.last_status or None),
            ("last error", info.last_error),
            ("rate", f"{info.rate:g} per second" if info.rate else "no limit"),
            ("timeout", duration_text(info.timeout_ms)),
            ("retries after", ", ".join(map(duration_text, info.retry_delays_ms)) or "none"),
            ("client errors", "reject" if info.reject_client_errors else "retry"),
            ("payload", info.payload),
            ("headers", ", ".join(info.header_names)),
            ("created", time_text(info.created_ms)),
            *([("old secret until", time_text(info.rotating_until_ms))] if info.rotating_until_ms else []),
        ]
    )


def _state(info: WebhookInfo) -> Text:
    return Text(info.state, style={"active": "green", "failing": "red"}.get(info.state, "yellow"))

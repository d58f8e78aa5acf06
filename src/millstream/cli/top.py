"""`millstream top`: the broker, live in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.cli.arguments import parse_length
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.interruption import endless
from millstream.cli.output import bytes_text, document_of, duration_text, examples, print_json, stdout
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.client.mqtt import MqttOverview
    from millstream.client.stats import GroupStanding, Overview, TopicActivity

__all__ = ["EPILOG", "Screen", "sparkline", "top"]

EPILOG: Final = examples(
    "millstream top",
    "millstream top --everywhere --interval 5s",
    "# for a script or a mail",
    "millstream top --once --json",
)

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
_INTERVAL_MS_MIN: Final = 200
_INTERVAL_MS_MAX: Final = 3_600_000
_PLOTTED: Final = ("published", "consumed", "acked", "failed")
_MODE_STYLES: Final = {"normal": "green", "throttled": "yellow"}


def top(
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="TIME", help="Time between two updates, 200ms to 1h.")
    ] = "2s",
    limit: Annotated[
        int,
        typer.Option("--limit", "-l", min=1, max=100, metavar="N", help="Show at most this many topics and groups."),
    ] = 10,
    everywhere: Annotated[bool, typer.Option("--everywhere", "-e", help="Show all namespaces, not only one.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Watch a broker: rates, the busiest topics, and the groups that are furthest behind.

    Press q or Ctrl-C to end. What is shown comes from the broker's memory, so watching does not slow it down.
    """
    if given.as_json and not once:
        raise UsageProblem("--json shows one look: add --once")
    interval_ms = parse_length(interval, "--interval")
    if not _INTERVAL_MS_MIN <= interval_ms <= _INTERVAL_MS_MAX:
        raise UsageProblem(f"--interval is 200ms to 1h, not {interval}")
    with given.client() as client:
        overview = client.overview(limit=limit, everywhere=everywhere)
        if given.as_json:
            print_json(document_of(overview))
            return
        screen = Screen()
        screen.seed(_past(client))
        mqtt = client.mqtt.overview(everywhere=everywhere)
        if once or not stdout.is_terminal:
            stdout.print(screen.render(overview, mqtt))
            return
        with (
            endless(),
            _keys() as wait_for_key,
            Live(screen.render(overview, mqtt), console=stdout, screen=True, auto_refresh=False) as live,
        ):
            while wait_for_key(interval_ms / 1000) not in ("q", "Q"):
                overview = client.overview(limit=limit, everywhere=everywhere)
                live.update(screen.render(overview, client.mqtt.overview(everywhere=everywhere)), refresh=True)


def _past(client: Client) -> dict[str, list[float]]:
    """The rates of the last minutes, so that the lines do not begin empty."""
    histories = ((name, client.history(f"{name}_rate", points=720)) for name in _PLOTTED)
    return {name: [point.avg for point in history.points[-_WIDTH:]] for name, history in histories}


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Single keys, as they are pressed; gives a function that waits so many seconds for one and returns it or ''."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios  # not everywhere, and only for terminals
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)

        def wait(seconds: float) -> str:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
            if not ready:
                return ""
            # Past the buffer of `sys.stdin`, which would take further keys along where no select sees them.
            key = os.read(sys.stdin.fileno(), 1)
            return key.decode("ascii", "replace") if key else "q"  # the terminal is gone

        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """The last values as bars, the highest of them full."""
    shown = list(values)[-width:]
    most = max(shown, default=0)
    if most <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[min(int(value / most * len(_BARS)), len(_BARS) - 1)] for value in shown)


class Screen:
    """What is on the terminal."""

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = {name: deque(maxlen=_WIDTH) for name in _PLOTTED}

    def seed(self, past: dict[str, list[float]]) -> None:
        for name, values in past.items():
            self._past[name].extend(values)

    def render(self, overview: Overview, mqtt: MqttOverview | None = None) -> RenderableType:
        for name, values in self._past.items():
            values.append(getattr(overview.rates, name))
        return Group(
            self._head(overview, mqtt),
            Text(),
            self._rates(overview),
            Text(),
            _topics(overview.busiest, everywhere=not overview.namespace),
            Text(),
            _groups(overview.furthest_behind, everywhere=not overview.namespace),
        )

    def _head(self, now: Overview, mqtt: MqttOverview | None) -> Text:
        mode = Text(now.mode, style=f"bold {_MODE_STYLES.get(now.mode, 'red')}")
        line = Text.assemble(
            (now.software, "bold"),
            "  ",
            mode,
            f"  up {duration_text(now.uptime_ms)}  connections {now.connections:,}",
            f"  memory {bytes_text(now.memory_bytes)}",
        )
        if now.reason:
            line.append(f"\n{terminal_safe(now.reason)}", style="red")
        line.append(
            f"\n{now.topics:,} topics  {now.messages:,} messages  {bytes_text(now.log_bytes)}  "
            f"disk free {bytes_text(now.disk_free_bytes)}\n"
            f"depth {now.depth:,}  leased {now.leased:,}  waiting {now.waiting:,}  scheduled {now.scheduled:,}  "
            f"dead letters {now.dead_letters:,}  oldest {duration_text(now.oldest_ms)}"
        )
        if mqtt is not None and (mqtt.sessions or mqtt.retained):
            line.append(
                f"\nMQTT: connected {mqtt.connected:,}  sessions {mqtt.sessions:,}  away {mqtt.away:,}  "
                f"subscriptions {mqtt.subscriptions:,}  retained {mqtt.retained:,}  received {mqtt.received:,}  "
                f"sent {mqtt.sent:,}  dropped {mqtt.dropped:,}"
            )
        return line

    def _rates(self, now: Overview) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, values in self._past.items():
            style = "red" if name == "failed" and values[-1] else "cyan"
            table.add_row(name, Text(f"{values[-1]:,.0f}/s", justify="right"), Text(sparkline(values), style=style))
        latency = f"p99: publish {now.publish_p99_ms:g} ms, end to end {now.end_to_end_p99_ms:g} ms, "
        table.add_row("latency", "", latency + f"fsync {now.fsync_p99_ms:g} ms")
        return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 1 else "right", no_wrap=number > 0)
    return table


def _name(row: TopicActivity | GroupStanding, everywhere: bool, rest: str = "") -> Text:
    """The only column that gives way on a narrow terminal: a number without its end is another number."""
    name = f"{row.namespace}/{row.topic}" if everywhere else row.topic
    return Text(name + rest, no_wrap=True, overflow="ellipsis")


def _topics(rows: Sequence[TopicActivity], *, everywhere: bool) -> Table:
    throttled = any(row.throttle_ms for row in rows)
    columns = ("topic", "published/s", "consumed/s", "messages", "size", "depth", "leased")
    table = _table(*columns, *["throttled"] * throttled)
    for row in rows:
        delay = Text(duration_text(row.throttle_ms), style="yellow") if row.throttle_ms else ""
        table.add_row(
            _name(row, everywhere),
            f"{row.published_rate:,.0f}",
            f"{row.consumed_rate:,.0f}",
            f"{row.messages:,}",
            bytes_text(row.size_bytes),
            f"{row.depth:,}",
            f"{row.leased:,}",
            *[delay] * throttled,
        )
    return table


def _groups(rows: Sequence[GroupStanding], *, everywhere: bool) -> Table:
    table = _table("group", "kind", "behind", "oldest", "leased", "consumers", "state")
    for row in rows:
        style = {"idle": "red", "paused": "yellow", "rebalancing": "yellow"}.get(row.state, "")
        table.add_row(
            _name(row, everywhere, f"/{row.group}"),
            row.kind,
            f"{row.lag:,}",
            duration_text(row.oldest_ms),
            f"{row.leased:,}",
            f"{row.consumers:,}",
            Text(row.state, style=style),
        )
    return table

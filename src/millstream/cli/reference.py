"""The reference pages, written from the code itself: `python -m millstream.cli.reference`.

A page that is written by hand is out of date; a test compares these with what this module makes of the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from rich.text import Text

from millstream.broker.access.permissions import PERMISSIONS
from millstream.broker.history import measures
from millstream.broker.stats import families
from millstream.cli.config import setting_text
from millstream.cli.failure import ExitCode
from millstream.cli.main import app
from millstream.cli.markdown import NOTICE, cell, table
from millstream.cli.reference_api import errors_page, http_page
from millstream.cli.reference_pipelines import pipelines_page
from millstream.cli.reference_sdk import sdk_page
from millstream.config import FLAGS, Settings, allowed_values, environment_name, setting_fields

__all__ = ["PAGES", "commands_page", "metrics_page", "permissions_page", "settings_page"]

_EXIT_CODES: Final = {
    ExitCode.OK: "done; also a command that reads without an end (`consume`, `subscribe`, `top`, `serve`) and was "
    "ended by Ctrl-C or SIGTERM",
    ExitCode.REQUEST: "the request failed; the message says why",
    ExitCode.USAGE: "the command line or the configuration is wrong",
    ExitCode.UNREACHABLE: "no broker answers at that address, or not in time",
    ExitCode.STORAGE: "stored data is damaged, locked or cannot be used",
    ExitCode.INTERRUPTED: "cut short by Ctrl-C (SIGINT)",
    ExitCode.TERMINATED: "cut short by SIGTERM",
}


def commands_page() -> str:
    """The page of all commands."""
    root = typer.main.get_command(app)
    context = root.make_context("millstream", [], resilient_parsing=True)
    lines = [
        "# Commands",
        NOTICE,
        "Most commands are a noun, then a verb. Results go to standard output; progress, hints and errors go to "
        "standard error. Every command except `serve` takes `--json`. Durations are written `500ms`, `30s`, `5m` or "
        "`1h30m`; a bare number means seconds. Points in time are written `2026-01-31T09:30`, which is UTC, or "
        "`2026-01-31T09:30+01:00`.",
        "An error is one sentence with its code and a hint. `millstream errors explain CODE` tells more, and "
        "`MILLSTREAM_DEBUG=1` shows the traceback as well.",
        table("| Exit code | Meaning |", (f"| {int(code)} | {text} |" for code, text in _EXIT_CODES.items())),
        "These options go before or after any command that talks to a broker:",
        table("| Option | Meaning |", (_option_row(p, context) for p in root.params if p.envvar)),
        *_command_sections(root, "millstream"),
    ]
    return "\n\n".join(lines) + "\n"


def _command_sections(command: Any, path: str) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    children = getattr(command, "commands", {})
    if children:
        if path != "millstream":
            yield f"## {path}"
            yield _plain(command.help)
        for name, child in children.items():
            yield from _command_sections(child, f"{path} {name}")
        return
    yield f"{'##' if path.count(' ') == 1 else '###'} {path}"
    yield _plain(command.help)
    arguments = [_argument_name(p) for p in command.params if p.param_type_name == "argument"]
    yield f"```\n{' '.join([path, *arguments, '[OPTIONS]'])}\n```"
    rows = [_option_row(p, context) for p in command.params if not getattr(p, "hidden", False)]
    yield table("| Option | Meaning |", rows)
    yield f"```\n{_examples(command.epilog)}\n```"


def _argument_name(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).removesuffix("...")
    repeated = f"{name}..." if parameter.nargs == -1 else name
    return repeated if parameter.required or repeated.startswith("[") else f"[{repeated}]"


def _option_row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        names = cell(f"`{parameter.metavar or parameter.name.upper()}`")
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if not parameter.is_flag:
            names += f" {cell(parameter.metavar)}"
    notes = []
    default = parameter.get_default(context, call=False)
    if default not in (None, False, True, [], "") and parameter.param_type_name != "argument":
        notes.append(f"default `{default}`")
    if parameter.envvar:
        notes.append(f"or `{parameter.envvar}`")
    text = _plain(parameter.help).rstrip(".") + "." + (f" ({'; '.join(notes)})" if notes else "")
    return f"| {names} | {cell(text)} |".replace("  ", " ")


def _plain(markup: str | None) -> str:
    return Text.from_markup(re.sub(r"(?<!\n)\n(?!\n)", " ", markup or "")).plain.strip()


def _examples(epilog: str) -> str:
    lines = Text.from_markup(epilog).plain.splitlines()[1:]
    return "\n".join(line.removeprefix("$ ") for line in lines)


def settings_page() -> str:
    """The page of all settings."""
    lines = [
        "# Configuration",
        NOTICE,
        "Settings come from a YAML file (`millstream serve --config FILE`, or `MILLSTREAM_CONFIG`). Environment "
        "variables override the file, and options override both. `millstream config show` prints every value and where "
        "it came from. A key that does not exist is an error, not a warning.",
        "```yaml\nserver:\n  port: 9092\nstorage:\n  data: /var/lib/millstream\n  segment_bytes: 128MiB\n"
        "topics:\n  retention_ms: 30d\n```",
        f"The environment variable of `server.port` is `{environment_name('server.port')}`, with two underscores after "
        "the section. With one underscore it sets nothing, and `serve` warns about it. Any setting can be given as an "
        "option with `--set server.port=9092`; the common ones have options of their own.",
        "Sizes are numbers of bytes or have a unit: `KiB`, `MiB`, `GiB`, `TiB` count in 1024s and `KB`, `MB`, `GB`, "
        "`TB` in 1000s. Durations are numbers of milliseconds or have a unit: `ms`, `s`, `m`, `h`, `d`, `w`.",
    ]
    for section, field in Settings.model_fields.items():
        lines += [f"## {section}", (field.annotation.__doc__ or "").strip() if field.annotation else ""]
        rows = [_setting_row(key, leaf) for key, leaf in setting_fields() if key.startswith(f"{section}.")]
        lines.append(table("| Setting | Default | Meaning |", rows))
    return "\n\n".join(lines) + "\n"


def _setting_row(key: str, field: Any) -> str:
    flag = f" Option `{FLAGS[key]}`." if key in FLAGS else ""
    meaning = f"{field.description}{flag} Allowed: {allowed_values(key)}."
    return f"| `{key}` | `{setting_text(key, field.default)}` | {cell(meaning)} |"


def metrics_page() -> str:
    """The page of all metrics, and of what is kept of them."""
    lines = [
        "# Metrics",
        NOTICE,
        "`GET /metrics` on the HTTP port answers in Prometheus' text format, or as OpenMetrics if that is asked for. "
        "`millstream metrics` shows the same. Counters end in `_total` and count since the broker started. Times are "
        "in seconds and sizes in bytes. The usual `process_*` and `python_*` metrics are there as well.",
        "Topics and groups beyond `metrics.series_max` have no series of their own: they are summed up under "
        '`topic="_other"`, and `millstream_series_folded` says how many there are.',
    ]
    for heading, metrics in families.all_families():
        rows = [f"| `{it.name}` | {it.kind} | {', '.join(it.labels) or '–'} | {cell(it.help)} |" for it in metrics]
        lines += [f"## {heading}", table("| Metric | Type | Labels | Meaning |", rows)]
    lines += [
        "## History",
        "The broker measures itself every 5 seconds. It keeps the average, minimum and maximum of the last hour (every "
        "5 seconds), the last day (every minute) and the last 30 days (every 15 minutes). Read them with "
        "`GET /api/v1/stats/history` or `client.history(…)`.",
    ]
    for heading, named in (
        ("Of the broker", measures.BROKER),
        ("Of a topic", measures.TOPIC),
        ("Of a group", measures.GROUP),
    ):
        rows = [f"| `{name}` | {unit or '–'} |" for name, unit in named.items()]
        lines += [f"### {heading}", table("| Metric | Unit |", rows)]
    return "\n\n".join(lines) + "\n"


def permissions_page() -> str:
    """The page of who may make which call."""
    lines = [
        "# Permissions",
        NOTICE,
        "The permission that a key needs for each call, whichever door the call comes through. "
        "[Access](../guide/access.md) says what roles and scopes are. The permission is needed on what the call names: "
        "topics, groups, messages, namespaces. `any` means any role, and `open` needs no key. Calls marked as audited "
        "are written to the audit log.",
    ]
    for permission in ("open", "any", "read", "produce", "consume", "admin"):
        rows = sorted(
            f"| `{call.__struct_config__.tag}` | {'audited' if rule.audited else ''} |"  # type: ignore[attr-defined]
            for call, rule in PERMISSIONS.items()
            if rule.permission == permission
        )
        lines += [f"## {permission}", table("| Call | |", rows)]
    lines += [
        "## On the hot path",
        "PUBLISH needs `produce` and FETCH needs `read`. LEASE and SETTLE need `consume`, which `queue.open` checks on "
        "the topic.",
    ]
    return "\n\n".join(lines) + "\n"


PAGES: Final = {
    "cli.md": commands_page,
    "configuration.md": settings_page,
    "errors.md": errors_page,
    "http.md": http_page,
    "metrics.md": metrics_page,
    "permissions.md": permissions_page,
    "pipelines.md": pipelines_page,
    "sdk.md": sdk_page,
}


def _main(directory: Path) -> None:
    for name, page in PAGES.items():
        (directory / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))

"""The entry point: every command in one tree, and the one place where failures become words and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from millstream.cli import (
    admin,
    audit,
    backup,
    bench,
    config,
    consume,
    dlq,
    doctor,
    errors,
    group,
    health,
    interruption,
    key,
    lease,
    log,
    message,
    metrics,
    mode,
    mqtt,
    namespace,
    pipeline,
    publish,
    queue,
    schedule,
    serve,
    status,
    subscribe,
    top,
    topic,
    trace,
    webhook,
    why,
)
from millstream.cli.bundles import Commands
from millstream.cli.connection import CaOption, KeyOption, credentials_first, use_credentials
from millstream.cli.failure import ExitCode, UsageProblem, drop_output, report

__all__ = ["app", "main"]

_STORY = """Millstream, a durable message broker.

[not dim]A tour in seven commands, the first in a terminal of its own:

[dim]$[/dim] millstream serve                          [dim]# start a broker[/dim]
[dim]$[/dim] millstream topic create orders -p 3       [dim]# a log in three partitions[/dim]
[dim]$[/dim] millstream publish orders hello world     [dim]# two messages, two receipts[/dim]
[dim]$[/dim] millstream consume orders --group audit   [dim]# read them; Ctrl-C ends[/dim]
[dim]$[/dim] millstream group lag audit                [dim]# how far the group has come[/dim]
[dim]$[/dim] millstream lease orders --group billing   [dim]# the same topic as a work queue[/dim]
[dim]$[/dim] millstream why orders/billing             [dim]# what is it waiting for?[/dim][/not dim]
"""

_EPILOG = (
    "Every command except serve takes --json, and the --help of each command ends with examples. Durations are written "
    "500ms, 30s, 5m or 1h30m; a bare number means seconds. A time without a zone is UTC. Exit codes: 1 the request "
    "failed, 2 wrong usage or configuration, 3 no broker answers, 4 damaged or unusable data, 130 cut short by Ctrl-C, "
    "143 cut short by SIGTERM."
)

_DAILY, _QUEUES, _OPERATING, _HELP = "Messages", "Queues", "Operating", "Looking things up"

app = Commands(
    name="millstream",
    help=_STORY,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        status.version()
        raise typer.Exit


@app.callback(help=_STORY, epilog=_EPILOG)
def _for_all_commands(
    key: KeyOption = None,
    ca: CaOption = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    use_credentials(key, ca)


def _command(function: Callable[..., None], epilog: str, panel: str) -> None:
    app.command(epilog=epilog, rich_help_panel=panel)(function)


_command(publish.publish, publish.EPILOG, _DAILY)
_command(consume.consume, consume.EPILOG, _DAILY)
_command(subscribe.subscribe, subscribe.EPILOG, _DAILY)
app.add_typer(topic.app, name="topic", rich_help_panel=_DAILY)
app.add_typer(message.app, name="message", rich_help_panel=_DAILY)
app.add_typer(queue.app, name="queue", rich_help_panel=_QUEUES)
for _function, _epilog in (
    (lease.lease, lease.LEASE_EPILOG),
    (lease.ack, lease.ACK_EPILOG),
    (lease.nack, lease.NACK_EPILOG),
    (lease.reject, lease.REJECT_EPILOG),
    (lease.extend, lease.EXTEND_EPILOG),
    (why.why, why.EPILOG),
):
    _command(_function, _epilog, _QUEUES)
app.add_typer(group.app, name="group", rich_help_panel=_DAILY)
_command(trace.trace, trace.EPILOG, _DAILY)
app.add_typer(dlq.app, name="dlq", rich_help_panel=_QUEUES)
app.add_typer(schedule.app, name="schedule", rich_help_panel=_QUEUES)
app.add_typer(webhook.app, name="webhook", rich_help_panel=_QUEUES)
app.add_typer(mqtt.app, name="mqtt", rich_help_panel=_DAILY)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_DAILY)
app.add_typer(namespace.app, name="namespace", rich_help_panel=_DAILY)
_command(serve.serve, serve.EPILOG, _OPERATING)
_command(status.status, status.STATUS_EPILOG, _OPERATING)
_command(top.top, top.EPILOG, _OPERATING)
_command(metrics.metrics, metrics.EPILOG, _OPERATING)
_command(health.health, health.EPILOG, _OPERATING)
_command(mode.mode, mode.EPILOG, _OPERATING)
app.add_typer(admin.app, name="admin", rich_help_panel=_OPERATING)
app.add_typer(key.app, name="key", rich_help_panel=_OPERATING)
_command(audit.audit, audit.EPILOG, _OPERATING)
app.add_typer(config.app, name="config", rich_help_panel=_OPERATING)
_command(doctor.doctor, doctor.EPILOG, _OPERATING)
_command(backup.backup, backup.BACKUP_EPILOG, _OPERATING)
_command(backup.restore, backup.RESTORE_EPILOG, _OPERATING)
app.add_typer(log.app, name="log", rich_help_panel=_OPERATING)
app.add_typer(bench.app, name="bench", rich_help_panel=_OPERATING)
app.add_typer(errors.app, name="errors", rich_help_panel=_HELP)
_command(status.version, status.VERSION_EPILOG, _HELP)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the exit code of what happened."""
    if arguments is None:
        # `timeout`, containers and service managers end a program with SIGTERM.  As with Ctrl-C, a consumer then still
        # commits what it printed, and a benchmark removes its topic.
        interruption.listen()
        _prune(sys.argv[1:2])
    code = _run(arguments)
    if arguments is None:
        interruption.fall_silent()
    sys.exit(code)


def _prune(wanted: Sequence[str]) -> None:
    """Leave only the branch that was asked for: to build the whole tree takes a quarter of the time of a command."""
    groups = [each for each in app.registered_groups if each.name in wanted]
    commands = [each for each in app.registered_commands if each.callback and each.callback.__name__ in wanted]
    if groups or commands:  # else it is an option, or a mistake whose answer needs all names
        app.registered_groups, app.registered_commands = groups, commands


def _run(arguments: Sequence[str] | None) -> int:
    try:
        words = credentials_first(sys.argv[1:] if arguments is None else arguments)
        if words[:1] == ["help"]:  # as of git and others
            words = [*words[1:], "--help"]
        outcome = app(args=words, prog_name="millstream", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except (KeyboardInterrupt, typer.Abort):
        return interruption.cut_short()
    except SystemExit as request:  # how typer ends after completion, and when a pipe breaks
        return _reader_gone() if isinstance(request.__context__, BrokenPipeError) else int(request.code or 0)
    except Exception as problem:
        return _failed(problem)
    if outcome == ExitCode.INTERRUPTED:  # what the parser makes of any interruption
        return interruption.cut_short()
    return int(outcome) if isinstance(outcome, int) else ExitCode.OK


def _failed(problem: Exception) -> int:
    # The parser's own errors, told by shape: typer has its exceptions from click or from a private copy of it,
    # depending on its version.
    if not hasattr(problem, "format_message"):
        return report(problem)
    context: Any = getattr(problem, "ctx", None)
    if type(problem).__name__ == "NoArgsIsHelpError":
        problem.show()  # type: ignore[attr-defined]
        return ExitCode.USAGE
    usage = UsageProblem(_sentence(problem.format_message()))
    if context is not None:
        usage.remedy = f"See `{context.command_path} --help`."  # type: ignore[misc]
    return report(usage)


def _sentence(text: str) -> str:
    """The parser's message as ours look: one line, lower case, no full stop."""
    text = " ".join(text.split()).rstrip(".").replace(": Value error, ", ": ")  # a word of Python's, about a choice
    return text[:1].lower() + text[1:]


def _reader_gone() -> int:
    """`millstream consume orders | head -1`: not a failure, and nobody is left to hear about it."""
    drop_output()
    return ExitCode.OK


if __name__ == "__main__":
    main()

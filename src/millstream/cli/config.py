"""`millstream config`: which settings a broker started here would get, and from where."""

from __future__ import annotations

from operator import attrgetter

from rich.text import Text

from millstream.cli.bundles import Commands
from millstream.cli.output import JsonOption, bytes_text, duration_text, examples, print_json, print_table
from millstream.cli.settings import ServeOptions

__all__ = ["app", "setting_text"]

app = Commands(no_args_is_help=True, help="Check and explain the broker's settings.")


@app.callback()
def _config() -> None:
    """Keeps `show` a command of its own while it is the only one."""


@app.command(
    epilog=examples(
        "millstream config show",
        "# would this file do?",
        "millstream config show --config millstream.yaml",
        "MILLSTREAM_SERVER__PORT=9192 millstream config show --json",
    )
)
def show(*, options: ServeOptions, as_json: JsonOption = False) -> None:
    """Show every setting, its value and where the value came from; fail if any of them is wrong.

    It takes the options of `serve` and reads the same file and environment variables.
    """
    settings, sources = options.read_settings()
    from millstream.config import setting_fields

    values = {key: attrgetter(key)(settings) for key, _ in setting_fields()}
    if as_json:
        print_json({key: {"value": value, "from": sources[key]} for key, value in values.items()})
        return
    print_table(
        ("setting", "value", "from"),
        [(key, setting_text(key, value), _source(sources[key])) for key, value in values.items()],
    )


def setting_text(key: str, value: object) -> str:
    """A value as people would write it: `64 MiB`, `7 d`, `true`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and "_ms" in key:
        return duration_text(value)
    if isinstance(value, int) and "bytes" in key:
        return bytes_text(value)
    return str(value)


def _source(source: str) -> Text:
    return Text(source, style="dim" if source == "default" else "cyan")

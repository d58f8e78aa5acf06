"""`millstream serve`: the broker in the foreground.  The only command that loads it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import typer
from rich.markup import escape

from millstream.cli.output import examples, stderr
from millstream.cli.settings import ServeOptions
from millstream.version import VERSION

if TYPE_CHECKING:
    from millstream.config import Settings

__all__ = ["EPILOG", "serve"]

EPILOG: Final = examples(
    "millstream serve",
    "# for other machines: with a certificate, and keys (`millstream key create`)",
    "millstream serve --data /var/lib/millstream --host 0.0.0.0 --set tls.certificate=broker.pem",
    "# a throw-away broker on any free port",
    "millstream serve --data $(mktemp -d) --port 0",
    "# settings from a file, one of them overruled",
    "millstream serve --config millstream.yaml --set topics.auto_create=false",
)

_DURABILITY: Final = {
    "group": "confirmed after a shared fsync: survives a power cut",
    "always": "confirmed after an fsync of its own: survives a power cut",
    "interval": "confirmed before the fsync: survives a crash of the broker",
    "never": "confirmed without an fsync: survives a crash of the broker",
}


def serve(*, options: ServeOptions) -> None:
    """Run a broker until Ctrl-C or SIGTERM.

    Once the broker accepts connections, it prints `listening on HOST:PORT` to standard output, then the addresses of
    the dashboard and of MQTT. Its log goes to standard error.

    Settings come from the file, then from environment variables such as MILLSTREAM_SERVER__PORT, then from these
    options; see `millstream config show`.
    """
    settings, sources = options.read_settings()
    from millstream.server import lifecycle  # here, so that no other command waits for the broker to load
    from millstream.server.logs import set_up_logs

    set_up_logs(settings.log, sys.stderr)

    def announce(address: str, http: str, mqtt: str) -> None:
        if stderr.is_terminal:
            _print_banner(settings)
        # The line that scripts and supervisors wait for: plain, whole, and out before anything else happens.
        sys.stdout.write(
            f"listening on {address}\n"
            + (f"dashboard and HTTP on {http}\n" if http else "")
            + (f"MQTT on {mqtt}\n" if mqtt else "")
        )
        sys.stdout.flush()

    raise typer.Exit(lifecycle.serve(settings, announce, sources))


def _print_banner(settings: Settings) -> None:
    storage = settings.storage
    stderr.print(f"[bold]millstream[/] {VERSION}")
    stderr.print(f"  [dim]data[/]     {escape(os.path.abspath(storage.data))}", soft_wrap=True)
    stderr.print(f"  [dim]publish[/]  {_DURABILITY[storage.fsync]} [dim]({storage.fsync})[/]")
    stderr.print("  [dim]stop[/]     Ctrl-C")

"""`millstream doctor`: is everything as it should be here, and if not, what to do?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from millstream.cli.checks import (
    Check,
    check_broker,
    check_data,
    check_machine,
    check_ports,
    check_security,
    lock_holder,
)
from millstream.cli.findings import report
from millstream.cli.output import JsonOption, examples
from millstream.cli.settings import ServeOptions
from millstream.errors import ConfigInvalid

__all__ = ["EPILOG", "doctor"]

EPILOG: Final = examples(
    "# before the first start, or when something is wrong",
    "millstream doctor --config millstream.yaml",
    "# a broker elsewhere",
    "millstream doctor --broker broker-1:9092",
    "millstream doctor --json | jq '.checks[] | select(.verdict != \"ok\")'",
)


def doctor(
    *,
    options: ServeOptions,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            "-b",
            envvar="MILLSTREAM_BROKER",
            metavar="HOST:PORT",
            help="The broker to ask. Without it, the one that the settings describe.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, the settings, the data directory and the broker, and say how to fix what is wrong.

    It takes the options of `serve` and reads the same file and environment variables. It works with and without a
    broker. The exit code is 1 if anything fails.
    """
    checks: list[Check] = []
    try:
        settings, _ = options.read_settings()
        checks.append(Check("settings", "ok", "valid"))
    except ConfigInvalid as error:
        checks.append(Check("settings", "fail", str(error), "See docs/reference/configuration.md."))
        from millstream.config import Settings

        settings = Settings()
    in_use = lock_holder(Path(settings.storage.data)) is not None
    its_host = "localhost" if settings.server.host in ("0.0.0.0", "::") else settings.server.host
    its_host = f"[{its_host}]" if ":" in its_host else its_host
    scheme = "tls://" if settings.tls.certificate else ""
    if broker is None and settings.server.port:
        broker = f"{scheme}{its_host}:{settings.server.port}"
    about_broker = list(check_broker(broker, in_use=in_use)) if broker else []
    checks += check_machine(settings)
    checks += check_data(settings)
    checks += check_ports(settings, broker_runs=in_use)
    checks += check_security(settings)
    checks += about_broker
    report(
        checks,
        as_json=as_json,
        summary=lambda counts: f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed",
    )

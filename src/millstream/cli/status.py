"""`millstream status` and `millstream version`: what is running, here and there."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from millstream.cli.connection import BrokerOptions
from millstream.cli.output import (
    JsonOption,
    bytes_text,
    duration_text,
    examples,
    print_facts,
    print_json,
    stdout,
)
from millstream.version import VERSION

__all__ = ["STATUS_EPILOG", "VERSION_EPILOG", "status", "version"]

STATUS_EPILOG: Final = examples("millstream status", "millstream status --broker broker-1:9092 --json")
VERSION_EPILOG: Final = examples("millstream version", "millstream version --json")


def status(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also show counters that are zero.")] = False,
    *,
    given: BrokerOptions,
) -> None:
    """Show whether a broker answers, and what it has done since it started."""
    with given.client() as client:
        description = client.broker()
    if given.as_json:
        print_json(description)
        return
    counters = {name: value for name, value in description.pop("metrics", {}).items() if value or everything}
    print_facts([("broker", given.broker), *_facts(description)])
    if counters:
        stdout.print()
        print_facts(_facts(counters))


def version(as_json: JsonOption = False) -> None:
    """Show the version of this command."""
    if as_json:
        print_json({"version": VERSION, "python": platform.python_version()})
    else:
        stdout.print(f"millstream {VERSION} (Python {platform.python_version()})")


def _facts(description: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Whatever the broker tells, in its own order: a newer one may tell more."""
    for key, value in description.items():
        name = key.removeprefix("millstream_")
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_ms"):
            yield _words(name.removesuffix("_ms")), duration_text(value)
        elif isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
            yield _words(name), bytes_text(value)
        elif isinstance(value, list | dict):
            yield _words(name), ", ".join(map(str, value))
        else:
            yield _words(name), value


def _words(key: str) -> str:
    return key.replace("_", " ")

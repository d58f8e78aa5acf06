"""`millstream why`: one sentence on what holds a message or a queue up."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from millstream.cli.connection import NamespaceOptions
from millstream.cli.output import (
    document_of,
    duration_text,
    examples,
    print_facts,
    print_json,
    stdout,
    time_text,
)
from millstream.cli.terminal import terminal_safe

EPILOG: Final = examples(
    "millstream why 01M7GKBEFSGBA51QG000000000",
    "millstream why orders/billing",
    "millstream why orders/billing --json | jq .facts",
)

_TIMES_FROM: Final = 10**11


def why(
    about: Annotated[str, typer.Argument(metavar="ID|TOPIC/GROUP", help="A message id, or a queue as TOPIC/GROUP.")],
    *,
    given: NamespaceOptions,
) -> None:
    """Say why a message, or the next message of a queue, is not being delivered right now."""
    with given.client() as client:
        answer = client.why(about)
    if given.as_json:
        print_json(document_of(answer))
        return
    stdout.print(terminal_safe(answer.sentence), markup=False)
    if answer.facts:
        stdout.print()
        print_facts(
            [(name.removesuffix("_ms").replace("_", " "), _shown(name, value)) for name, value in answer.facts.items()]
        )


def _shown(name: str, value: object) -> object:
    """Milliseconds since 1970 as a time; milliseconds that are a length of time are never that many."""
    if name.endswith("_ms") and isinstance(value, int):
        return time_text(value) if value > _TIMES_FROM else duration_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return value

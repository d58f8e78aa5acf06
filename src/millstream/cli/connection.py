"""The options that say which broker a command talks to, and the client they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from millstream.client import Client

__all__ = ["BrokerOption", "NamespaceOption", "open_client"]

_PANEL = "Connection"

BrokerOption = Annotated[
    str,
    typer.Option(
        "--broker",
        "-b",
        envvar="MILLSTREAM_BROKER",
        metavar="HOST:PORT",
        help="The broker to talk to.",
        rich_help_panel=_PANEL,
    ),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        envvar="MILLSTREAM_NAMESPACE",
        metavar="NAME",
        help="The namespace that names belong to.",
        rich_help_panel=_PANEL,
    ),
]

DEFAULT_BROKER = "localhost:9092"


@contextmanager
def open_client(broker: str, namespace: str) -> Iterator[Client]:
    """A connected client, closed at the end of the block."""
    from millstream import connect  # here, so that `--help` and completion do not wait for the SDK to load

    with connect(broker, namespace=namespace, client_id="millstream-cli") as client:
        yield client

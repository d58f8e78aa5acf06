"""The options that say which broker a command talks to, and the client they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.failure import UsageProblem
from millstream.cli.output import JsonLinesOption, JsonOption
from millstream.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from millstream.client import Client

__all__ = [
    "BrokerOptions",
    "CaOption",
    "KeyOption",
    "LinesOptions",
    "NamespaceOption",
    "NamespaceOptions",
    "client_credentials",
    "credentials_first",
    "given_credentials",
    "open_client",
    "use_credentials",
]

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
        help="The namespace to work in.",
        rich_help_panel=_PANEL,
    ),
]

DEFAULT_BROKER = "localhost:9092"


#: Given once, in front of the command or behind it, and good for all of them.
_given: dict[str, str | None] = {"key": None, "ca": None}


KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="MILLSTREAM_KEY",
        metavar="KEY",
        help="API key for the broker. Better set in the environment variable, where other users do not see it.",
        rich_help_panel=_PANEL,
        show_envvar=True,
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--ca",
        envvar="MILLSTREAM_CA",
        metavar="FILE",
        help="PEM file of certificate authorities to trust. Connects with TLS, as does an address tls://HOST:PORT.",
        rich_help_panel=_PANEL,
    ),
]


def use_credentials(key: str | None, ca: str | None) -> None:
    _given.update(key=key, ca=ca)


def credentials_first(words: Sequence[str]) -> list[str]:
    """`millstream topic list --ca FILE` as the parser wants it: what is good for all commands stands first."""
    first: list[str] = []
    rest: list[str] = []
    unread = iter(words)
    for word in unread:
        name, equals, _ = word.partition("=")
        if word == "--":  # what follows is no option, whatever it looks like
            rest += [word, *unread]
        elif name not in ("--api-key", "--ca"):
            rest.append(word)
        elif equals:
            first.append(word)
        elif (value := next(unread, None)) is not None:
            first += [word, value]
        else:
            raise UsageProblem(f"{word} needs a value behind it")
    return first + rest


def client_credentials() -> tuple[str | None, str | None]:
    """Key and authorities, for clients that are made elsewhere: in processes of their own."""
    return _given["key"], _given["ca"]


def given_credentials() -> dict[str, str | None]:
    """Key and authorities as the data source of Spark calls them, which has a connection of its own."""
    return {"token": _given["key"], "tls.ca": _given["ca"]}


@contextmanager
def open_client(broker: str, namespace: str, *, timeout_s: float = 30.0) -> Iterator[Client]:
    """A connected client, closed at the end of the block."""
    from millstream import connect  # here, so that `--help` and completion do not wait for the SDK to load

    key, ca = client_credentials()
    with connect(
        broker, namespace=namespace, client_id="millstream-cli", key=key, ca=ca, timeout_s=timeout_s
    ) as client:
        yield client


@dataclass(frozen=True)
class BrokerOptions:
    """What every command takes that asks a broker something."""

    as_json: JsonOption = False
    broker: BrokerOption = DEFAULT_BROKER

    def client(self) -> AbstractContextManager[Client]:
        return open_client(self.broker, DEFAULT_NAMESPACE)


@dataclass(frozen=True)
class NamespaceOptions(BrokerOptions):
    """What every command takes that asks about something with a name."""

    namespace: NamespaceOption = DEFAULT_NAMESPACE

    def client(self) -> AbstractContextManager[Client]:
        return open_client(self.broker, self.namespace)


@dataclass(frozen=True)
class LinesOptions(NamespaceOptions):
    """As NamespaceOptions, for commands whose JSON comes line by line."""

    as_json: JsonLinesOption = False

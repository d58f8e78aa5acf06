"""The options that set up a broker, shared by `serve`, `config show` and `doctor`, and the settings they lead to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from millstream.cli.arguments import parse_pairs
from millstream.cli.failure import UsageProblem
from millstream.cli.output import stderr
from millstream.errors import ConfigInvalid

if TYPE_CHECKING:
    from millstream.config import Settings

__all__ = ["ConfigFileOption", "DataOption", "ServeOptions", "read_settings"]

ConfigFileOption = Annotated[
    Path | None,
    typer.Option("--config", envvar="MILLSTREAM_CONFIG", metavar="FILE", help="A YAML file of settings."),
]
DataOption = Annotated[str | None, typer.Option("--data", metavar="DIR", help="The broker's data directory (./data).")]


@dataclass(frozen=True)
class ServeOptions:
    """What `serve` takes."""

    data: DataOption = None
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on (127.0.0.1).")] = (
        None
    )
    port: Annotated[
        str | None,
        typer.Option("--port", metavar="N", help="Port of the native protocol (9092); 0 picks any free port."),
    ] = None
    http_port: Annotated[
        str | None,
        typer.Option("--http-port", metavar="N", help="Port of HTTP and the dashboard (8080); 0 picks any free port."),
    ] = None
    mqtt_port: Annotated[
        str | None, typer.Option("--mqtt-port", metavar="N", help="Port of MQTT (1883); 0 picks any free port.")
    ] = None
    fsync: Annotated[
        str | None,
        typer.Option(
            "--fsync", metavar="POLICY", help="When a publish is confirmed: group (default), interval, always or never."
        ),
    ] = None
    config: ConfigFileOption = None
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Serve other machines even without keys or without TLS.")
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as topics.auto_create=false."),
    ] = None
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", metavar="LEVEL", help="Log level: debug, info (default), warning or error."),
    ] = None
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="FORMAT", help="Log format: auto (default), json or text.")
    ] = None

    def read_settings(self) -> tuple[Settings, dict[str, str]]:
        """Settings from file, environment and these options, and where each came from."""
        flags = {
            "storage.data": self.data,
            "server.host": self.host,
            "server.port": self.port,
            "http.port": self.http_port,
            "mqtt.port": self.mqtt_port,
            "storage.fsync": self.fsync,
            "access.insecure": self.insecure,
            "log.level": self.log_level,
            "log.format": self.log_format,
        }
        return read_settings(self.config, flags, self.overrides)


def read_settings(
    config: Path | None, flags: Mapping[str, str | bool | None], overrides: Sequence[str] | None
) -> tuple[Settings, dict[str, str]]:
    """Settings from file, environment and flags, and where each came from."""
    # Here, so that no other command waits for the model to load.
    from millstream.config import load_settings, overlooked_variables

    settings, sources = load_settings(
        _read_file(config),
        os.environ,
        flags,
        overrides=parse_pairs(overrides or [], "--set"),
        file_name=str(config),
    )
    for warning in overlooked_variables(os.environ):
        stderr.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    # Only a shell expands `~`; from a file it would become a directory of that name.
    data = os.path.expanduser(settings.storage.data)
    if data != settings.storage.data:
        settings = settings.model_copy(update={"storage": settings.storage.model_copy(update={"data": data})})
    return settings, sources


def _read_file(config: Path | None) -> str | None:
    if config is None:
        return None
    try:
        return config.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigInvalid(f"{config} is not UTF-8 text") from None
    except OSError as problem:
        raise UsageProblem(f"cannot read {config}: {problem.strerror}") from None

"""How the broker writes its log: one event per line on standard error, JSON for machines, text for people.

Standard output stays free for the line that says where the broker listens.  Entries of the standard library's loggers
(asyncio reports forgotten exceptions there) take the same path, so that one format holds everything.
"""

from __future__ import annotations

import logging
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from millstream.broker.logs import details
from millstream.config import LogSettings
from millstream.foreign import visible

__all__ = ["set_log_level", "set_up_logs"]

_COMMON: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
)


class _Named(structlog.WriteLogger):
    """Knows which part of the broker it writes for."""

    def __init__(self, file: TextIO, name: str) -> None:
        super().__init__(file)
        self.name = name


def set_up_logs(settings: LogSettings, stream: TextIO) -> None:
    """Send everything logged from now on to `stream`.  Calling it again replaces what was set before."""
    as_json = settings.format == "json" or (settings.format == "auto" and not stream.isatty())

    def named(*names: Any) -> _Named:
        return _Named(stream, names[0] if names else "millstream")

    structlog.configure(
        processors=[*_COMMON, *_rendering(as_json=as_json, colors=stream.isatty())],
        logger_factory=named,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_COMMON,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(as_json=as_json, colors=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_log_level(settings.level)


def set_log_level(level: str) -> None:
    """From how important an entry on everything is logged, from now on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    logging.getLogger().setLevel(max(number, logging.WARNING))  # libraries speak up only when something is wrong
    details.on = number <= logging.DEBUG


def _rendering(*, as_json: bool, colors: bool) -> tuple[Processor, ...]:
    if as_json:
        return (structlog.processors.format_exc_info, _lead_with_event, structlog.processors.JSONRenderer())
    return (
        _make_visible,
        structlog.dev.ConsoleRenderer(
            colors=colors, timestamp_key="time", pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        ),
    )


def _make_visible(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """What clients call themselves does nothing to the terminal of who watches.  JSON has escapes of its own."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in entry.items()}


def _lead_with_event(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """What happened and when comes first: the rest of a long line may be off the screen."""
    leading = {name: entry.pop(name) for name in ("time", "level", "event", "logger") if name in entry}
    return {**leading, **entry}

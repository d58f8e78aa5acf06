"""What SIGHUP means: read the certificate again or, when the terminal is gone, stop as SIGTERM does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import structlog

from millstream.server.tls import ServerTls

__all__ = ["Hangup"]

_log = structlog.get_logger("millstream.server")


class Hangup:
    """Called for each SIGHUP, of which not one ends the process by itself: service managers send it to reload."""

    def __init__(self, tls: ServerTls, stop: Callable[[], None]) -> None:
        self._tls = tls
        self._stop = stop
        self._had_terminal = _has_terminal()
        # Whoever starts us with `nohup` wants us to outlive the terminal.
        self._outlives_it = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._shown = [number for number in (1, 2) if os.isatty(number)]

    def __call__(self) -> None:
        is_gone = self._had_terminal and not _has_terminal()
        if is_gone:
            self._drop_output()
        if is_gone and not self._outlives_it:
            _log.info("the terminal is gone")
            self._stop()
        else:
            self._tls.reload()

    def _drop_output(self) -> None:
        """What goes to a terminal that is gone fails to be written, and stopping has things to say."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in self._shown:
            os.dup2(nowhere, number)
        os.close(nowhere)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True

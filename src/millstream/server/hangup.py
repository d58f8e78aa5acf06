"""What SIGHUP means: read the certificate again or, when the terminal is gone, stop as SIGTERM does.

A shell that ends may say goodbye to its background jobs with the same signal, as zsh does, a moment before the terminal
is gone, and then nobody says anything more.  So the terminal is looked for again a moment later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

import structlog

from millstream.server.tls import ServerTls

__all__ = ["Hangup"]

_log = structlog.get_logger("millstream.server")

#: How long a shell that has said goodbye may take to go.
_GOODBYE_S: Final = 1.0


class Hangup:
    """Called for each SIGHUP, of which not one ends the process by itself: service managers send it to reload."""

    def __init__(
        self, tls: ServerTls, stop: Callable[[], None], later: Callable[[float, Callable[[], object]], object]
    ) -> None:
        self._tls = tls
        self._stop = stop
        self._later = later
        self._had_terminal = _has_terminal()
        # Whoever starts us with `nohup` wants us to outlive the terminal.
        self._outlives_it = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._shown = [number for number in (1, 2) if os.isatty(number)]

    def __call__(self) -> None:
        if self._is_over():
            return
        self._tls.reload()
        if self._had_terminal and not self._outlives_it:
            self._later(_GOODBYE_S, self._is_over)

    def _is_over(self) -> bool:
        """Stop if the terminal is gone and was what kept us; says whether it was."""
        is_gone = self._had_terminal and not _has_terminal()
        if is_gone:
            self._drop_output()
        if is_gone and not self._outlives_it:
            _log.info("the terminal is gone")
            self._stop()
            return True
        return False

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

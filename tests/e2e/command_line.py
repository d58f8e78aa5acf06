"""`millstream` in the process of the test: one of its own takes longer to start than most commands to run."""

from __future__ import annotations

import io

import pytest

from millstream.cli.main import main
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs

__all__ = ["CommandLine", "keep_logs_out"]


def keep_logs_out() -> None:
    """A broker of the same process would log into the output under test."""
    set_up_logs(LogSettings(), io.StringIO())


class CommandLine:
    """Runs `millstream WORDS... ARGUMENTS...` against a broker."""

    def __init__(
        self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str, *words: str
    ) -> None:
        self._capture = capture
        self._words = words
        monkeypatch.setenv("MILLSTREAM_BROKER", address)

    def __call__(self, *arguments: str, code: int = 0, errors: bool = False) -> str:
        """What it prints, or what it complains about; fails unless it ends with the code expected."""
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*self._words, *arguments])
        shown = self._capture.readouterr()
        assert ended.value.code == code, shown
        return shown.err if errors else shown.out

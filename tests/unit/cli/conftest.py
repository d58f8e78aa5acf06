"""Running the command line inside the test process: the real entry point, without the cost of a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from millstream.cli.main import main


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs `millstream ARGUMENTS...` and returns exit code and output."""
    for name in ("MILLSTREAM_DEBUG", "MILLSTREAM_BROKER", "MILLSTREAM_NAMESPACE", "MILLSTREAM_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        shown = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, shown.out, shown.err)

    return invoke

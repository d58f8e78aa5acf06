"""Nothing is lost for good without somebody having said yes."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from millstream.cli.confirm import confirm
from millstream.cli.failure import UsageProblem


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", "Y\n", "yes\n", " yes \n"])
def test_yes_goes_on(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    confirm("Delete everything?", yes=False)


@pytest.mark.parametrize("answer", ["\n", "n\n", "", "yikes\n"])
def test_anything_else_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with pytest.raises(typer.Exit):
        confirm("Delete everything?", yes=False)
    shown = capsys.readouterr()
    assert "Delete everything?" in shown.err
    assert "Nothing was changed" in shown.err
    assert shown.out == ""


def test_scripts_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageProblem, match="--yes"):
        confirm("Delete everything?", yes=False)
    confirm("Delete everything?", yes=True)

"""Numbers, sizes and times as people read them; tables that programs can read as well."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.text import Text

from millstream.cli import findings, output
from millstream.cli.failure import report
from millstream.cli.findings import print_findings
from millstream.cli.output import (
    bytes_text,
    duration_text,
    plural,
    print_facts,
    print_json,
    print_table,
    prose,
    time_text,
)
from millstream.errors import RequestError


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 * 1024**2, "64 MiB"),
     (1024**4 * 5000, "5,000 TiB")],
)  # fmt: skip
def test_sizes(size: int, expected: str) -> None:
    assert bytes_text(size) == expected


@pytest.mark.parametrize(
    ("duration_ms", "expected"),
    [(0, "0 ms"), (999, "999 ms"), (1000, "1 s"), (1500, "1.5 s"), (60_000, "1 m"), (5_400_000, "1 h 30 m"),
     (604_800_000, "7 d"), (90_061_000, "1 d 1 h")],
)  # fmt: skip
def test_durations(duration_ms: int, expected: str) -> None:
    assert duration_text(duration_ms) == expected


def test_times_are_utc_and_say_so() -> None:
    assert time_text(1_767_225_600_999) == "2026-01-01T00:00:00Z"


def test_plurals() -> None:
    assert [plural(n, "message") for n in (0, 1, 1000)] == ["0 messages", "1 message", "1,000 messages"]


def test_a_piped_table_is_never_cut_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "orders." + "x" * 248
    print_table(("topic", "partitions"), [(name, 3)], numbers="partitions")
    assert name in capsys.readouterr().out


def test_nothing_that_is_piped_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("a", "long " * 60), ("much longer", "b")])
    print_table(("name", "value"), [("a", "long " * 60), ("b", "c")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert [line for line in lines if line != line.rstrip()] == []


def test_markup_in_data_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("value",), [("[red]not markup[/red]",)])
    assert "[red]not markup[/red]" in capsys.readouterr().out


def test_what_others_named_does_not_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("client",), [("worker\x1b[2J",)])
    assert "worker\\x1b[2J" in capsys.readouterr().out
    print_facts([("header [red]\x1b[31m", "v\x9b")])
    assert capsys.readouterr().out.split() == ["header", "[red]\\x1b[31m", "v\\x9b"]


def test_what_others_named_does_not_turn_the_direction_of_writing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("client", "address"), [("\u2069\u202egro.liame", "10.0.0.1")])
    assert "\\u2069\\u202egro.liame" in capsys.readouterr().out
    report(RequestError("no consumer \u202e\x1b[2Jann is there"))
    assert "no consumer \\u202e\\x1b[2Jann is there" in capsys.readouterr().err


def test_an_empty_table_leaves_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("topic",), [], empty="no topics")
    shown = capsys.readouterr()
    assert (shown.out, shown.err.strip()) == ("", "no topics")


def test_json_keeps_letters_readable(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "Mühle"})
    out = capsys.readouterr().out
    assert "Mühle" in out
    assert json.loads(out) == {"name": "Mühle"}


def test_prose_flows() -> None:
    assert prose("First\n    line.\n\n    Second\n    [one].\n    ") == "First line.\n\nSecond \\[one]."


def _narrow(columns: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard output as a terminal of so many columns."""
    shown = io.StringIO()
    terminal = Console(file=shown, width=columns, highlight=False, emoji=False, color_system=None)
    monkeypatch.setattr(output, "stdout", terminal)
    return shown


_LAG = ("topic", "partition", "committed", "end", "lag", "oldest unread", "member")


@pytest.mark.parametrize("columns", [30, 50, 60, 80, 120])
def test_a_narrow_terminal_does_not_cut_numbers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lag 19,9` for 19,999 is not a short answer but a wrong one."""
    shown = _narrow(columns, monkeypatch)
    row = ("orders.created", 0, 1, 20_000, 19_999, "36.8 s", "worker-3")
    print_table(_LAG, [row, row], numbers="partition|committed|end|lag|oldest unread")
    for said in ("20,000", "19,999", "36.8 s"):
        assert shown.getvalue().count(said) == 2, shown.getvalue()
    letters = "".join(shown.getvalue().split())
    assert all(name.replace(" ", "") in letters for name in ("lag", "member")), "every column is there"


def test_what_fits_when_it_is_folded_stays_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _narrow(40, monkeypatch)
    print_table(("id", "tries"), [("x" * 60, 1)], numbers="tries")
    assert shown.getvalue().startswith("id ")
    assert shown.getvalue().count("x") == 60


_LEASED = ("receipt", "until", "delivery", "key", "value")


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_narrow_terminal_does_not_cut_what_people_copy(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt that goes on in the next line cannot be given to `millstream ack`."""
    shown = _narrow(columns, monkeypatch)
    row = ("orders:0:1:1:d2666c71bb65558f", "2026-11-18T15:12:25Z", 1, None, "0 coffees")
    print_table(_LEASED, [row, row], numbers="delivery")
    for said in row[:2]:
        assert shown.getvalue().count(str(said)) == 2, shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= columns


def test_names_are_folded_where_that_keeps_a_table_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _narrow(80, monkeypatch)
    row = ("orders.eu.created", 0, 5_776, 5_789, 13, "3.7 s", "auditor-06f5bce9")
    print_table(_LAG, [row] * 11, numbers="partition|committed|end|lag|oldest unread")
    assert shown.getvalue().startswith("topic ")
    assert len(shown.getvalue().splitlines()) == 24, shown.getvalue()


def test_a_text_that_would_be_a_tower_of_words_is_a_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _narrow(80, monkeypatch)
    row = ("orders:0:1:1:d2666c71bb65558f", "2026-11-18T15:12:25Z", 1, None, "coffee " * 20)
    print_table(_LEASED, [row], numbers="delivery")
    assert len(shown.getvalue().splitlines()) == 6, shown.getvalue()


def test_advice_leaves_the_table_of_findings_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for it was half of the terminal, and empty where all was well."""
    shown = _narrow(80, monkeypatch)
    monkeypatch.setattr(findings, "stdout", output.stdout)
    sound = ("disk", Text("ok"), "78,643 MiB are free; the broker stops taking messages below", "")
    print_findings("check", "", [sound, ("port", Text("fail"), "127.0.0.1:9092: in use", "Choose another --port.")])
    assert "below\n" in shown.getvalue().replace(" ", "")
    assert shown.getvalue().split("what to do\n")[1].split() == ["port", "Choose", "another", "--port."]
    before = shown.tell()
    print_findings("check", "", [sound])
    assert "what to do" not in shown.getvalue()[before:]

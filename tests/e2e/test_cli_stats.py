"""`top` and `metrics` against a real broker, and what `top` draws."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import millstream
from millstream.cli.main import main
from millstream.cli.top import Screen, sparkline
from millstream.testing.broker import BrokerForTests

Output = pytest.CaptureFixture[str]


def run(output: Output, broker: BrokerForTests, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--broker", broker.address])
    shown = output.readouterr()
    assert ended.value.code == 0, shown.err
    return shown.out


def test_top_and_metrics_show_what_the_broker_says(broker: BrokerForTests, capsys: Output) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders")
        client.queue("orders", group="billing").close()
        client.publish("orders", "x")
    shown = run(capsys, broker, "top", "--once")
    assert "normal" in shown
    assert "orders/billing" in shown
    assert "idle" in shown
    overview = json.loads(run(capsys, broker, "top", "--once", "--json"))
    assert (overview["depth"], overview["furthest_behind"][0]["group"]) == (1, "billing")
    table = run(capsys, broker, "metrics", "--match", "published_total", "--table")
    assert "topic=orders" in table
    lines = run(capsys, broker, "metrics", "--match", "oldest").splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["HELP", "TYPE"]
    assert lines[2].startswith('millstream_oldest_unsettled_age_seconds{namespace="default",topic="orders"')


def test_metrics_that_nobody_has_are_missed_aloud(broker: BrokerForTests, capsys: Output) -> None:
    for form in ((), ("--table",)):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["metrics", "--match", "no_such", "--broker", broker.address, *form])
        shown = capsys.readouterr()
        assert (shown.out, "no metric matches" in shown.err) == ("", True)


def test_a_line_of_bars_is_as_high_as_its_highest_value() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 5, 10]) == "▁▅█"
    assert len(sparkline(range(100), width=7)) == 7


def test_the_screen_names_everything_and_keeps_names_as_they_are(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.publish("orders", "x")
        overview = client.overview(everywhere=True)
    overview.busiest[0].topic = "[bold]orders"
    overview.mode, overview.reason = "read-only", "the disk is full"
    console = Console(file=io.StringIO(), width=160)
    console.print(Screen().render(overview))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "default/[bold]orders" in text
    assert "the disk is full" in text

"""Half a minute of what `make soak` does for an hour: all kinds of traffic, each kind of fault once, and the audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.__main__ import soak
from tests.soak.faults import ENDS_BROKER, KINDS, Plan
from tests.soak.report import Report, write_report
from tests.soak.run import BRIEF_SLOTS, SLOTS

SEED = 20261116


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    print(f"seed {SEED}")
    return soak(tmp_path_factory.mktemp("soak") / "run", seed=SEED, seconds=12, brief=True)


@pytest.mark.timeout(300)
def test_nothing_is_lost_and_every_repetition_is_explained_through_each_kind_of_fault(report: Report) -> None:
    assert {fault.kind for fault in report.faults} == set(KINDS)
    assert report.findings == []
    for name in ("orders: confirmed", "jobs: confirmed", "web: confirmed", "MQTT: confirmed", "jobs: dead letters"):
        assert report.counts[name] > 0, name
    assert report.counts["jobs: scheduled and delivered"] > 0


@pytest.mark.timeout(300)
def test_a_report_has_figures_for_programs_words_for_people_and_a_picture(report: Report, tmp_path: Path) -> None:
    page = write_report(report, tmp_path)
    assert "0 lost" in page.read_text()
    assert "| failed sync | 1 |" in page.read_text()
    assert f'"seed": {SEED}' in (tmp_path / "soak.json").read_text()
    assert (tmp_path / "images" / "soak.svg").read_text().count("<polyline") >= 3


def test_one_seed_means_one_order_of_faults() -> None:
    def faults(seed: int) -> list[str]:
        plan = Plan(seed, SLOTS, pause_s=1, spark=True)
        return [f"{fault} {fault.pause_s}" for _ in range(3) for fault in plan.deal()]

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_a_deck_has_every_kind_and_not_only_those_that_end_the_broker() -> None:
    dealt = [fault.kind for fault in Plan(3, BRIEF_SLOTS, pause_s=1).deal(brief=True)]
    assert sorted(dealt) == sorted(KINDS)
    assert set(KINDS) > ENDS_BROKER

"""The reference pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.cli.reference import PAGES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_fresh(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), (
        f"docs/reference/{name} is out of date; run `python -m millstream.cli.reference`"
    )


def test_every_key_of_a_pipeline_is_explained() -> None:
    rows = re.findall(r"^\| `.*", PAGES["pipelines.md"](), re.MULTILINE)
    assert len(rows) > 80
    for row in rows:
        assert row.split(" | ")[-1].strip(" |"), f"{row} says nothing"


@pytest.mark.parametrize("page", sorted((REFERENCE.parent / "guide").glob("*.md")), ids=lambda page: page.stem)
def test_every_metric_that_a_guide_names_exists(page: Path) -> None:
    known = {"millstream_broker", *re.findall(r"^\| `(millstream_\w+)`", PAGES["metrics.md"](), re.MULTILINE)}
    named = re.findall(r"`(millstream_\w+?)(?:_bucket|_sum|_count)?`", page.read_text(encoding="utf-8"))
    assert set(named) <= known

"""What was found once stays mended, and a moment's worth of hostile bytes finds nothing new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.engine import TARGETS, brief_run, replay
from tests.fuzz.target import HERE

FOUND = sorted((HERE / "found").glob("*/*.txt"))


@pytest.mark.parametrize("file", FOUND, ids=[f"{file.parent.name}-{file.stem}" for file in FOUND])
def test_what_did_harm_once_does_none_any_more(file: Path) -> None:
    if file.parent.name == "pipeline":
        pytest.importorskip("pyarrow")
    replay(file.parent.name, file)


@pytest.mark.parametrize("seconds", [0.25, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_a_moment_of_hostile_bytes_does_no_harm(name: str, seconds: float) -> None:
    if name == "pipeline":
        pytest.importorskip("pyarrow")
    runner = brief_run(name, seconds)
    assert not runner.harms, "\n".join(runner.harms.values())

"""Whoever types what the documentation says, page by page and from top to bottom, sees it work."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerProcess
from tests.e2e.docs.pages import ROOT, Step, resembles, steps
from tests.e2e.docs.reader import Reader
from tests.e2e.docs.scenes import SCENES

#: The reference is written from the code and has nothing to type.
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
PAGES = [page for page in PAGES if not page.startswith("docs/reference/")]

#: What no test can do, by how it begins, and why.
EXEMPT = {
    "make run": "it makes an environment and runs until it is stopped; what it prints is looked at below",
    "make sim": "simulations without an end; tests/simulation runs some",
    "make pipeline-demo": "it starts Spark; tests/spark/ready/test_ready_demo.py runs it",
    "millstream pipeline": "it starts Spark, or needs one that runs; tests/spark/pipelines has them all",
    "source .venv": "the tests have their commands already",
    "pip install": "it would change the environment that the tests run in",
    "python3 -m venv": "it makes an environment outside the test's directory",
    "/opt/millstream/bin/pip": "it is in that environment",
    "python3 -m zipfile": "it packs what pip would have fetched; tests/spark/cluster ships such an archive",
    "docker": "it needs Docker and a network; tests/e2e/test_deploy.py reads what it is given",
    "millstream serve --set traces.otlp_endpoint": "it needs packages of an extra; tests/e2e/test_spans.py has spans",
}
#: Programs that run elsewhere.
ELSEWHERE = {
    "docs/guide/spark.md": "tests/spark/ready/test_ready_guides.py",
    "docs/guide/spark-tables.md": "tests/spark/test_tables.py",
    "docs/guide/testing.md": "tests/e2e/test_testing_guide.py",
}


def to_follow(page: str) -> list[Step]:
    return [
        step
        for step in steps(page)
        if not (step.language == "console" and step.text.startswith(tuple(EXEMPT)))
        and not (step.language == "python" and page in ELSEWHERE)
    ]


@pytest.mark.parametrize("page", SCENES)
def test_a_page_can_be_followed(
    page: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Reader(tmp_path, capfd, monkeypatch, page)) as reader:
        scene = SCENES[page](reader)
        next(scene)
        for step in to_follow(page):
            reader.follow(step)
        reader.finish()
        assert next(scene, "the end") == "the end"
        assert not reader.failures


@pytest.mark.usefixtures("as_users_start_it")
def test_a_start_prints_what_the_pages_show(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as process:
        assert process._process is not None
        assert process._process.stdout is not None
        process.send(signal.SIGTERM)
        said = f"listening on {process.address}\n{process._process.stdout.read()}"
    shown = [step.shown for page in PAGES for step in steps(page) if step.text in ("make run", "millstream serve")]
    assert len(shown) == 2
    assert all(resembles(said, text) for text in shown)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_with_something_to_type_is_followed(page: str) -> None:
    assert bool(to_follow(page)) == (page in SCENES)


def test_every_exemption_is_needed() -> None:
    commands = [step.text for page in PAGES for step in steps(page) if step.language == "console"]
    for beginning in EXEMPT:
        assert any(command.startswith(beginning) for command in commands), beginning
    for page, place in ELSEWHERE.items():
        assert steps(page)
        assert (ROOT / place).is_file()


@pytest.mark.parametrize(
    ("said", "shown", "same"),
    [
        ("id  offset\n01M7GKBEFSGBA51QG000000000  0", "id offset\n01M7GKBEFSGBA51QG000000007  0", True),
        ("id  offset\n01M7GKBEFSGBA51QG000000000  0", "id partition\n01M7GKBEFSGBA51QG000000000  0", False),
        ("2026-11-16 03:41:19.269 +26 ms stored", "2027-01-01 00:00:00.000 +2.5 s stored", True),
        ("2026-11-16 03:41:19.269 +26 ms stored", "2026-11-16 03:41:19.269 +26 ms leased", False),
        ('[{"id": "1", "value": {"total": 1}}]', '[{"id": "…", "value": …}]', True),
        ('[{"id": "1", "value": 1}]', '[{"id": "1"}]', False),
        ('[{"id": "1"}]', '[{"id": "…", "colour": "red"}]', False),
    ],
)
def test_output_resembles_what_a_page_shows(said: str, shown: str, same: bool) -> None:
    assert resembles(said, shown) == same

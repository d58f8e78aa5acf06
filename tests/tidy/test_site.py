"""The documentation hangs together: every page is found, and every link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
#: Inside code there are no links; braces and brackets of examples would pass for some.
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?)\)")


def nav_pages(nav: Any) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from nav_pages(target)


def anchors(page: Path) -> set[str]:
    """The names of headings, as the site and GitHub make them."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"[\s-]+", "-", plain))
    return found


def test_the_site_leads_to_every_page_and_to_no_other() -> None:
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(nav_pages(configuration["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_site_takes_nothing_from_elsewhere() -> None:
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert configuration["theme"]["font"] is False
    assert "extra_javascript" not in configuration
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"
        if DOCS in page.parents and path:
            assert DOCS in there.resolve().parents or there.resolve() == DOCS, f"{target} is not part of the site"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.relative_to(ROOT)}: there is no {target}"


def test_the_map_of_the_architecture_has_every_room() -> None:
    package = ROOT / "src" / "millstream"
    rooms = {path.parent.name for path in package.glob("*/*") if path.suffix in (".py", ".html")}
    text = (DOCS / "architecture.md").read_text()
    assert rooms == set(re.findall(r"^  (\w+)/ +\w", text, re.MULTILINE))


def test_the_map_of_the_architecture_has_every_module_of_the_foundation_and_every_room_of_the_broker() -> None:
    package = ROOT / "src" / "millstream"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__", "aio"}
    rooms = {path.parent.name for path in package.glob("broker/*/__init__.py")}
    text = (DOCS / "architecture.md").read_text()
    table = text[text.index("| The foundation |") : text.index("`broker/` has rooms")]
    assert modules == set(re.findall(r"`(\w+)`", table))
    listed = text[text.index("`broker/` has rooms") : text.index(";\n", text.index("`broker/` has rooms"))]
    assert rooms == set(re.findall(r"`(\w+)`", listed))

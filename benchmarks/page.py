"""Where results go when they are published: between two marks of a documentation page, and plots beside it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["publish_plot", "publish_section"]


def publish_section(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of a name."""
    begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->\n"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page.name} has no place for the {name}: {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}{content}{end}{after}")


def publish_plot(page: Path, name: str, directory: Path, what: str) -> None:
    """The tables `<name>.md` and the plot `<name>.svg` of a directory; `what` the plot shows."""
    tables = (directory / f"{name}.md").read_text()
    publish_section(page, name, f"{tables}\n![{what}]({name}.svg)\n")
    (page.parent / f"{name}.svg").write_bytes((directory / f"{name}.svg").read_bytes())

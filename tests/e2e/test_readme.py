"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLI = Path(sys.executable).parent / "millstream"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def shape(text: str) -> str:
    """Text with what differs from run to run (message ids) made equal, and without trailing blanks."""
    lines = re.sub(r"\b01[0-9A-HJKMNP-TV-Z]{24}\b", "<id>", text).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def test_the_commands_print_what_the_readme_shows(broker: BrokerForTests) -> None:
    (session,) = [block for block in blocks("console") if ".venv/bin/millstream" in block]
    steps = re.findall(r"^\$ \.venv/bin/millstream (.*)\n((?:[^$].*\n)*)", session, re.M)
    assert len(steps) == 2
    for command, shown in steps:
        done = subprocess.run(
            [str(CLI), *shlex.split(command)],
            env={**os.environ, "MILLSTREAM_BROKER": broker.address, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert shape(done.stdout) == shape(shown)


def test_the_python_program_runs(broker: BrokerForTests, tmp_path: Path) -> None:
    program, _worker = blocks("python")
    script = tmp_path / "readme.py"
    script.write_text(program.replace("localhost:9092", broker.address))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" disk")
    assert len(lines) == 1 + 1001
    assert lines[1] == "0 b'c-17' a coffee"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p}" for p in ("architecture.md", "limits.md"))]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (here / target).exists(), f"{page} links to {target}, which does not exist"

"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests, BrokerProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLI = Path(sys.executable).parent / "millstream"


INDEX = (ROOT / "docs" / "index.md").read_text()


def blocks(language: str, page: str = README) -> list[str]:
    """What stands between fences, also where they are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page, re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    with BrokerForTests(tmp_path / "data", http=True) as running:
        yield running


def run(command: str, broker: BrokerForTests) -> str:
    """A command line as a reader would type it, with this broker in place of the usual one."""
    program, *arguments = shlex.split(command.replace("localhost:8080", broker.url.partition("//")[2]))
    if program == "curl":
        if not shutil.which("curl"):
            pytest.skip("curl is not installed")
    else:
        assert program.removeprefix(".venv/bin/") == "millstream"
        program = str(CLI)
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, "MILLSTREAM_BROKER": broker.address, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what it is said to print."""
    return re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.M)


def shape(text: str) -> str:
    """Text with what differs from run to run (message ids) made equal, and without trailing blanks."""
    lines = re.sub(r"\b01[0-9A-HJKMNP-TV-Z]{24}\b", "<id>", text).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def test_the_commands_print_what_the_readme_shows(broker: BrokerForTests) -> None:
    (session,) = [block for block in blocks("console") if ".venv/bin/millstream" in block]
    assert len(steps(session)) == 3
    for command, shown in steps(session):
        assert shape(run(command, broker)) == shape(shown)


def test_the_quick_start_works(broker: BrokerForTests) -> None:
    with broker.connect() as client:
        client.create_topic("orders")
        client.queue("orders", group="billing", timeout_s=0).close()
    tried = 0
    for block in blocks("console", INDEX):
        for command, shown in steps(block):
            if not command.startswith(("pip ", "millstream serve")):
                said = run(command, broker)
                assert not shown or shape(said) == shape(shown)
                assert "Problem" not in said
                tried += 1
    assert tried == 5
    program = next(block for block in blocks("python", INDEX) if "import millstream" in block)
    source = program.replace("localhost:9092", broker.address)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"a coffee"}


def test_a_start_prints_what_the_pages_show(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as process:
        assert process._process is not None
        assert process._process.stdout is not None
        said = [f"listening on {process.address}\n", process._process.stdout.readline()]
    shown = re.sub(r":\d+", ":N", "".join(said))
    for page in (README, INDEX):
        assert shown in re.sub(r":\d+", ":N", page)


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

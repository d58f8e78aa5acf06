"""The wheel is all that a machine needs: installed where nothing of the repository is, it serves and is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build has left in the checkout would be put into it, too."""
    copy = tmp_path_factory.mktemp("checkout")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=left_out)
        else:
            shutil.copy(source, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(copy / "dist"), str(copy)], check=True, timeout=300)
    [built] = (copy / "dist").glob("millstream-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_directory(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with our dependencies as if they had been installed with it."""
    home = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=100)
    [packages] = home.glob("lib/python*/site-packages")
    # Files that name further paths count only where Python looks for them by itself: ours, which names src, does not.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True, timeout=100)
    return python.parent


def test_everything_that_is_no_python_is_in_it(wheel: Path) -> None:
    package = ROOT / "src" / "millstream"
    ours = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    ours = {name for name in ours if not name.endswith((".pyc", ".so", ".c"))}
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert "millstream/py.typed" in ours
    assert ours - packed == set()
    assert "pyspark_millstream.py" in packed
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in packed)


def test_it_serves_publishes_consumes_and_shows_its_dashboard(bin_directory: Path, tmp_path: Path) -> None:
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        command = [str(bin_directory / "millstream"), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    where = [str(bin_directory / "python"), "-c", "import millstream; print(millstream.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(bin_directory.parent)
    assert "Usage: millstream" in run("--help")
    command = [str(bin_directory / "millstream"), "serve"]
    for door in ("--port", "--http-port", "--mqtt-port"):
        command += [door, "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout is not None
            address = broker.stdout.readline().split()[-1]
            url = broker.stdout.readline().split()[-1]
            run("publish", "orders", "hello", "--broker", address)
            assert run("consume", "orders", "--from", "earliest", "--max", "1", "--broker", address) == "hello\n"
            for path in ("/", "/dashboard/app.js", "/dashboard/pages/letters.js", "/api/v1/openapi.json"):
                with urllib.request.urlopen(url + path, timeout=30) as answer:
                    assert answer.status == 200, path
        finally:
            broker.terminate()
        assert broker.wait(60) == 0
    assert (tmp_path / "data" / "topics").is_dir()

"""What the guide has users do to ship the package: a directory with it and what it needs, as an archive.

    pip install --target packages millstream numpy pyarrow
    python3 -m zipfile -c packages.zip packages/*

Here nothing is fetched: what pip would install is copied from where the tests have it.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

__all__ = ["SHIPPED", "make_packages"]

ROOT = Path(__file__).parents[3]
#: The settings with which the guide ships them.
SHIPPED = {
    "spark.archives": "packages.zip#packages",
    "spark.executorEnv.PYTHONPATH": "packages",
    "spark.pyspark.python": "python3",
}
_NOT_NEEDED = ("__pycache__", "tests", "include")


def make_packages(directory: Path) -> Path:
    """Make `packages.zip` in a directory."""
    archive = directory / "packages.zip"
    with ZipFile(archive, "w") as zipped:  # not compressed: it only goes from one process to the other
        for top in (ROOT / "src" / "millstream", ROOT / "src" / "pyspark_millstream.py", *_needed()):
            files = [top] if top.is_file() else [file for file in top.rglob("*") if file.is_file()]
            for file in files:
                name = file.relative_to(top.parent)
                if not set(name.parts) & set(_NOT_NEEDED):
                    zipped.write(file, name)
    return archive


def _needed() -> list[Path]:
    """What `pip install millstream numpy pyarrow` installs besides millstream."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [*(importlib.metadata.requires("millstream") or ()), "numpy", "pyarrow"]
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = importlib.metadata.distribution(requirement.name)
        wanted += found[requirement.name].requires or ()
    tops = {
        Path(str(each.locate_file(file.parts[0])))
        for each in found.values()
        for file in each.files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }
    return sorted(tops)

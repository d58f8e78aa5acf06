"""The architecture as data: who may import whom.  Think about the layering before changing this file."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "millstream"

FOUNDATION = {"errors", "names", "clock", "records", "ids", "config", "topics", "compression", "headers", "version"}
FOUNDATION |= {"durations", "retries", "options", "receipts", "policies", "settings", "slicing", "columns"}
FOUNDATION |= {
    "dead_letters",
    "partitioning",
    "entries",
    "foreign",
    "sections",
    "single",
    "traceparent",
    "values",
    "vigil",
    "wording",
    "writing",
    "addresses",
}
#: Rooms of decisions only: time, randomness and storage are given to them.
PURE = {"access", "wire", "groups", "mqtt", "queues", "schedules", "traces", "traffic", "webhooks"}
#: room -> rooms it may import (itself is always allowed).
ALLOWED = {
    "foundation": set(),
    "wire": {"foundation"},
    "log": {"foundation"},
    "groups": {"foundation"},
    "queues": {"foundation"},
    "traffic": {"foundation"},
    "access": {"foundation"},
    "schedules": {"foundation"},
    "webhooks": {"foundation"},
    "mqtt": {"foundation"},
    "traces": {"foundation", "queues"},
    "broker": {"foundation", "log", *PURE},
    "dashboard": set(),  # files for browsers; Python only finds them
    "server": {"foundation", "mqtt", "wire", "broker"},
    "client": {"foundation", "wire"},
    "cli": {"foundation", "client", "sdk"},
    "testing": {"foundation", "wire", "log", "groups", "queues", "schedules", "broker", "server", "client", "sdk"},
    "spark": {"foundation", "wire"},  # runs in Spark's workers, so it carries little
    "sdk": {"foundation", "client"},  # millstream/__init__.py and aio.py: the public face
}
#: Single modules with a licence of their own, and why.
EXCEPTIONS = {
    "__main__.py": {"cli"},  # `python -m millstream`
    "cli/serve.py": {"server"},  # starts the broker
    "cli/key.py": {"access", "server"},  # makes the first key in the data of a stopped broker
    "cli/reference.py": {"broker"},  # writes pages from the code, and the code is there
    "cli/reference_api.py": {"server"},  # the same
    "cli/reference_pipelines.py": {"spark"},  # the same
    "cli/log.py": {"log"},  # works on a stopped broker's files
    "cli/checks.py": {"broker", "log", "server"},  # asks what a start would ask
    "cli/pipeline.py": {"spark"},  # the data source, when it is asked for
    "cli/pipeline_run.py": {"spark"},  # runs pipelines
    "cli/backup.py": {"log"},  # copies a broker's files
    "spark/segments.py": {"log"},  # reads a broker's files
    "server/lifecycle.py": {"log"},  # chooses the storage and locks the data directory
}
FORBIDDEN_IN_PURE = {"asyncio", "socket", "os", "time", "random", "logging", "threading", "pathlib"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        stem = parts[0]
        return "foundation" if stem in FOUNDATION else "sdk"
    return parts[0]


@functools.cache
def parsed(path: Path) -> ast.Module:
    # CPython 3.11 can fail ("AST constructor recursion depth mismatch") when a collection runs while it builds a tree.
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def statements(inside: ast.AST) -> Iterator[ast.stmt]:
    """All of them, however deep; expressions, of which there are twenty times as many, have none in them."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(inside, block, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


@functools.cache
def imports_of(path: Path) -> list[str]:
    names: list[str] = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    here = room_of(relative.with_suffix("").parts)
    allowed = ALLOWED[here] | EXCEPTIONS.get(relative.as_posix(), set()) | {here}
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "millstream":
            if here in PURE:
                assert parts[0] not in FORBIDDEN_IN_PURE, f"{relative} is pure and must not import {name}"
            continue
        target = room_of(tuple(parts[1:2])) if parts[1] in FOUNDATION | {"aio"} else parts[1]
        if target not in ALLOWED:
            target = "sdk"
        assert target in allowed, f"{relative} ({here}) must not import {name} ({target})"


def test_only_storage_and_lock_open_files_in_the_log() -> None:
    """Everything else in log/ goes through the Storage protocol, so that faults can be injected everywhere.

    Except what copies whole directories, of which logs know nothing.
    """
    for path in (SOURCE / "log").glob("*.py"):
        if path.name in {"storage.py", "lock.py", "holding.py", "archive.py"}:
            continue
        assert "os" not in {name.split(".")[0] for name in imports_of(path)}, f"{path.name} imports os"
        calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "open" for call in calls), path.name


def test_production_code_never_imports_testing() -> None:
    for path in modules():
        if path.relative_to(SOURCE).parts[0] != "testing":
            assert not any(name.startswith("millstream.testing") for name in imports_of(path)), path


def test_what_decodes_and_encodes_for_spark_needs_no_spark() -> None:
    """Rows and batches are tested without a JVM, and what workers import is small."""
    for name in ("columns", "stored", "header_columns", "decoding", "encoding", "segments"):
        imported = {name.split(".")[0] for name in imports_of(SOURCE / "spark" / f"{name}.py")}
        assert not imported & {"pyspark", "pandas", "asyncio", "socket"}, f"spark/{name}.py imports {imported}"

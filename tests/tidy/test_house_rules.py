"""Small rules that keep the tree readable; each one has bitten somebody."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from millstream.errors import MillstreamError, catalogue, error_from_wire

ROOT = Path(__file__).parents[2]
#: Lines; beyond this a module has two jobs.
MODULE_LINES_MAX = 600


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_module_has_grown_into_a_giant() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= MODULE_LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines: split it"


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
    for path in (ROOT / "src").rglob("*.py"):
        assert path.stem not in vague, f"{path.relative_to(ROOT)}: what is its job?"


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Outside of packages pytest takes them for the same one, and only when both are collected."""
    seen: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not (path.parent / "__init__.py").exists():
            twin = seen.setdefault(path.name, path)
            assert twin is path, f"{path.relative_to(ROOT)} has the name of {twin.relative_to(ROOT)}"


def test_no_entry_of_the_log_uses_a_name_that_the_log_overwrites() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        if "_log." not in (source := path.read_text()):
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            taken = {keyword.arg for keyword in node.keywords} & {"time", "level", "event", "logger"}
            if taken and re.match(r"_log\.|\w+\.write\(_log\.", ast.unparse(node)):
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: {taken} would be lost")


def test_no_registry_host_in_requirements() -> None:
    for path in ROOT.glob("**/requirements*.txt"):
        if ".venv" in path.parts:
            continue
        text = path.read_text()
        assert "://" not in text, f"{path.name} names a host"
        for line in text.splitlines():
            if line and not line.startswith("#"):
                assert re.match(r"^[A-Za-z0-9_.\-\[\]]+==\S+( *;.*)?$", line), f"{path.name}: {line!r} is not pinned"


@pytest.mark.parametrize("error", sorted(catalogue().values(), key=lambda error: error.number), ids=lambda e: e.code)
def test_every_error_explains_itself(error: type[MillstreamError]) -> None:
    assert error.__doc__, "an error says what happened"
    assert error.remedy, "an error says what to do"
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", error.code)
    text = f"{error.code} with details"
    assert str(error_from_wire(error.number, text)) == text


def test_error_codes_are_unique() -> None:
    codes = [error.code for error in catalogue().values()]
    assert len(codes) == len(set(codes))


def test_error_numbers_have_not_moved() -> None:
    """Numbers are protocol: an old client must understand a new broker.  Add lines here, never change one."""
    frozen = {
        1: "TOPIC_NOT_FOUND", 2: "QUOTA_EXCEEDED", 3: "INVALID_FORMAT", 4: "UNAUTHORIZED", 5: "PAYLOAD_TOO_LARGE",
        6: "THROTTLED", 7: "STALE_GENERATION", 8: "NOT_LEADER", 9: "READ_ONLY", 10: "UNSUPPORTED_VERSION",
        12: "INVALID_NAME", 13: "REBALANCING", 20: "TOPIC_EXISTS", 21: "PARTITION_NOT_FOUND",
        22: "OFFSET_OUT_OF_RANGE", 23: "OUT_OF_SEQUENCE", 24: "PRODUCER_FENCED", 25: "GROUP_NOT_FOUND",
        26: "UNKNOWN_MEMBER", 27: "NAMESPACE_NOT_FOUND", 28: "NAMESPACE_NOT_EMPTY", 29: "CONFIG_INVALID",
        30: "BATCH_DAMAGED", 31: "STORAGE_FAILED", 32: "SHUTTING_DOWN", 33: "DATA_DAMAGED", 34: "INVALID_ARGUMENT",
        35: "GROUP_NOT_EMPTY", 36: "MEMBER_FENCED", 40: "RECEIPT_INVALID", 41: "QUEUE_FULL", 42: "MESSAGE_NOT_FOUND",
        43: "SCHEDULE_NOT_FOUND", 44: "SCHEDULE_FIRED", 45: "REPLAY_NOT_FOUND", 46: "NO_REPLY_ADDRESS",
        47: "SUBSCRIPTION_NOT_FOUND", 48: "FORBIDDEN", 49: "KEY_NOT_FOUND", 50: "WEBHOOK_NOT_FOUND",
        51: "HOLD_LOST", 52: "FILES_HELD", 53: "SESSION_NOT_FOUND", 54: "STAGE_LOST",
        55: "PIPELINE_NOT_FOUND", 56: "CONNECTION_NOT_FOUND", 57: "MESSAGE_GONE", 58: "NEWER_DATA",
        60: "CONNECTION_LOST", 61: "TIMEOUT", 62: "DATA_DIR_LOCKED", 63: "START_FAILED",
        70: "PATH_NOT_FOUND", 71: "METHOD_NOT_ALLOWED", 72: "UNSUPPORTED_MEDIA_TYPE",
        255: "INTERNAL",
    }  # fmt: skip
    assert {number: error.code for number, error in catalogue().items()} == frozen


def test_the_version_is_said_once() -> None:
    from millstream.version import VERSION

    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text()
    said = [path.name for path in (ROOT / "src").rglob("*.py") if f'{VERSION}"' in path.read_text()]
    assert said == ["version.py"]

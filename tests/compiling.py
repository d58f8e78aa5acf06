"""After a `git clone` no test is compiled yet, and each process of `make test` would compile all of them, in one order.

With this each begins with others, and finds most of the rest done.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]


def compile_share(config: pytest.Config) -> None:
    """Of the tests that nobody has compiled.  What goes wrong here goes wrong again where they are collected."""
    worker: dict[str, str] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    share = sorted(ROOT.glob("tests/**/test_*.py"))[
        int(worker["workerid"].removeprefix("gw")) :: int(worker["workercount"])
    ]
    for file in share:
        with suppress(Exception):
            compile_test(config, file)


def compile_test(config: pytest.Config, file: Path) -> None:
    """As pytest does it, which rewrites what is asserted; where that has changed, it finds nothing."""
    compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    if compiled.exists():
        return
    compiled.parent.mkdir(exist_ok=True)
    stat, code = rewrite._rewrite_test(file, config)
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, compiled)

"""Which tests share a process where there are several (`--dist loadfile`): those of a file, all that look at the
dashboard, and those that use Spark, of which there are so many that they take two.

What a module sets up is set up once then, and there are two Javas and one Chromium, which take longer to start than
most tests to run.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

from xdist.scheduler import LoadFileScheduling

ROOT: Final = Path(__file__).parents[1]
#: Who asks for a session.  The process that hands out tests has not seen them: it knows their files, and could be wrong
#: about one at the price of another Java.
ASKS_FOR_SPARK: Final = re.compile(r"\b(spark: Any|(ready|alone): Ready)\b")

#: Where pipelines are run, which is half of what Spark does in the fast suite.
PIPELINES: Final = ("tests/spark/pipelines/", "tests/spark/ready/")
#: Who asks for a browser.
DASHBOARD: Final = "tests/e2e/dashboard/"


class ByFile(LoadFileScheduling):
    """All that use Spark are of two files, pipelines and the rest, and all that use a browser are of one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.startswith(DASHBOARD):
            return DASHBOARD
        if not uses_spark(file):
            return file
        return PIPELINES[0] if file.startswith(PIPELINES) else "tests/spark"


@functools.cache
def uses_spark(file: str) -> bool:
    return file.startswith("tests/spark/") and ASKS_FOR_SPARK.search((ROOT / file).read_text()) is not None

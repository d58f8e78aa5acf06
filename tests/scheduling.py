"""Which tests share a process where there are several (`--dist loadfile`): those of a file, all that use Spark, and all
that look at the dashboard.

What a module sets up is set up once then, and there is one Java and one Chromium, which take longer to start than most
tests to run.
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


#: Who asks for a browser.
DASHBOARD: Final = "tests/e2e/dashboard/"


class ByFile(LoadFileScheduling):
    """All that use Spark are of one file, and so are all that use a browser."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.startswith(DASHBOARD):
            return DASHBOARD
        return "tests/spark" if uses_spark(file) else file


@functools.cache
def uses_spark(file: str) -> bool:
    return file.startswith("tests/spark/") and ASKS_FOR_SPARK.search((ROOT / file).read_text()) is not None

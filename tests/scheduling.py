"""Which tests share a process where there are several (`--dist loadfile`): those of a file, and all that use Spark.

What a module sets up is set up once then, and there is one Java, which takes longer to start than most tests to run.
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


class ByFile(LoadFileScheduling):
    """All that use Spark are of one file."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "tests/spark" if uses_spark(file) else file


@functools.cache
def uses_spark(file: str) -> bool:
    return file.startswith("tests/spark/") and ASKS_FOR_SPARK.search((ROOT / file).read_text()) is not None

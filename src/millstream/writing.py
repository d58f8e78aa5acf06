"""Several pieces to a transport of asyncio at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["write_all"]

#: In these versions `writelines` never calls `pause_writing`, however much waits (gh-127655 of CPython).
_FORGETS: Final = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)


def write_all(transport: asyncio.Transport, parts: Sequence[bytes | memoryview]) -> None:
    """As `writelines`, and whoever writes more than is taken is told so in every version of Python."""
    if len(parts) == 1:
        transport.write(parts[0])
    elif _FORGETS:
        transport.write(b"".join(parts))
    else:
        transport.writelines(parts)

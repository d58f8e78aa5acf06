"""How many examples Hypothesis makes up for a property: some in the fast suite, very many in the slow one."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings

FEW: Final = 25
MANY: Final = 1_000


def examples(count: int, **more: Any) -> settings:
    """For a property that needs other than FEW: so many in the fast suite, and as many times more in the slow one."""
    return settings(max_examples=count * settings().max_examples // FEW, **more)


def seeds(few: int, many: int) -> list[Any]:
    """The numbers below `many`: the first few in the fast suite, the others in the slow one."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, many))]

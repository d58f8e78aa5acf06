"""What is asked again when a connection ends before the answer comes."""

from __future__ import annotations

import re

import pytest

from millstream.broker.access.permissions import PERMISSIONS
from millstream.client.metadata import _REPEATABLE

LOOKS = re.compile(r"(List|Show|Describe|Find|Count|Read|Browse|Peek)[A-Z]|CheckHealth|Metrics|Explain")


@pytest.mark.parametrize(
    "call",
    [call for call, rule in PERMISSIONS.items() if rule.permission == "read" or LOOKS.match(call.__name__)],
    ids=lambda call: call.__name__,
)
def test_whoever_only_looks_may_look_again(call: type) -> None:
    assert issubclass(call, _REPEATABLE)

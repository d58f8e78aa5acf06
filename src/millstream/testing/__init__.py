"""Brokers for tests: real ones, and ones in virtual time.  See docs/guide/testing.md.

The names load what they need when they are first used, because pytest imports this package wherever it is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.testing.broker import BrokerForTests as BrokerForTests
    from millstream.testing.broker import BrokerProcess as BrokerProcess
    from millstream.testing.storage import Fault as Fault
    from millstream.testing.storage import SimulatedStorage as SimulatedStorage
    from millstream.testing.virtual import VirtualBroker as VirtualBroker
    from millstream.testing.virtual import virtual_broker as virtual_broker
    from millstream.testing.virtual import virtual_time as virtual_time

_HOME = {
    "BrokerForTests": "broker",
    "BrokerProcess": "broker",
    "Fault": "storage",
    "SimulatedStorage": "storage",
    "VirtualBroker": "virtual",
    "virtual_broker": "virtual",
    "virtual_time": "virtual",
}

__all__ = [
    "BrokerForTests",
    "BrokerProcess",
    "Fault",
    "SimulatedStorage",
    "VirtualBroker",
    "virtual_broker",
    "virtual_time",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'millstream.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"millstream.testing.{home}"), name)

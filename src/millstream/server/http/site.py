"""Everything that answers on the HTTP port, put together."""

from __future__ import annotations

from typing import Final

import millstream.server.http.openapi as openapi
from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.http.app import App
from millstream.server.http.endpoints import Family
from millstream.server.http.families import namespaces, topics

__all__ = ["FAMILIES", "build"]

#: In the order of the reference.
FAMILIES: Final[tuple[Family, ...]] = (
    namespaces.family,
    topics.family,
)


def build(broker: Broker, settings: Settings) -> App:
    app = App(broker, settings, FAMILIES)
    openapi.mount(app)
    return app

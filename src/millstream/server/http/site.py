"""Everything that answers on the HTTP port, put together."""

from __future__ import annotations

from typing import Final

import millstream.server.http.metrics as metrics
import millstream.server.http.openapi as openapi
import millstream.server.http.pages as pages
from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.http.app import App
from millstream.server.http.endpoints import Family
from millstream.server.http.families import (
    admin,
    dead_letters,
    groups,
    health,
    keys,
    messages,
    mqtt,
    namespaces,
    pipelines,
    queues,
    schedules,
    stats,
    topics,
    traces,
    webhooks,
    why,
)
from millstream.server.http.socket import door
from millstream.server.mqtt import websocket

__all__ = ["FAMILIES", "build"]

#: In the order of the reference.
FAMILIES: Final[tuple[Family, ...]] = (
    namespaces.family,
    topics.family,
    messages.family,
    groups.family,
    queues.family,
    dead_letters.family,
    schedules.family,
    why.family,
    traces.family,
    stats.family,
    webhooks.family,
    mqtt.family,
    pipelines.family,
    admin.family,
    health.family,
    keys.family,
)


def build(broker: Broker, settings: Settings) -> App:
    app = App(broker, settings, FAMILIES)
    openapi.mount(app)
    metrics.mount(app)
    health.mount(app)
    pages.mount(app)
    door.mount(app, settings)
    websocket.mount(app, settings)
    return app

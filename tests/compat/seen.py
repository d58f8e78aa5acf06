"""What can be seen of a broker from outside, as a document: the same before and after whatever must not change it."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.client import Client
from millstream.testing.broker import BrokerForTests

__all__ = ["look"]

#: Of a document: what depends on when one looks, or on the version that answers.
_PASSING = frozenset(
    {"size_bytes", "storage_bytes_used", "connections_used", "oldest_ms", "lag_ms", "last_heartbeat_ms_ago"}
)


def look(broker: BrokerForTests) -> dict[str, Any]:
    """Everything, by what it is."""
    client = broker.connect()
    found = {
        "namespaces": client.namespaces(),
        "topics": {name: _topic(client, name) for name in _names(client)},
        "shop": {name: _topic(shop, name) for shop in [broker.connect(namespace="shop")] for name in _names(shop)},
        "groups": {it.name: _group(client, it.name) for it in client.groups()},
        "queues": [_queue(client, it.topic, it.group) for it in client.queues.list()],
        "letters": client.dead_letters.list(),
        "passports": [client.passport(it.original_id) for it in client.dead_letters.list()],
        "replays": client.dead_letters.replays(),
        "schedules": client.schedules.list("later"),
        "repeating": client.schedules.repeating(),
        "keys": client.keys.list(),
        "quota": client.quota("shop"),
        "webhooks": client.webhooks.list(),
        "pipelines": [client.pipelines.show(it.name) for it in client.pipelines.list()],
        "stages": client.pipelines.stages(),
        "sessions": [client.mqtt.session(it.client_id) for it in client.mqtt.sessions()],
        "retained": [client.mqtt.retained_message(it.topic) for it in client.mqtt.retained("#")],
    }
    plain: dict[str, Any] = _without(msgspec.to_builtins(found), _PASSING)
    return plain


def _names(client: Client) -> list[str]:
    return sorted(it.name for it in client.topics())


def _topic(client: Client, name: str) -> dict[str, Any]:
    return {"info": client.topic(name), "messages": client.browse(name, limit=1000)}


def _group(client: Client, name: str) -> dict[str, Any]:
    return {"info": client.group(name), "committed": client.committed(name)}


def _queue(client: Client, topic: str, group: str) -> dict[str, Any]:
    return {"info": client.queues.describe(topic, group), "messages": client.queues.peek(topic, group, limit=100)}


def _without(document: Any, names: frozenset[str]) -> Any:
    if isinstance(document, dict):
        return {name: _without(part, names) for name, part in document.items() if name not in names}
    return [_without(part, names) for part in document] if isinstance(document, list) else document

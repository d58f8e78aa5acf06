"""Requests made up from the OpenAPI document: each gets an answer that the document describes, never a 500.

The requests are the same in every run.  `make test-slow` makes many more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from millstream.config import Settings
from millstream.server.http.openapi import document
from millstream.server.http.site import FAMILIES
from millstream.testing.broker import BrokerForTests

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    allow_header_conformance,
    unsupported_method,
]
#: Requests per endpoint.
FEW, MANY = 3, 150
#: Where nothing listens: made-up webhooks must not reach anybody.
NOWHERE = "http://127.0.0.1:9/"


def load(*, thorough: bool) -> Any:
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(document(FAMILIES))))
    # Every field at each of its limits, by itself: thousands of requests.
    schema.config.phases.coverage.enabled = thorough
    return schema


schema, thorough_schema = load(thorough=False), load(thorough=True)
few = settings(max_examples=FEW, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=MANY)


class World:
    """A broker with something to find behind every kind of path."""

    def __init__(self, broker: BrokerForTests) -> None:
        self.url = broker.url
        self.http = httpx.Client(base_url=f"{broker.url}/api/v1", timeout=30)
        #: Of something that exists, by the name of the variable or field.
        self.names: dict[str, str] = {}
        self.turn = 0

    def furnish(self) -> None:
        """Made-up requests delete things, too; what is gone comes back."""
        self._ask("PUT", "/admin/mode", {"mode": "normal"})
        self._ask("PUT", "/admin/log-level", {"level": "warning"})
        self._ask("PUT", "/namespaces/default/quota", {})  # no limits
        messages = [{"value": {"total": 1}, "key": "k"}, {"value": "x"}, {"value": "x", "delay_ms": 3_600_000}]
        now, _, later = self._ask("POST", "/topics/orders/messages", messages)
        leased = self._ask("POST", "/queues/orders/workers/lease", {"max": 2})
        if len(leased) == 2:
            self._ask("POST", "/queues/reject", {"receipts": [leased[0]["receipt"]], "reason": "no"})
        letters = self._ask("GET", "/dead-letters")["letters"]
        self._ask("PUT", "/recurring/nightly", {"topic": "orders", "cron": "@daily", "value": "x"})
        if not self.names:
            self._ask("POST", "/topics/hooked/messages", {"value": "x"})
        webhooks = self._ask("GET", "/webhooks")
        if not webhooks:
            webhooks = [self._ask("POST", "/webhooks", {"topic": "hooked", "url": NOWHERE})["webhook"]]
        keys = self._ask("GET", "/keys") or [self._ask("POST", "/keys", {"roles": ["read"]})["info"]]
        self.names = {
            "topic": "orders",
            "group": "workers",
            "namespace": "default",
            "name": "nightly",
            "id": now["id"],
            "schedules": later["id"],
            "dead-letters": letters[0]["id"] if letters else "",
            "webhooks": webhooks[0]["id"],
            "keys": keys[0]["id"],
            "receipt": leased[-1]["receipt"] if leased else "",
        }

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.http.request(method, path, json=body)
        assert answer.is_success, (path, answer.text)
        return answer.json() if answer.content else None

    def known(self, path: str, variable: str) -> str:
        family = path.split("/")[3]
        return self.names.get(family if variable == "id" else variable) or self.names.get(variable, "")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    quiet = {"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}, "webhooks": {"allow_private": True}}
    with BrokerForTests(settings=Settings.model_validate(quiet), http=True) as running:
        yield running


@pytest.fixture
def world(broker: BrokerForTests) -> World:
    world = World(broker)
    world.furnish()
    return world


def test_the_document_that_is_served_is_the_one_that_is_tested(world: World) -> None:
    assert world.http.get("/openapi.json").json() == schema.raw_schema


@schema.parametrize()
@few
def test_every_answer_is_as_the_document_says(case: schemathesis.Case, world: World) -> None:
    check(case, world)


@pytest.mark.slow
@thorough_schema.parametrize()
@many
def test_every_answer_to_many_requests_is_as_the_document_says(case: schemathesis.Case, world: World) -> None:
    check(case, world)


def check(case: schemathesis.Case, world: World) -> None:
    tame(case, world)
    if case.operation.definition.raw["operationId"].startswith("stream_"):
        check_stream(case, world)
    else:
        case.validate_response(case.call(base_url=world.url, timeout=30), checks=CHECKS)
        if case.path.endswith("/admin/mode"):
            world.furnish()


def tame(case: schemathesis.Case, world: World) -> None:
    """Many requests are about something that exists, and none waits for long or reaches anybody."""
    world.turn += 1
    given = [fields for fields in (case.path_parameters, case.query, case.body) if isinstance(fields, dict)]
    for fields in given:
        for name in fields:
            known = world.known(case.path, name)
            if known and isinstance(fields[name], str) and world.turn % 3:
                fields[name] = known
        if isinstance(fields.get("receipts"), list) and world.turn % 3:
            fields["receipts"] = [world.names["receipt"]]
        for name, limit in (("wait_ms", 20), ("timeout_ms", 1_000)):
            if isinstance(fields.get(name), int) and limit < fields[name] <= 60_000:
                fields[name] = limit
        if isinstance(fields.get("url"), str):
            fields["url"] = NOWHERE


def check_stream(case: schemathesis.Case, world: World) -> None:
    """A stream has no end, so only its beginning is looked at: the status, the content type and a first line."""
    request: dict[str, Any] = case.as_transport_kwargs(base_url=world.url)
    query = {**(request["params"] or {}), "heartbeat_ms": 100}
    with httpx.stream(request["method"], request["url"], params=query, timeout=30) as answer:
        assert answer.status_code in (200, *range(400, 500))
        if answer.status_code == 200:
            assert answer.headers["content-type"] == "application/x-ndjson"
            assert isinstance(json.loads(next(answer.iter_lines())), dict)
        else:
            assert answer.headers["content-type"] == "application/json"
            assert json.loads(answer.read())["code"]

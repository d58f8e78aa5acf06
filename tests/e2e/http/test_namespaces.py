"""Namespaces over HTTP, and what holds for every endpoint: one error shape, the document, the two forms of a path."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import httpx
import pytest

from millstream.testing.broker import BrokerForTests


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with BrokerForTests(http=True) as broker, httpx.Client(base_url=f"{broker.url}/api/v1") as client:
        yield client


def test_a_namespace_is_made_listed_and_deleted(http: httpx.Client) -> None:
    assert http.post("/namespaces", json={"name": "eu"}).status_code == 201
    assert "eu" in http.get("/namespaces").json()
    assert http.delete("/namespaces/eu").status_code == 204
    assert "eu" not in http.get("/namespaces").json()


def test_every_refusal_has_the_same_shape(http: httpx.Client) -> None:
    answers = {
        "PATH_NOT_FOUND": http.get("/nothing"),
        "METHOD_NOT_ALLOWED": http.put("/namespaces"),
        "INVALID_ARGUMENT": http.post("/namespaces", content=b'{"name": 7}'),
        "INVALID_NAME": http.post("/namespaces", json={"name": "../up"}),
        "TOPIC_NOT_FOUND": http.get("/topics/nothing", headers={"X-Request-Id": "mine"}),
    }
    for code, answer in answers.items():
        problem = answer.json()
        assert problem["code"] == code
        assert problem["message"]
        assert problem["suggestions"]
        assert problem["request_id"] == answer.headers["x-request-id"]
        assert datetime.fromisoformat(problem["timestamp"]).tzinfo is not None
    assert [answer.status_code for answer in answers.values()] == [404, 405, 400, 400, 404]
    assert answers["METHOD_NOT_ALLOWED"].headers["allow"] == "GET, HEAD, POST"
    assert answers["TOPIC_NOT_FOUND"].json()["request_id"] == "mine"


def test_a_body_where_none_belongs_and_an_unknown_parameter_are_refused(http: httpx.Client) -> None:
    assert http.request("DELETE", "/namespaces/eu", content=b"x").json()["message"].endswith("no request body")
    assert "'froce' is not known here; did you mean 'force'?" in http.delete("/namespaces/eu?froce=1").json()["message"]


def test_the_document_describes_every_endpoint(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    create = document["paths"]["/api/v1/namespaces"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/NewNamespace")
    assert "Create a namespace" in http.get("/docs").text

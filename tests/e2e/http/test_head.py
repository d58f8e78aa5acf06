"""HEAD answers as GET does, without the body: monitors and `curl -I` ask so."""

from __future__ import annotations

import httpx
import pytest

from millstream.client import Client
from millstream.testing.broker import BrokerForTests


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/health/live",
        "/health/ready",
        "/api/v1/health",
        "/api/v1/topics",
        "/api/v1/topics/seen",
        "/api/v1/topics/nowhere",
        "/api/v1/nothing",
        "/api/v1/openapi.json",
        "/api/v1/docs",
        "/metrics",
        "/",
    ],
)
def test_status_and_headers_are_those_of_get(broker: BrokerForTests, client: Client, path: str) -> None:
    client.create_topic("seen", if_missing=True)
    with httpx.Client(base_url=broker.url) as http:
        whole, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert http.get("/health/live").status_code == 200, "the connection goes on in step"
    if path.startswith(("/api/v1/topics", "/api/v1/health", "/health")):
        assert int(head.headers["content-length"]) > 0


def test_a_stream_is_not_begun(broker: BrokerForTests, client: Client) -> None:
    client.publish("streamed", b"job")
    url = f"{broker.url}/api/v1/queues/streamed/default/stream"
    head = httpx.head(url, timeout=10)
    assert (head.status_code, head.content) == (200, b"")
    assert not [one for one in client.admin.connections() if one.door == "http"]


def test_where_there_is_no_get_there_is_no_head_and_allow_names_it_where_there_is(broker: BrokerForTests) -> None:
    refused = httpx.head(f"{broker.url}/api/v1/admin/checkpoint")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    refused = httpx.delete(f"{broker.url}/health")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")

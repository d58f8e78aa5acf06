"""Who may do what over HTTP: every endpoint that is declared, with every role; keys, quotas, limits, origins."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from millstream.access.rights import PERMISSIONS_OF
from millstream.server.http.app import API
from millstream.server.http.endpoints import Endpoint
from millstream.server.http.site import FAMILIES
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import ROLES, guarded, key_for, new_key, sample
from tests.still import limits_stand_still
from tests.waiting import eventually

ENDPOINTS = [endpoint for family in FAMILIES for endpoint in family.endpoints]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with guarded(http=True, limits={"wrong_keys_per_minute": 0}) as broker:
        yield broker


@pytest.fixture(scope="module")
def keys(broker: BrokerForTests) -> dict[str, str]:
    return {role: key_for(broker, role) for role in ROLES}


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=10) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def status(http: httpx.Client, endpoint: Endpoint, headers: dict[str, str]) -> int:
    """What an endpoint answers, without reading a stream to its end."""
    path = API + re.sub(r"\{\w+\}", "x", endpoint.path.replace("{namespace}", "default"))
    body: dict[str, Any] = {}
    if endpoint.body is bytes:
        body["content"] = b"x"
    elif endpoint.body is not None:
        body["json"] = sample(endpoint.body)
    query = {name: str(value) for name, value in sample(endpoint.query).items()}
    with http.stream(endpoint.method, path, headers=headers, params=query, **body) as answer:
        return answer.status_code


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_an_endpoint_serves_those_roles_that_have_its_permission(
    http: httpx.Client, keys: dict[str, str], endpoint: Endpoint
) -> None:
    anonymous = status(http, endpoint, {})
    if endpoint.permission == "open":
        assert anonymous not in (401, 403)
        return
    assert anonymous == 401
    assert status(http, endpoint, bearer("ms_wrong")) == 401
    for role in ROLES:
        found = status(http, endpoint, bearer(keys[role]))
        if endpoint.permission in PERMISSIONS_OF[role]:
            assert found not in (401, 403), f"{role} should be let through"
        else:
            assert found == 403, f"{role} should be turned away, not {found}"


def test_both_headers_are_understood_and_a_refusal_says_how(http: httpx.Client, keys: dict[str, str]) -> None:
    for headers in (
        bearer(keys["admin"]),
        {"X-Api-Key": keys["admin"]},
        {"authorization": f"bearer  {keys['admin']}"},
    ):
        assert http.get(f"{API}/keys", headers=headers).status_code == 200
    answer = http.get(f"{API}/keys")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["code"] == "UNAUTHORIZED"
    answer = http.get(f"{API}/keys", headers=bearer(keys["read"]))
    assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
    assert "lacks 'admin'" in answer.json()["message"]
    basic = {"authorization": "Basic YTpi"}
    assert http.get(f"{API}/keys", headers=basic).status_code == 401


def test_keys_are_made_rotated_and_revoked(http: httpx.Client, keys: dict[str, str]) -> None:
    admin = bearer(keys["admin"])
    order = {"roles": ["read"], "scopes": ["default:orders.#"], "name": "dashboard"}
    made = http.post(f"{API}/keys", json=order, headers=admin)
    assert made.status_code == 201
    text, info = made.json()["key"], made.json()["info"]
    assert http.get(f"{API}/namespaces", headers=bearer(text)).json() == ["default"]
    shown = http.get(f"{API}/keys", headers=admin)
    assert info["id"] in [key["id"] for key in shown.json()]
    assert text.rpartition("_")[2] not in shown.text
    rotated = http.post(f"{API}/keys/{info['id']}/rotate", json={"grace_ms": 0}, headers=admin).json()["key"]
    assert http.get(f"{API}/namespaces", headers=bearer(text)).status_code == 401
    assert http.get(f"{API}/namespaces", headers=bearer(rotated)).status_code == 200
    assert http.delete(f"{API}/keys/{info['id']}", headers=admin).status_code == 204
    assert http.get(f"{API}/namespaces", headers=bearer(rotated)).status_code == 401
    assert http.delete(f"{API}/keys/{info['id']}", headers=admin).status_code == 404
    for wrong in ({"roles": ["boss"]}, {"roles": []}, {"roles": ["read"], "scopes": ["../x:#"]}, {}):
        assert http.post(f"{API}/keys", json=wrong, headers=admin).status_code == 400
    refused = http.post(f"{API}/keys", json={"roles": ["king"]}, headers=admin).json()
    assert refused["message"] == "a role is one of admin, consume, produce, read, not 'king'"


def test_a_scope_bounds_what_a_path_may_name(broker: BrokerForTests, http: httpx.Client, keys: dict[str, str]) -> None:
    admin = broker.connect(key=keys["admin"])
    for topic in ("mine.a", "theirs.a"):
        admin.create_topic(topic)
    key = bearer(key_for(broker, "read", scopes=["default:mine.#"]))
    assert http.get(f"{API}/topics/mine.a", headers=key).status_code == 200
    assert http.get(f"{API}/topics/theirs.a", headers=key).status_code == 403
    assert http.get(f"{API}/namespaces/team-a/topics/mine.a", headers=key).status_code == 403


def test_a_quota_is_set_shown_and_reached(broker: BrokerForTests, http: httpx.Client, keys: dict[str, str]) -> None:
    admin = bearer(keys["admin"])
    assert http.post(f"{API}/namespaces", json={"name": "small"}, headers=admin).status_code == 201
    path = f"{API}/namespaces/small/quota"
    assert http.put(path, json={"topics": 1}, headers=admin).json()["topics"] == 1
    client = broker.connect(key=keys["admin"], namespace="small")
    client.create_topic("one")
    assert http.get(path, headers=bearer(keys["read"])).json()["topics_used"] == 1
    assert http.put(path, json={"topics": -1}, headers=admin).status_code == 400
    assert http.get(f"{API}/namespaces/nowhere/quota", headers=admin).status_code == 404


def test_the_audit_log_tells_which_door_somebody_came_through(http: httpx.Client, keys: dict[str, str]) -> None:
    admin = bearer(keys["admin"])
    http.post(f"{API}/namespaces", json={"name": "audited"}, headers={**admin, "x-client-id": "alice"})
    page = http.get(f"{API}/admin/audit", params={"call": "namespace.create"}, headers=admin).json()
    entry = next(entry for entry in page["entries"] if entry["names"] == ["audited"])
    assert (entry["door"], entry["client_id"], entry["outcome"]) == ("http", "alice", "done")
    assert entry["key"] == keys["admin"].split("_")[1]
    assert http.get(f"{API}/admin/audit", params={"after": "x"}, headers=admin).status_code == 400


@pytest.mark.parametrize(
    "name", ["%2e%2e%2fx", "..%2f..%2fetc%2fpasswd", "%2e%2e", "..", "a%00b", "%2fetc%2fpasswd", "a%5c..%5cb"]
)
def test_names_in_paths_do_not_escape_the_data_directory(http: httpx.Client, keys: dict[str, str], name: str) -> None:
    admin = bearer(keys["admin"])
    for path in (f"/topics/{name}", f"/namespaces/{name}/quota", f"/namespaces/{name}/topics/x", f"/keys/{name}"):
        # Not httpx: it would resolve the dots before it asks.
        raw = HTTPConnection(http.base_url.host, http.base_url.port)
        raw.request("DELETE" if path.startswith("/keys") else "GET", f"{API}{path}", headers=admin)
        assert raw.getresponse().status in (400, 404)
        raw.close()
    for body, path in (({"name": name}, "/namespaces"), ({"name": name}, "/topics")):
        assert http.post(f"{API}{path}", json=body, headers=admin).status_code in (400, 404, 405)


# --- limits ------------------------------------------------------------------------------------------------------


def test_one_address_and_one_key_ask_no_faster_than_their_limits() -> None:
    limits = {"requests_per_s_per_address": 20, "requests_per_s_per_key": 3}
    with guarded(http=True, limits=limits) as broker, httpx.Client(base_url=broker.url) as http:
        key, other = bearer(key_for(broker, "admin")), bearer(key_for(broker, "admin"))
        with limits_stand_still(broker):
            found = [http.get(f"{API}/namespaces", headers=key).status_code for _ in range(4)]
            assert found == [200, 200, 200, 429]
            assert http.get(f"{API}/namespaces", headers=other).status_code == 200
            answers = [http.get(f"{API}/namespaces") for _ in range(30)]
        assert [answer.status_code for answer in answers] == [401] * 15 + [429] * 15
        assert answers[-1].json()["code"] == "THROTTLED"
        assert int(answers[-1].headers["retry-after"]) >= 1
        broker.clock.advance("2s")
        assert http.get(f"{API}/namespaces", headers=key).status_code == 200


def test_wrong_keys_are_slowed_down() -> None:
    with guarded(http=True, limits={"wrong_keys_per_minute": 2}) as broker, httpx.Client(base_url=broker.url) as http:
        found = [http.get(f"{API}/namespaces", headers=bearer("x")).status_code for _ in range(3)]
        assert found == [401, 401, 429]


# --- a broker that trusts this machine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trusting() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as broker:
        yield broker


def test_while_access_is_off_nobody_is_asked_for_a_key(trusting: BrokerForTests) -> None:
    assert httpx.get(f"{trusting.url}{API}/keys").status_code == 200
    assert httpx.get(f"{trusting.url}{API}/keys", headers=bearer("nonsense")).status_code == 200


def test_pages_of_other_sites_may_not_use_a_broker_that_trusts_this_machine(trusting: BrokerForTests) -> None:
    url = f"{trusting.url}{API}/namespaces"
    assert httpx.get(url, headers={"origin": trusting.url}).status_code == 200
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example:8080"}):
        assert httpx.get(url, headers=headers).status_code == 403
    port = trusting.url.rpartition(":")[2]
    assert httpx.get(url, headers={"host": f"localhost:{port}"}).status_code == 200


def test_a_picture_in_a_page_of_another_site_cannot_lease(trusting: BrokerForTests) -> None:
    """Browsers send no origin with it, but say where it comes from."""
    with trusting.connect() as client:
        client.publish("orders", b"x")
    url = f"{trusting.url}{API}/queues/orders/billing/stream?auto_ack=true"
    for site in ("cross-site", "same-site"):
        answer = httpx.get(url, headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"})
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
    for site in ("same-origin", "none"):
        assert httpx.get(f"{trusting.url}{API}/queues", headers={"sec-fetch-site": site}).json() == []


def test_a_stream_of_a_topic_is_a_connection_and_ends_with_its_key(broker: BrokerForTests, http: httpx.Client) -> None:
    made = new_key(broker, "read")
    with broker.connect(key=key_for(broker, "admin")) as admin:
        admin.create_topic("followed")
        headers = bearer(made.key) | {"x-client-id": "follower"}
        with http.stream("GET", f"{API}/topics/followed/stream", headers=headers) as answer:
            assert answer.status_code == 200
            assert [it.door for it in admin.admin.connections() if it.client_id == "follower"] == ["http"]
            admin.keys.revoke(made.info.id)
            [last] = answer.iter_lines()  # although nothing comes, and no heartbeat is due
        assert json.loads(last)["error"]["code"] == "UNAUTHORIZED"
        assert not [it for it in admin.admin.connections() if it.client_id == "follower"]


def test_health_says_what_is_wrong_to_who_may_read_everything(broker: BrokerForTests, http: httpx.Client) -> None:
    """It may name topics of anybody."""
    admin = key_for(broker, "admin")
    scoped = key_for(broker, "read", scopes=["default:mine.#"])
    with broker.connect(key=admin) as client:
        client.set_mode("maintenance", reason="moving house")
        try:
            for path in (f"{API}/health", "/health/ready"):
                shown = http.get(path, headers=bearer(admin))
                assert "moving house" in shown.text
                for headers in ({}, bearer(scoped)):
                    told = http.get(path, headers=headers)
                    assert told.status_code == shown.status_code
                    assert "moving house" not in told.text
            components = http.get(f"{API}/health").json()["components"]
            assert {component["message"] for component in components} == {""}
            assert "degraded" in {component["status"] for component in components}
        finally:
            client.set_mode("normal")


def test_a_long_poll_ends_when_its_key_is_revoked(broker: BrokerForTests, http: httpx.Client) -> None:
    made = new_key(broker, "consume")
    broker.connect(key=key_for(broker, "admin")).create_topic("polled")
    answers: list[httpx.Response] = []

    def poll() -> None:
        body = {"max": 1, "wait_ms": 30_000}
        answers.append(http.post(f"{API}/queues/polled/g/lease", json=body, headers=bearer(made.key)))

    waiting = threading.Thread(target=poll, daemon=True)
    waiting.start()
    while not any(session.access.key_id == made.info.id for session in list(broker.broker.queues._of_session)):
        assert waiting.is_alive()
    broker.run(broker.broker.access.revoke(made.info.id))
    waiting.join(10)
    assert [answer.status_code for answer in answers] == [401]


def test_a_key_that_is_revoked_while_it_waits_is_not_shown_what_comes(
    broker: BrokerForTests, http: httpx.Client, keys: dict[str, str]
) -> None:
    made = new_key(broker, "read")
    url = f"{API}/topics/secrets/messages"
    assert http.post(url, json={"value": "old"}, headers=bearer(keys["admin"])).status_code == 200
    answers: list[httpx.Response] = []

    def look() -> None:
        query = {"offset": 1, "wait_ms": 30_000}
        answers.append(httpx.get(broker.url + url, params=query, headers=bearer(made.key), timeout=60))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    [partition] = broker.broker.topics.registry.get("default", "secrets").partitions
    assert partition is not None
    eventually(lambda: partition._waiters)
    broker.run(broker.broker.access.revoke(made.info.id))
    assert http.post(url, json={"value": "new"}, headers=bearer(keys["admin"])).status_code == 200
    looking.join(30)
    assert [answer.status_code for answer in answers] == [401]

"""HTTP: messages are published with dedup ids until it is certain that they are stored, leased and acked by receipt."""

from __future__ import annotations

from typing import Any, Final

import httpx

from tests.soak.traffic.world import Worker

TOPIC: Final = "web"
GROUP: Final = "pages"
PARTITIONS: Final = 2
BATCH: Final = 4
#: Longer than any run: a repetition is recognised however late it comes.
DEDUP_MS: Final = 24 * 3600 * 1000
LEASE_MS: Final = 6000


def _http(worker: Worker) -> httpx.Client:
    return httpx.Client(base_url=f"http://{worker.world.http}/api/v1", timeout=10, trust_env=False)


def produce(worker: Worker) -> None:
    """Asked again and again until the answer says that all of them are stored."""
    number = 0
    with _http(worker) as http:
        while not worker.pause():
            first, number = number, number + BATCH
            worker.ledger.note("sent", TOPIC, worker.name, first, number - 1)
            names = [f"{worker.name}:{each}" for each in range(first, number)]
            body = [{"value": name, "key": name, "dedup_id": name} for name in names]
            while not _stored(http, body):
                worker.over.wait(0.1)
            worker.ledger.note("sure", TOPIC, worker.name, first, number - 1)


def _stored(http: httpx.Client, body: list[dict[str, Any]]) -> bool:
    try:
        return http.post(f"/topics/{TOPIC}/messages", json=body).status_code == 200
    except httpx.HTTPError:
        return False


def consume(worker: Worker) -> None:
    with _http(worker) as http:
        while not worker.over.is_set():
            try:
                _lease_and_ack(worker, http)
            except (httpx.HTTPError, ValueError):
                worker.over.wait(0.1)


def _lease_and_ack(worker: Worker, http: httpx.Client) -> None:
    asked = {"max": 20, "wait_ms": 500, "lease_ms": LEASE_MS, "encoding": "text"}
    answer = http.post(f"/queues/{TOPIC}/{GROUP}/lease", json=asked)
    if answer.status_code != 200:
        worker.over.wait(0.1)
        return
    leased = answer.json()
    if not leased:
        return
    by_receipt = {it["receipt"]: (it["value"], it["partition"], it["offset"], str(it["delivery"])) for it in leased}
    worker.ledger.note_all("got", TOPIC, by_receipt.values())
    outcomes = http.post("/queues/ack", json={"receipts": list(by_receipt)}).json()
    if isinstance(outcomes, list):
        done = [by_receipt[each["receipt"]] for each in outcomes if each["result"] == "done"]
        worker.ledger.note_all("done", TOPIC, done)

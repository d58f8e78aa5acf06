"""A shop on a bad day: a broker, traffic with failures, and a page about what failed and why.

Usage: python examples/pipeline_demo.py [DIRECTORY]        or: make pipeline-demo
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import millstream
from millstream.testing import BrokerProcess

SECONDS = 20
PER_SECOND = 60
CITIES = ("Rome", "Oslo", "Lima", "Bern", "Kyiv", "Bonn", "Riga", "Cork", "Nice")
PIPELINE = """\
name: dead-letters
ready: dlq-report
options:
  report: dead-letters.html
  json_file: dead-letters.json
"""
#: What a worker says about a message: nothing, or why it fails and whether that may change.
Work = Callable[[millstream.QueueMessage, float, random.Random], tuple[str, bool] | None]


def bill(message: millstream.QueueMessage, _: float, dice: random.Random) -> tuple[str, bool] | None:
    order = message.json()
    if order["amount"] < 0:
        return f"order {order['number']}: the amount {order['amount']} makes no sense", False
    if dice.random() < 0.01:
        return f"order {order['number']}: no address of customer {order['customer']} in {order['city']}", False
    return None


def charge(message: millstream.QueueMessage, second: float, dice: random.Random) -> tuple[str, bool] | None:
    order = message.json()
    if SECONDS * 0.4 < second < SECONDS * 0.6 and dice.random() < 0.7:  # the bank has a bad quarter of an hour
        return f"timeout after {dice.randint(3000, 3100)} ms: bank at 10.1.{dice.randint(0, 9)}.4:8443", True
    if order["customer"] == "c-7":
        return f"card of c-7 is blocked (case {dice.getrandbits(64):016x})", False
    return None


def mail(message: millstream.QueueMessage, second: float, dice: random.Random) -> tuple[str, bool] | None:
    if second > SECONDS * 0.8 and dice.random() < 0.2:  # somebody has deployed something
        return "KeyError: 'salutation' in template order-confirmation", False
    if dice.random() < 0.01:
        return f"550 no such mailbox: {message.json()['customer']}@example.org", False
    return None


def publish(address: str, began_s: float) -> None:
    dice = random.Random(17)
    with millstream.connect(address) as client:
        for number in range(SECONDS * PER_SECOND):
            time.sleep(max(0.0, began_s + number / PER_SECOND - time.monotonic()))
            customer = "c-7" if dice.random() < 0.03 else f"c-{dice.randint(1, 500)}"
            amount = -1 if dice.random() < 0.02 else dice.randint(1, 900)
            order = {"number": 10_000 + number, "customer": customer, "amount": amount, "city": dice.choice(CITIES)}
            for topic in ("orders", "payments", "mails"):
                client.publish(topic, json=order, key=customer)


def work(address: str, began_s: float, topic: str, group: str, consumer: str, handle: Work) -> None:
    dice = random.Random(consumer)
    with millstream.connect(address, client_id=consumer) as client:
        for message in client.queue(topic, group=group, consumer=consumer, timeout_s=3):
            problem = handle(message, time.monotonic() - began_s, dice)
            if problem is None:
                message.ack()
            elif problem[1]:
                message.nack(problem[0])
            else:
                message.reject(problem[0])


def traffic(address: str) -> None:
    """Three kinds of work, by two workers each, for some seconds."""
    with millstream.connect(address) as client:
        for topic in ("orders", "payments", "mails"):
            client.create_topic(topic, 2, config={"retry": "simple,max_retries=2,initial=100ms"})
    began_s = time.monotonic()
    jobs = (("orders", "billing", bill), ("payments", "charging", charge), ("mails", "mailing", mail))
    threads = [threading.Thread(target=publish, args=(address, began_s))]
    for topic, group, handle in jobs:
        for number in (1, 2):
            arguments = (address, began_s, topic, group, f"{group}-{number}", handle)
            threads.append(threading.Thread(target=work, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(directory: Path) -> None:
    shutil.rmtree(directory / "data", ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    pipeline = directory / "dead-letters.yaml"
    pipeline.write_text(PIPELINE)
    with BrokerProcess(directory / "data", arguments=("--log-level", "error")) as broker:
        print(f"a broker is at {broker.address}; {SECONDS} seconds of traffic, some of which fails ...", flush=True)
        traffic(broker.address)
        with millstream.connect(broker.address) as client:
            letters = client.dead_letters.stats().total
        print(f"{letters} dead letters; Spark looks at them ...", flush=True)
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(pipeline), "--broker", broker.address]
        subprocess.run(command, check=True)
        broker.stop()
    print(f"\nThe report: {(directory / 'dead-letters.html').resolve().as_uri()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/pipeline-demo"))

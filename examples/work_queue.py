"""A work queue: invoices are paid one by one.  What fails comes again; what makes no sense becomes a dead letter.

Usage: python examples/work_queue.py [HOST:PORT]
"""

from __future__ import annotations

import sys

import millstream


def pay(message: millstream.QueueMessage) -> None:
    invoice = message.json()
    if invoice["amount"] <= 0:
        message.reject("the amount makes no sense")
    elif invoice["customer"] == "c-3" and not message.redelivered:
        message.nack("the bank does not answer", retry_after="100ms")
    else:
        print(f"paid {invoice['customer']}: {invoice['amount']} (delivery {message.delivery_count})")
        message.ack()


def main(address: str) -> None:
    with millstream.connect(address) as client:
        for number, amount in enumerate((12, 7, 0, 30)):
            client.publish("invoices", json={"customer": f"c-{number}", "amount": amount})
        for message in client.queue("invoices", group="billing", prefetch=10, lease="30s", timeout_s=1):
            pay(message)
        print("dead:", [letter.error for letter in client.dead_letters.list(topic="invoices")])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")

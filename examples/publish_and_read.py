"""Publish a few messages and read them back.  Usage: python examples/publish_and_read.py [HOST:PORT]"""

from __future__ import annotations

import sys

import millstream


def main(address: str) -> None:
    with millstream.connect(address) as client:
        receipt = client.publish("coffee.orders", b"flat white", key=b"table-7", headers={"shop": "berlin"})
        print(f"stored as {receipt.id} at offset {receipt.offset}; it survives: {receipt.label}")
        with client.producer("coffee.orders") as producer:
            for number in range(1, 4):
                producer.send(f"espresso number {number}", key=b"table-7")
        for message in client.stream("coffee.orders", start="earliest", timeout_s=1):
            print(message.offset, message.key, message.text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")

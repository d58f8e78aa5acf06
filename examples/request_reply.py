"""Ask a question, get an answer: a service behind a queue, and a client that waits for its reply.

Usage: python examples/request_reply.py [HOST:PORT]
"""

from __future__ import annotations

import sys
import threading

import millstream


def serve(client: millstream.Client, requests: int) -> None:
    """Answer requests.  Start more of these, anywhere, and they share the work."""
    for served, message in enumerate(client.queue("prices", group="pricing"), start=1):
        article = message.text
        message.reply(json={"article": article, "price": 100 * len(article)})
        message.ack()
        if served == requests:
            return


def main(address: str) -> None:
    articles = ["apple", "fig"]
    with millstream.connect(address) as service, millstream.connect(address) as client:
        client.create_topic("prices", if_missing=True)
        thread = threading.Thread(target=serve, args=(service, len(articles)))
        thread.start()
        for article in articles:
            print(client.request("prices", article, timeout="10s").json())
        thread.join()
        try:
            client.request("prices", "anybody?", timeout="200ms")
        except millstream.errors.RequestTimeout as problem:
            print(problem)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")

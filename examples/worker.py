"""A worker: a function that handles the messages of a queue, several at a time.  Ctrl-C stops it gracefully.

Usage: python examples/worker.py [HOST:PORT] [JOBS]
"""

from __future__ import annotations

import asyncio
import sys

import millstream


def main(address: str, jobs: int) -> None:
    with millstream.connect(address) as client:
        client.publish_many("jobs", [f"job {number}" for number in range(jobs)])

        @client.worker("jobs", group="workers", concurrency=8, retry="standard")
        async def handle(message: millstream.QueueMessage) -> None:
            await asyncio.sleep(0.01)
            if message.text == "job 3":
                raise millstream.Reject("nobody likes job 3")
            print(f"done: {message.text}", flush=True)

        handle.run()  # until SIGINT or SIGTERM


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", int(sys.argv[2]) if len(sys.argv) > 2 else 5)

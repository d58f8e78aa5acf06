"""One member of a stream group.  Start several of them and watch the partitions move.

Usage: python examples/group_worker.py [HOST:PORT] [MESSAGES]

It reads what others publish: `millstream publish jobs one two three`.  Ctrl-C stops it.
"""

from __future__ import annotations

import contextlib
import sys

import millstream


def main(address: str, messages: int) -> None:
    with millstream.connect(address, client_id="worker") as client:
        client.create_topic("jobs", partitions=4, if_missing=True)
        stream = client.stream(
            "jobs",
            group="workers",
            start="earliest",
            on_assigned=lambda partitions: print("assigned", [p.partition for p in partitions]),
            on_revoked=lambda partitions, lost: print("revoked", [p.partition for p in partitions], "lost" * lost),
        )
        with stream, contextlib.suppress(KeyboardInterrupt):
            for done, message in enumerate(stream, 1):
                print(f"partition {message.partition} offset {message.offset}: {message.text}")
                if done == messages:
                    break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", int(sys.argv[2]) if len(sys.argv) > 2 else 0)

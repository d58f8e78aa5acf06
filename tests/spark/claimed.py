"""A streaming query that is a consumer of a queue group, without Spark around it."""

from __future__ import annotations

import json
from typing import Any

from millstream.client import Client
from millstream.spark.claiming import ClaimingReader
from tests.spark.reading import schema_of, source


class Query:
    """A streaming query as Spark runs one: what it writes down survives, the rest does not."""

    def __init__(
        self, options: dict[str, str], checkpoint: list[str] | None = None, *, schema: str | None = None
    ) -> None:
        made = source({"claim": "workers", **options})
        reader = made.streamReader(schema_of(schema or made.schema()))
        assert isinstance(reader, ClaimingReader)
        self.reader = reader
        #: Offsets, the last of which may belong to a batch that is not done.
        self.offsets = checkpoint or [json.dumps(reader.initialOffset())]
        self.done = len(self.offsets)

    def begin(self) -> bool:
        """Write down what the next batch is.  Whether there is one."""
        limit = self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(json.loads(self.offsets[-1]), limit))
        if end != self.offsets[-1]:
            self.offsets.append(end)
        return len(self.offsets) > self.done

    def tasks(self) -> list[Any]:
        start, end = map(json.loads, self.offsets[-2:])
        return self.reader.partitions(start, end)

    def run(self) -> list[bytes]:
        """Do the batch that was begun."""
        rows = [row for task in self.tasks() for batch in self.reader.read(task) for row in batch.to_pylist()]
        return [row["value"] for row in rows]

    def batch(self) -> list[bytes] | None:
        if not self.begin():
            return None
        values = self.run()
        self.done = len(self.offsets)
        return values

    def drain(self) -> list[bytes]:
        found: list[bytes] = []
        while (values := self.batch()) is not None:
            found += values
        return found

    def crash(self) -> None:
        """As SIGKILL does: the socket is closed, and nothing more is said."""
        assert self.reader._claims is not None
        self.reader._claims.close()

    def restarted(self, options: dict[str, str]) -> Query:
        """From its checkpoint; a batch that was begun and not done is done again."""
        again = Query(options, list(self.offsets))
        again.done = self.done
        return again


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def state(client: Client, topic: str, group: str = "workers") -> tuple[int, int, int]:
    """Ready, leased, acked."""
    info = client.queues.describe(topic, group)
    return info.ready, info.leased, info.settled.get("acked", 0)

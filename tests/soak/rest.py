"""What is still on its way when nothing more is sent: a run ends when that is nothing."""

from __future__ import annotations

from pathlib import Path

import millstream
from tests.queue_kills import TOPIC as JOBS
from tests.soak.ledger import read_ledger
from tests.soak.traffic import mqtt, queues, streams, web

__all__ = ["left_in_queues", "what_is_left"]


def what_is_left(client: millstream.Client, ledgers: Path, *, spark: bool) -> dict[str, object]:
    """By whom it is waited for, and how much; empty in the end."""
    left: dict[str, object] = {**left_in_queues(client)}
    if missing := _left_in_streams(client, ledgers):
        left["readers"] = missing
    if missing := _left_in_mqtt(ledgers):
        left["mqtt"] = missing
    if spark:
        there, copied = (sum(client.offsets(topic).values()) for topic in (streams.TOPIC, streams.COPIES))
        if copied < there:
            left["copies"] = there - copied
    return left


def left_in_queues(client: millstream.Client) -> dict[str, int]:
    left = {group: client.queues.describe(JOBS, group).depth for group in queues.GROUPS}
    left[web.GROUP] = client.queues.describe(web.TOPIC, web.GROUP).depth
    left["schedules"] = sum(stats.pending for stats in client.schedules.stats(JOBS))
    return {name: count for name, count in left.items() if count}


def _left_in_streams(client: millstream.Client, ledgers: Path) -> int:
    seen: dict[str, int] = {}
    for path in ledgers.glob("readers-*.tsv"):
        for note in read_ledger(path):
            seen[note.more] = max(seen.get(note.more, 0), note.last + 1)
    ends = client.offsets(streams.TOPIC)
    return sum(max(0, end - seen.get(str(partition), 0)) for partition, end in ends.items())


def _left_in_mqtt(ledgers: Path) -> int:
    def numbers(name: str, what: str) -> set[tuple[str, int]]:
        notes = read_ledger(ledgers / f"mqtt-{name}.tsv")
        return {(note.name, note.first) for note in notes if note.what.startswith(what)}

    sent = set().union(*(numbers(name, "sent") for name, *_ in mqtt.PUBLISHERS))
    return sum(len(sent - numbers(name, "got")) for name, *_ in mqtt.READERS)

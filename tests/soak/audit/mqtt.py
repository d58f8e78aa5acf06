"""MQTT: QoS 1 at least once, QoS 2 exactly once, each publisher in its order, and no session forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.soak.audit.verdict import Verdict
from tests.soak.ledger import Note

__all__ = ["check_publisher", "check_reader", "confirmed_of", "sent_of"]


def sent_of(notes: Iterable[Note]) -> set[int]:
    return {note.first for note in notes if note.what == "sent"}


def confirmed_of(notes: Iterable[Note]) -> set[int]:
    """What a publisher need not say again: acknowledged (QoS 1), or received (QoS 2)."""
    return {note.first for note in notes if note.what in ("sure", "received") and note.first >= 0}


def check_publisher(verdict: Verdict, name: str, qos: int, notes: Sequence[Note], stored: Sequence[int]) -> None:
    """`stored` are the numbers in the log, in its order."""
    sent, confirmed = sent_of(notes), confirmed_of(notes)
    verdict.counts["MQTT: confirmed"] += len(confirmed)
    verdict.counts["MQTT: stored"] += len(stored)
    counts = Counter(stored)
    verdict.find("lost", f"MQTT {name}: confirmed and not stored", sorted(confirmed - counts.keys()))
    verdict.find("made up", f"MQTT {name}: stored, and never sent", sorted(counts.keys() - sent))
    twice = [number for number, count in counts.items() if count > 1]
    if qos == 2:
        verdict.find("twice", f"MQTT {name}: QoS 2, stored more than once", twice)
    else:
        sent_s: dict[int, float] = {note.first: note.at_s for note in notes if note.what == "sent"}
        sure_s = {note.first: note.at_s for note in notes if note.what == "sure"}
        verdict.find(
            "again",
            f"MQTT {name}: QoS 1, stored again for no reason",
            [
                number
                for number in twice
                if not verdict.explain(
                    "MQTT: QoS 1 stored again", "sensors", "mqtt", sent_s[number], sure_s.get(number, float("inf"))
                )
            ],
        )
    verdict.find("order", f"MQTT {name}: stored out of order", _out_of_order(stored, _refused(notes)))
    _check_session(verdict, name, notes)


def check_reader(
    verdict: Verdict, name: str, qos: int, notes: Sequence[Note], stored: dict[tuple[str, int], list[int]]
) -> None:
    """`stored` has the numbers in the log by publisher and its QoS, in the order of the log."""
    got = [note for note in notes if note.what in ("got1", "got2")]
    verdict.counts["MQTT: deliveries"] += len(got)
    for (publisher, published_qos), numbers in stored.items():
        mine = [note for note in got if note.name == publisher]
        counts = Counter(note.first for note in mine)
        wanted = Counter(numbers)
        verdict.find("lost", f"MQTT {name}: not received from {publisher}", sorted(wanted.keys() - counts.keys()))
        verdict.find("made up", f"MQTT {name}: not stored, {publisher}", sorted(counts.keys() - wanted.keys()))
        if qos == 2 and published_qos == 2:
            twice = [number for number, count in counts.items() if count > 1]
            verdict.find("twice", f"MQTT {name}: QoS 2, received more than once from {publisher}", twice)
        else:
            _explain_repetitions(verdict, name, mine, wanted)
        firsts = list(dict.fromkeys(note.first for note in mine))
        order = list(dict.fromkeys(numbers))
        wrong = [f"{found} for {due}" for found, due in zip(firsts, order, strict=False) if found != due]
        verdict.find("order", f"MQTT {name}: {publisher} in another order than in the log", wrong)
    _check_session(verdict, name, notes)


def _explain_repetitions(verdict: Verdict, name: str, got: Sequence[Note], wanted: Counter[int]) -> None:
    last_s: dict[int, float] = {}
    seen: Counter[int] = Counter()
    unexplained = []
    for note in got:
        seen[note.first] += 1
        # As often as it is stored is not too often.
        if seen[note.first] > wanted[note.first] and not verdict.explain(
            "MQTT: QoS 1 received again", "screens", "mqtt", last_s[note.first], note.at_s
        ):
            unexplained.append(note.first)
        last_s[note.first] = note.at_s
    verdict.find("again", f"MQTT {name}: QoS 1, received again for no reason", unexplained)


def _refused(notes: Iterable[Note]) -> set[int]:
    """What was refused is sent again later, behind others: its order is the publisher's own doing."""
    return {note.first for note in notes if note.what == "refused"}


def _out_of_order(numbers: Iterable[int], excused: set[int]) -> list[int]:
    high, wrong = -1, []
    for number in dict.fromkeys(numbers):
        if number in excused:
            continue
        if number < high:
            wrong.append(number)
        high = max(high, number)
    return wrong


def _check_session(verdict: Verdict, name: str, notes: Iterable[Note]) -> None:
    verdict.find("lost", f"MQTT {name}: the session was forgotten", [n.at_s for n in notes if n.what == "forgotten"])

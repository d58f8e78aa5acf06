"""Queue groups: each message came to the end that it asked for, and what a consumer was told holds ever after."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, TypeAlias

from tests.queue_kills import FAILURES_TO_DEATH, Entry, kind_of
from tests.soak.audit.evidence import Stored
from tests.soak.audit.verdict import Verdict
from tests.soak.ledger import Note

__all__ = ["check_keys", "check_leases", "check_outcomes", "check_promises", "timed_out"]

Place: TypeAlias = tuple[int, int]
#: An ack whose answer does not wait for the disk is there this much later, however busy the machine is.
FLUSH_S: Final = 1.5
#: After these a broker may have forgotten what it had not put on disk.
FORGETS: Final = frozenset({"kill broker", "failed sync", "full disk"})


def check_outcomes(
    verdict: Verdict, groups: Iterable[str], messages: Sequence[Stored], letters: Sequence[Stored], entries: list[Entry]
) -> None:
    """Each message was settled by each group, as the message asks for."""
    acked = {(entry.group, entry.place) for entry in entries if entry.what == "try-ack"}
    died: defaultdict[tuple[str, Place], list[Stored]] = defaultdict(list)
    for letter in letters:
        place = (int(letter.headers["millstream-dead-partition"]), int(letter.headers["millstream-dead-offset"]))
        died[letter.headers["millstream-dead-group"], place].append(letter)
    verdict.counts["jobs: deliveries"] += sum(entry.what == "got" for entry in entries)
    verdict.counts["jobs: dead letters"] += len(letters)
    unsettled, wrong = [], []
    for message in messages:
        place, kind = (message.partition, message.offset), kind_of(message.value)
        for group in groups:
            found = died.pop((group, place), [])
            label = f"{group} {message.value} at {place}"
            if kind in ("ack", "flaky"):
                if found:
                    wrong.append(f"{label} died although it succeeds")
                if (group, place) not in acked:
                    unsettled.append(label)
            elif len(found) != 1:
                (wrong if found else unsettled).append(f"{label} has {len(found)} dead letters")
            else:
                wrong += [f"{label}: {problem}" for problem in _problems(message, found[0], kind)]
    wrong += [f"a letter of {group} {place}, which never was" for group, place in died]
    verdict.find("lost", "jobs: neither acked nor a dead letter", unsettled)
    verdict.find("outcome", "jobs: not what the message asks for", wrong)


def _problems(message: Stored, letter: Stored, kind: str) -> Iterable[str]:
    reason = "REJECTED" if kind == "reject" else "MAX_RETRIES_EXCEEDED"
    if letter.headers["millstream-dead-reason"] != reason:
        yield f"reason {letter.headers['millstream-dead-reason']}"
    if letter.value != message.value:
        yield f"the letter says {letter.value}"
    if kind == "poison" and int(letter.headers["millstream-dead-failures"]) != FAILURES_TO_DEATH:
        yield f"{letter.headers['millstream-dead-failures']} failures"


def check_promises(
    verdict: Verdict, durable: Iterable[str], entries: Iterable[Entry], grants: Mapping[str, float]
) -> None:
    """`entries` in the order of time.  Groups in `durable` answer when it is on disk: nothing excuses them.

    `grants` is when the broker granted which lease, by its own account.
    """
    promises = _Promises(verdict, frozenset(durable), grants)
    for entry in entries:
        promises.take(entry)
    verdict.find("again", "jobs: delivered again after its end was confirmed", promises.broken)
    verdict.find("again", "jobs: failures were forgotten", promises.forgotten)
    verdict.find("again", "jobs: delivered again for no reason", promises.unexplained)


class _Promises:
    """What is known about each message, as the diaries go on."""

    def __init__(self, verdict: Verdict, durable: frozenset[str], grants: Mapping[str, float]) -> None:
        self._verdict = verdict
        self._durable = durable
        self._grants = grants
        #: When somebody began to say something about a message; by the lease that it came with.
        self._tried_s: dict[tuple[str, Place, str], float] = {}
        #: What was confirmed about it, and when that was tried.
        self._ends: dict[tuple[str, Place], tuple[Entry, float]] = {}
        self._failed: dict[tuple[str, Place], tuple[Entry, float]] = {}
        #: Who got it and has not said a word yet that makes it come again.
        self._held: dict[tuple[str, Place], Entry] = {}
        self.broken: list[str] = []
        self.forgotten: list[str] = []
        self.unexplained: list[str] = []

    def take(self, entry: Entry) -> None:
        message = entry.group, entry.place
        tried_s = self._tried_s.get((*message, entry.lease), entry.at_s)
        if entry.what == "got":
            self._got(message, entry)
        elif entry.what.startswith("try-"):
            self._tried_s[*message, entry.lease] = entry.at_s
            if entry.what in ("try-nack", "try-release"):
                self._held.pop(message, None)
        elif entry.what in ("done-ack", "dead-nack", "dead-reject"):
            # To ack again what another one has acked is a success, too: the first of them was its end.
            self._ends.setdefault(message, (entry, tried_s))
        elif entry.what == "retried-nack":
            self._failed[message] = entry, tried_s

    def _got(self, message: tuple[str, Place], entry: Entry) -> None:
        if self._is_late(message, entry):
            return
        before, self._held[message] = self._held.get(message), entry
        end, tried_s = self._ends.pop(message, (None, 0.0))
        if end is not None:
            if not self._may_forget(end, tried_s, entry):
                self.broken.append(f"{entry.group} {entry.place} {entry.value}")
            return
        failed, tried_s = self._failed.get(message, (None, 0.0))
        if failed is not None and entry.failures <= failed.failures and not self._may_forget(failed, tried_s, entry):
            self.forgotten.append(f"{entry.group} {entry.place} {entry.value}: {entry.failures} failures")
        if before is not None and not self._verdict.explain(
            "jobs: redelivered", entry.group, "native", before.at_s, entry.at_s
        ):
            self.unexplained.append(f"{entry.group} {entry.place} {entry.value}")

    def _is_late(self, message: tuple[str, Place], again: Entry) -> bool:
        """Whether the broker had granted this before anybody said what is confirmed of the message by now.

        It lay with a consumer whose connection was lost meanwhile, and which had not noticed yet.  That says nothing
        about the broker, and what was confirmed holds for whatever comes next.
        """
        confirmed = self._ends.get(message) or self._failed.get(message)
        granted_s = self._grants.get(again.lease)
        if confirmed is None or granted_s is None or granted_s >= confirmed[1]:
            return False
        return self._verdict.explain("jobs: handed out late", again.group, "native", granted_s, again.at_s)

    def _may_forget(self, told: Entry, tried_s: float, again: Entry) -> bool:
        """Whether the broker ended so soon after its answer that this need not be on disk."""
        if told.group in self._durable or not told.what.endswith(("ack", "nack")):
            return False
        for fault in self._verdict.faults:
            if (
                fault.kind in FORGETS
                and fault.begin_s <= min(told.at_s + FLUSH_S, again.at_s)
                and fault.end_s >= tried_s
            ):
                self._verdict.explained["jobs: an ack that was not on disk yet", fault.kind] += 1
                return True
        return False


def timed_out(group: str, letters: Iterable[Stored]) -> set[Place]:
    """What became a dead letter because its last consumer said nothing: no diary has its end."""
    return {
        (int(letter.headers["millstream-dead-partition"]), int(letter.headers["millstream-dead-offset"]))
        for letter in letters
        if letter.headers["millstream-dead-group"] == group and _last_kind(letter) == "timeout"
    }


def _last_kind(letter: Stored) -> str:
    """How the last attempt ended.  Its error may be that of an earlier one: a nack need not give a reason."""
    attempts: list[dict[str, str]] = json.loads(letter.headers.get("millstream-dead-attempts", "[]"))
    return attempts[-1]["kind"] if attempts else ""


def check_keys(
    verdict: Verdict, group: str, keys: Mapping[Place, str], entries: Iterable[Entry], silent: Set[Place] = frozenset()
) -> None:
    """`ordering=key`: of one key a message is handed out when the one before it has come to its end.

    Of those that ended in silence it is only known that it was after the last thing that is known of them.
    """
    got_s: dict[Place, float] = {}
    end_s: dict[Place, float] = {}
    for entry in entries:
        if entry.group != group:
            continue
        if entry.place in silent:
            end_s[entry.place] = entry.at_s
        if entry.what == "got":
            got_s.setdefault(entry.place, entry.at_s)
        elif entry.what in ("try-ack", "try-reject") or (
            entry.what == "try-nack" and entry.failures + 1 >= FAILURES_TO_DEATH
        ):
            end_s.setdefault(entry.place, entry.at_s)
    last: dict[tuple[int, str], Place] = {}
    wrong = []
    for place in sorted(got_s):
        slot = place[0], keys.get(place, "")
        before = last.get(slot)
        if before is not None and got_s[place] < end_s.get(before, float("inf")):
            wrong.append(f"{place} of key {slot[1]} before {before} was settled")
        last[slot] = place
    verdict.find("order", f"{group}: handed out before its turn", wrong)


def check_leases(verdict: Verdict, topic: str, notes: Iterable[Note], stored: Iterable[Stored]) -> None:
    """Leased over HTTP: each message was leased, and what was acked never again."""
    done: set[str] = set()
    got_s: dict[str, float] = {}
    broken, unexplained = [], []
    for note in notes:
        if note.what == "done":
            done.add(note.name)
        elif note.what == "got":
            verdict.counts[f"{topic}: deliveries"] += 1
            before_s = got_s.get(note.name)
            if note.name in done:
                broken.append(note.name)
            elif before_s is not None and not verdict.explain(
                f"{topic}: leased again", "pages", "http", before_s, note.at_s
            ):
                unexplained.append(note.name)
            got_s[note.name] = note.at_s
    missing = [message.value for message in stored if message.value not in got_s]
    verdict.find("lost", f"{topic}: never leased", missing)
    verdict.find("again", f"{topic}: leased again after the ack was confirmed", broken)
    verdict.find("again", f"{topic}: leased again for no reason", unexplained)

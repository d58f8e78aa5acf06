"""Why a message is not being delivered right now: one sentence for people, and the facts behind it for programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millstream.durations import format_ms
from millstream.foreign import in_a_sentence
from millstream.queues.records import NEVER, Reason, Situation, Whereabouts

__all__ = ["Surroundings", "explain"]

_ENDINGS = {
    "acked": "it was acked",
    "dead": "this group gave up on it, and it is a dead letter",
    "expired": "its time was over before anybody had it",
    "evicted": "it had to go because the topic was full",
    "purged": "the group was purged",
}
_LANES = ("critical", "high", "normal", "low", "background")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands between a message and its delivery, within its queue."""

    #: How many ready messages are before it.
    ahead: int = 0
    #: The message that is out for its key; or for the queue, if one is out at a time.
    held_by: int | None = None
    strict: bool = False
    #: So many before it wait for their keys that it is not looked for yet.
    beyond: bool = False
    #: Its lane; None where there are no priorities.
    lane: int | None = None
    #: The consumer that had it last, for which it is not kept until `open_us`.
    kept_from: str = ""
    open_us: int = 0
    #: Where the group begins, if that is behind a message which is in the log.
    begins: int | None = None


def explain(offset: int, where: Whereabouts, around: Surroundings, situation: Situation, now_us: int) -> Reason:
    facts: dict[str, Any] = {"offset": offset}
    if where.state not in ("settled", "gone"):  # of those nobody remembers them
        facts |= {"deliveries": where.history.deliveries, "failures": where.history.failures}
    if where.history.last_error:
        facts["last_error"] = where.history.last_error
    if around.begins is not None:
        facts["begins"] = around.begins
        sentence = f"Offset {offset} is none of this group's: it begins at offset {around.begins}."
        return Reason(where.state, sentence, facts)
    if where.state == "gone":
        return Reason(where.state, f"Offset {offset} is not in the log: it was removed, or not written yet.", facts)
    if where.state == "settled":
        facts |= {"settled_as": where.ending} if where.ending else {}
        facts |= {"reason": where.reason} if where.reason else {}
        how = _ENDINGS.get(where.ending, "this group is done with it")
        reason = f" ({in_a_sentence(where.reason)})" if where.reason else ""
        return Reason(where.state, f"Offset {offset} is settled: {how}{reason}.", facts)
    if where.state == "leased":
        return _leased(where, facts, now_us)
    if where.due_us >= NEVER:
        facts["set_aside"] = True
        sentence = "It is set aside: this group gave up on it, and a dead letter stays until it is replayed or purged."
        return Reason(where.state, sentence, facts)
    if where.state == "waiting":
        facts |= {"retry": where.history.failures, "due_ms": where.due_us // 1000}
        cause = f"; last error: {in_a_sentence(where.history.last_error)}" if where.history.last_error else ""
        sentence = (
            f"It waits for retry {where.history.failures} at {_time(where.due_us)}{_left(where.due_us, now_us)}{cause}."
        )
        return Reason(where.state, sentence, facts)
    return _ready(where, around, situation, facts, now_us)


def _leased(where: Whereabouts, facts: dict[str, Any], now_us: int) -> Reason:
    lease = where.lease
    assert lease is not None
    facts |= {
        "consumer": lease.consumer,
        "delivery": lease.delivery,
        "delivered_ms": lease.granted_us // 1000,
        "deadline_ms": lease.deadline_us // 1000,
    }
    until = f"{_time(lease.deadline_us)}{_left(lease.deadline_us, now_us)}"
    whose = in_a_sentence(lease.consumer)
    return Reason(where.state, f"It is leased by {whose} until {until}, delivery {lease.delivery}.", facts)


def _ready(
    where: Whereabouts, around: Surroundings, situation: Situation, facts: dict[str, Any], now_us: int
) -> Reason:
    facts |= {"ahead": around.ahead, "consumers": situation.consumers, "requests": situation.requests}
    others = "1 message is" if around.ahead == 1 else f"{around.ahead} messages are"
    if situation.paused:
        facts["paused"] = True
        sentence = "It is ready, but the group is paused."
    elif not situation.consumers:
        sentence = f"It is ready, but no consumer is connected; {others} before it."
    elif situation.quota:
        facts["quota"] = situation.quota
        sentence = f"It is ready, but a limit holds it back: {situation.quota}."
    elif around.held_by is not None:
        facts["held_by"] = around.held_by
        whose = "The queue delivers one message at a time and waits for" if around.strict else "Its key is held by"
        sentence = f"{whose} offset {around.held_by}, which is not settled yet."
    elif around.beyond:
        facts["beyond"] = True
        sentence = f"It is not looked for yet: too many before it wait for their keys; {others} before it."
    elif around.kept_from and now_us < around.open_us:
        facts |= {"kept_from": around.kept_from, "open_ms": around.open_us // 1000}
        until, last = _time(around.open_us), in_a_sentence(around.kept_from)
        sentence = f"It is kept for another consumer than {last}, which had it last, until {until}."
    elif not situation.requests:
        sentence = f"It is ready, but every consumer has as many messages as it asked for; {others} before it."
    elif around.lane is not None:
        facts["lane"] = _LANES[around.lane]
        sentence = f"Its lane ({_LANES[around.lane]}) waits for its turn; {others} before it in that lane."
    elif around.ahead:
        sentence = f"It is ready; {others} before it."
    else:
        sentence = "It is ready and will be delivered next."
    return Reason(where.state, sentence, facts)


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1000 / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _left(at_us: int, now_us: int) -> str:
    """How far away that is, for who does not want to compare clocks."""
    left_ms = (at_us - now_us) // 1000
    return f" (in {format_ms(left_ms)})" if left_ms > 0 else " (now)"

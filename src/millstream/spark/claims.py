"""The claims of one query: what it holds of its queues, on a connection of their own.

They last as long as the connection, and as long as somebody extends them, which a thread does while Spark works.  When
the connection is lost they go back to their queues; then the same messages are taken again, as far as nobody else has
got them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from millstream.errors import GroupNotFound, MillstreamError, ReceiptInvalid, TopicNotFound, UnavailableError
from millstream.spark.connection import BrokerConnection
from millstream.spark.faults import reached
from millstream.spark.options import Target
from millstream.wire.calls import Call
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import decode_answer
from millstream.wire.queue_calls import (
    Claim,
    ClaimExtended,
    ClaimMessages,
    ClaimSettled,
    CloseQueue,
    DescribeQueue,
    ExtendClaim,
    OpenQueue,
    QueueInfo,
    QueueOpened,
    Range,
    SettleClaim,
)

__all__ = ["CLAIM_MAX", "RANGES_MAX", "Claims"]

#: What the broker allows: messages of a claim, and ranges in which they are wanted again.
CLAIM_MAX: Final = 1_000_000
RANGES_MAX: Final = 50_000
#: A claim is extended so many times before it would run out.
_EXTENSIONS: Final = 4
_EXTEND_S_MIN, _EXTEND_S_MAX = 0.1, 20.0
#: How often to ask for messages that are still in other hands, perhaps those of this query before it was restarted.
_RETAKE_S: Final = 0.2
_encode: Final = msgspec.json.Encoder().encode


class _Held(NamedTuple):
    topic: str
    #: Of which group of its name they are, as in Claim.
    made_us: int
    ranges: list[Range]
    lease_ms: int
    claim: int
    #: The connection whose claim it is; None: it is nobody's, and is to be taken again.
    link: Any


class Claims:
    """For one thread; another one of its own extends."""

    def __init__(self, target: Target, group: str) -> None:
        self._connection = BrokerConnection(target)
        self._group = group
        self._lock = threading.RLock()
        self._held: list[_Held] = []
        self._closed = False
        #: Something is held that perhaps does not last until the next extension, or it is all over.
        self._news = threading.Event()
        self._extender: threading.Thread | None = None

    # --- queues ------------------------------------------------------------------------------------------------------

    def open(self, topics: Iterable[str], start: Literal["earliest", "latest"]) -> None:
        """Make the group where there is none; `start` says what of a topic is in its queue."""
        with self._lock:
            for topic in topics:
                with contextlib.suppress(TopicNotFound):
                    opened = self._connection.call(OpenQueue(topic=topic, group=self._group, start=start), QueueOpened)
                    self._connection.call(CloseQueue(consumer=opened.consumer))

    def ready(self, topics: Iterable[str]) -> dict[str, int]:
        """How many messages of each topic could be claimed now; nothing about those without the group."""
        with self._lock:
            found = {}
            for topic in topics:
                with contextlib.suppress(TopicNotFound, GroupNotFound):
                    found[topic] = self._connection.call(DescribeQueue(topic=topic, group=self._group), QueueInfo).ready
            return found

    # --- claims ------------------------------------------------------------------------------------------------------

    def take(self, topic: str, most: int) -> tuple[list[Range], int]:
        """Claim what is next in the queue of a topic; nothing if there is no such topic.

        Also tells which of the groups of its name it is, as in Claim.
        """
        call = ClaimMessages(topic=topic, group=self._group, max=min(most, CLAIM_MAX))
        with self._lock, contextlib.suppress(TopicNotFound):
            claim: Claim = self._connection.call(call, Claim)
            self._hold(topic, claim)
            return claim.ranges, claim.made_us
        return [], 0

    def retake(
        self, wanted: Mapping[str, Sequence[Range]], made_us: Mapping[str, int], *, patience_s: float
    ) -> dict[str, list[Range]]:
        """Claim what was claimed before, and say what of it is ours again; of the groups that were made then, if known.

        What somebody else has may be what we had ourselves before we were restarted, which the broker has not noticed
        yet.  So there is patience, up to the length of a lease.
        """
        got: dict[str, list[Range]] = {topic: [] for topic in wanted}
        missing = [(topic, some) for topic, ranges in wanted.items() for some in _slices(ranges)]
        deadline_s = time.monotonic() + patience_s
        while missing:
            refused: list[tuple[str, list[Range]]] = []
            for topic, ranges in missing:
                claim = self._retake(topic, ranges, made_us.get(topic, 0))
                got[topic] += claim.ranges
                refused += [(topic, some) for some in _slices(claim.refused)]
            missing = refused
            if not missing or time.monotonic() >= deadline_s:
                break
            time.sleep(_RETAKE_S)
        return got

    def _retake(self, topic: str, ranges: list[Range], made_us: int) -> Claim:
        nothing = Claim(claim=0, consumer=0, messages=0, ranges=[], lease_ms=0, settled=ranges)
        call = ClaimMessages(topic=topic, group=self._group, wanted=ranges, made_us=made_us)
        with self._lock, contextlib.suppress(TopicNotFound):
            claim: Claim = self._connection.call(call, Claim)
            self._hold(topic, claim)
            return claim
        return nothing

    def _hold(self, topic: str, claim: Claim) -> None:
        if claim.claim:
            link = self._connection.link()
            self._held.append(_Held(topic, claim.made_us, claim.ranges, claim.lease_ms, claim.claim, link))
            self._news.set()
            if self._extender is None:
                self._extender = threading.Thread(target=self._keep, name="millstream-claims", daemon=True)
                self._extender.start()

    def acknowledge(self) -> None:
        """Everything that is held is done."""
        with self._lock:
            done, self._held = self._held, []
            if not done:
                return
            reached("before_ack")
            late = sum(map(self._acknowledge, done))
            if late:
                print(
                    f"millstream: {late} messages of group {self._group!r} were done after others had got them, or "
                    "after retention had removed them",
                    file=sys.stderr,
                )

    def _acknowledge(self, held: _Held) -> int:
        """How many messages are not ours any more."""
        if self._settled(held) == _count(held.ranges):
            return 0
        # The connection is another one, or the lease has ended: what nobody else has got since is ours again.
        again = [self._retake(held.topic, some, held.made_us) for some in _slices(held.ranges)]
        taken, self._held = self._held, []
        refused = sum(_count(claim.refused) for claim in again)
        return refused + sum(_count(each.ranges) - self._settled(each) for each in taken)

    def _settled(self, held: _Held) -> int:
        settled = self._ask(held, SettleClaim(claim=held.claim), ClaimSettled)
        return 0 if settled is None else settled.settled

    def _ask(self, held: _Held, call: Call, kind: Any) -> Any:
        """Make a call about a claim, on the connection whose claim it is.  None if it is lost."""
        if held.link is None:
            return None
        try:
            answer = held.link.request(lambda number: [encode_frame(FrameType.CALL, _encode(call), number)])
            payload = answer.wait(time.monotonic() + self._connection.target.timeout_s)
            return decode_answer(memoryview(payload), kind)
        except ReceiptInvalid:
            return None
        except UnavailableError:
            held.link.close()  # and no other: what was taken again since then is another connection's
            return None

    # --- keeping -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        extended_s = time.monotonic()
        while not self._closed:
            left_s = extended_s + self._pause_s() - time.monotonic()
            if left_s > 0 and self._news.wait(left_s):
                self._news.clear()
                continue
            with contextlib.suppress(MillstreamError):  # it is tried again before long
                self.extend()
            extended_s = time.monotonic()

    def extend(self) -> None:
        """Have everything that is held last longer, and take again what is lost."""
        with self._lock:
            for held in list(self._held):
                self._extend(held)

    def _pause_s(self) -> float:
        with self._lock:
            # The broker must hear of us, or it ends the connection.
            limits_ms = [held.link.welcome.heartbeat_ms for held in self._held if held.link is not None]
            limits_ms += [held.lease_ms for held in self._held]
        shortest_s = min(limits_ms, default=0) / 1000 or _EXTEND_S_MAX
        return min(max(shortest_s / _EXTENSIONS, _EXTEND_S_MIN), _EXTEND_S_MAX)

    def _extend(self, held: _Held) -> None:
        if self._ask(held, ExtendClaim(claim=held.claim), ClaimExtended) is None:
            self._held.remove(held)
            lost = [held._replace(ranges=some, claim=0, link=None) for some in _slices(held.ranges)]
            self._held += lost
            for each in lost:
                claim = self._retake(each.topic, each.ranges, each.made_us)
                self._held.remove(each)
                if claim.refused:
                    self._held.append(each._replace(ranges=claim.refused))

    def close(self) -> None:
        """Give back what is held."""
        self._closed = True
        self._news.set()
        with self._lock:
            self._held.clear()
            self._connection.close()
        if self._extender is not None:
            self._extender.join()
            self._extender = None


def _slices(ranges: Sequence[Range]) -> list[list[Range]]:
    """As many at a time as may be wanted; a batch that was claimed in parts has more, when it is scattered."""
    return [list(ranges[at : at + RANGES_MAX]) for at in range(0, len(ranges), RANGES_MAX)]


def _count(ranges: Iterable[Range]) -> int:
    return sum(until - first for _, first, until in ranges)

"""What a queue group did, seen by its consumers, and whether every delivery can be explained."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.client.leases import QueueMessage
from millstream.wire.leases import Settled
from tests.simulation.history import Broken
from tests.simulation.world import World

#: Deadlines are acted on within 100 ms.
_TOLERANCE_S = 0.15
#: An ack that was answered without waiting for the disk is on it after this time.
_ACK_ON_DISK_S = 3.0


@dataclass(eq=False)
class Delivery:
    """One message in one consumer's hands."""

    id: str
    place: tuple[int, int]
    consumer: str
    at_s: float
    #: Deliveries are counted by the broker, which may forget some of them when it crashes.
    count: int
    #: The earliest moment at which the broker can have granted the lease, and for how long it did.
    granted_s: float
    lease_s: float
    said: str = ""
    said_s: float = 0.0
    result: Settled | None = None

    @property
    def settled(self) -> bool:
        return self.said in ("ack", "reject") and self.result != Settled.INVALID


@dataclass(eq=False)
class Deliveries:
    """All deliveries of one queue group."""

    world: World
    topic: str
    group: str
    ordering: str
    sync_acks: bool
    lease_s: float
    all: list[Delivery] = field(default_factory=list)
    by_id: dict[str, list[Delivery]] = field(default_factory=dict)

    # --- what happens --------------------------------------------------------------------------------------------

    def delivered(self, message: QueueMessage, consumer: str) -> Delivery:
        history, now_s = self.world.history, self.world.loop.time()
        id, place = message.value.decode(), (message.partition, message.offset)  # noqa: A001
        history.note("delivered", f"{self.topic}/{self.group}", id, consumer, place, f"#{message.delivery_count}")
        history.saw(self.topic, *place, id)
        lease = message.source.lease
        granted_s = lease.received_ms / 1000 - self.world.network.worst_s
        delivery = Delivery(id, place, consumer, now_s, message.delivery_count, granted_s, lease.length_ms / 1000)
        if now_s > lease.ends_ms / 1000 + _TOLERANCE_S:
            raise Broken(f"{id} was handed to {consumer} after its lease had ended at {lease.ends_ms / 1000:.3f} s")
        if before := self.by_id.get(id):
            self._check_again(before, delivery)
        due_us = history.published[id].due_us
        if due_us is not None and self.world.latest_us() < due_us:
            raise Broken(f"{id} was delivered {(due_us - self.world.latest_us()) / 1e6:.3f} s before it was due")
        self.all.append(delivery)
        self.by_id.setdefault(id, []).append(delivery)
        return delivery

    def says(self, delivery: Delivery, said: str) -> None:
        delivery.said, delivery.said_s = said, self.world.loop.time()
        self.world.history.note(said, f"{self.topic}/{self.group}", delivery.id, delivery.consumer)

    def answered(self, delivery: Delivery, result: Settled) -> None:
        delivery.result = result
        self.world.history.note("answered", delivery.id, delivery.said, result.name)

    # --- whether it may ------------------------------------------------------------------------------------------

    def _check_again(self, before: list[Delivery], now: Delivery) -> None:
        """A message that was delivered before: somebody must have given it back, or lost it."""
        what = f"{now.id} of {self.topic}/{self.group} is delivered to {now.consumer} again"
        if any(earlier.count > now.count for earlier in before):
            return  # leased before those, it lay in its consumer's buffer, which did not hear that it was too long
        if self._crash_is_news(now):
            return  # the same, but the broker does not remember having counted it
        for earlier in before:
            if earlier.settled and earlier.result is not None and not self._ack_was_lost(earlier, now.at_s):
                raise Broken(f"{what}, although its {earlier.said} was answered at {earlier.said_s:.3f} s")
        last = before[-1]
        if self._explanation(last, now.at_s) is None:
            raise Broken(f"{what} for no reason: {last}")
        if now.count == last.count and last.said != "release" and not self._crashed(last.granted_s, now.at_s):
            raise Broken(f"{what} and has not been counted: {last}")

    def _crash_is_news(self, delivery: Delivery) -> bool:
        """Whether the broker that granted the lease is gone, and its consumer cannot know that yet.

        The lease itself may have arrived after that: what was written before a crash is still on its way.
        """
        return any(
            connection.client == delivery.consumer and not near.is_closed and not far.process.alive
            for connection in self.world.network.connections
            for near, far in [connection.ends]
        )

    def _explanation(self, last: Delivery, now_s: float) -> str | None:
        if last.said in ("nack", "reject", "release"):
            return f"{last.said} at {last.said_s}"
        if self._crashed(last.granted_s, now_s):
            return "a crash"
        losses = self.world.network.losses
        if any(last.granted_s <= at_s <= now_s and client == last.consumer for at_s, client in losses):
            return "a connection was lost"
        # Where somebody has set the broker's clock, leases are up to a tenth shorter until that is made up for.
        deadline_s = last.granted_s + last.lease_s * (0.89 if self.world.jumped else 1.0)
        if now_s >= deadline_s - _TOLERANCE_S - self.world.small_jumps_s:
            return "the lease ran out"
        return None

    def _ack_was_lost(self, acked: Delivery, now_s: float) -> bool:
        if self.sync_acks or acked.said == "reject":
            return False
        limit_s = now_s if self.world.disk_fails else acked.said_s + _ACK_ON_DISK_S
        return self._crashed(acked.said_s, min(limit_s, now_s))

    def _crashed(self, since_s: float, until_s: float) -> bool:
        return any(since_s <= at_s <= until_s for at_s in self.world.crashes)

    # --- at the end ----------------------------------------------------------------------------------------------

    def check_fates(self, log: dict[tuple[int, int], str], dead: dict[str, int]) -> None:
        """The queue is empty: each message was acked, or is a dead letter once, or was too old."""
        for id in log.values():  # noqa: A001
            deliveries = self.by_id.get(id, [])
            acked = any(delivery.said == "ack" and delivery.result != Settled.INVALID for delivery in deliveries)
            expiry_us = self.world.history.published[id].expiry_us
            expired = expiry_us is not None and self.world.has_passed(expiry_us)
            if not acked and id not in dead and not expired:
                raise Broken(f"{id} is gone from {self.topic}/{self.group} and nobody settled it")
            if dead.get(id, 0) > 1:
                raise Broken(f"{id} of {self.topic}/{self.group} is {dead[id]} dead letters")
            for delivery in deliveries:
                acked = delivery.said == "ack" and delivery.result == Settled.DONE
                if acked and id in dead and not self._ack_was_lost(delivery, self.world.loop.time()):
                    raise Broken(f"{id} of {self.topic}/{self.group} was acked and is a dead letter")
                if delivery.said == "reject" and delivery.result == Settled.DEAD and id not in dead:
                    raise Broken(f"{id} of {self.topic}/{self.group} was rejected and is no dead letter")

    def check_order(self, log: dict[tuple[int, int], str], dead: dict[str, int]) -> None:
        """Nobody was given a message while an earlier one of its key was unsettled."""
        if self.ordering == "none":
            return
        earlier: dict[object, list[tuple[int, str]]] = {}
        for (partition, offset), id in sorted(log.items()):  # noqa: A001
            key = self.world.history.published[id].key if self.ordering == "key" else ""
            if key is None:
                continue
            line = earlier.setdefault((partition, key), [])
            for _, before in line:
                self._check_turn(before, id, dead)
            line.append((offset, id))

    def _check_turn(self, before: str, after: str, dead: dict[str, int]) -> None:
        if not self.by_id.get(after):
            return
        first_s = self.by_id[after][0].at_s
        deliveries = self.by_id.get(before, [])
        if any(delivery.settled and delivery.said_s <= first_s for delivery in deliveries):
            return
        if before in dead and (not deliveries or deliveries[-1].at_s <= first_s):
            return
        expiry_us = self.world.history.published[before].expiry_us
        if expiry_us is not None and self.world.has_passed(expiry_us):
            return
        # It was settled, but not on disk yet, or the disk had failed; then a crash took that back.
        weak = not self.sync_acks or self.world.disk_fails
        if weak and any(self._crashed(first_s, delivery.at_s) for delivery in deliveries):
            return
        raise Broken(f"{after} of {self.topic}/{self.group} was delivered before {before} of the same key was settled")

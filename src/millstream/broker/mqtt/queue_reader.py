"""One client as a consumer of one queue group: leases become PUBLISHes, and its answers settle them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.queue_messages import Leased, leased_messages
from millstream.broker.mqtt.subscription import QueueSubscription
from millstream.broker.queues.consumers import LeaseHandle
from millstream.errors import MillstreamError, UnavailableError
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import from_topic
from millstream.receipts import ReceiptHandle
from millstream.wire.leases import LeasePart, LeaseRequest, Scope, Settle, SettleEntry

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.mqtt import Mqtt

__all__ = ["QueueReader", "SettledBy"]

#: What ends a delivery well: a message to `$ack`, the client's PUBACK or PUBREC, or nothing but its being sent.
SettledBy: TypeAlias = Literal["message", "arrival", "sending"]

_BYTES_MAX: Final = 1024 * 1024
#: A request that finds nothing waits this long, and then another takes its place.
_WAIT_MS: Final = 600_000
#: A lease that runs out tells nobody; who waits for room looks again this often.
_LOOK_AGAIN_S: Final = 1.0


class QueueReader:
    """See the module."""

    def __init__(
        self,
        room: Mqtt,
        client: Client,
        subscription: QueueSubscription,
        consumer: int,
        topic: str,
        *,
        delivered_as: str | None,
        settled_by: SettledBy,
    ) -> None:
        """`topic` may be a pattern; `delivered_as` is the MQTT topic of deliveries, None for that of each message."""
        assert client.session is not None
        assert client.who is not None
        self._room = room
        self._client = client
        self._session = client.session
        self._who = client.who
        self.subscription = subscription
        self.consumer = consumer
        self.topic = topic
        self._delivered_as = delivered_as
        self._settled_by: SettledBy = settled_by
        #: What it has and has not settled.
        self._held: dict[ReceiptHandle, Leased] = {}
        #: The receipts of these, by the ids that the client was told.
        self._receipts: dict[str, ReceiptHandle] = {}
        #: Those of them that were not sent yet.
        self._unsent: deque[Leased] = deque()
        #: What it has settled last, by the same ids: to say so again is no mistake.
        self._settled: dict[str, ReceiptHandle] = {}
        self._at_most = self._session.outgoing.limit
        self._is_asking = False
        self._request: LeaseHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- messages to the client ----------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Send what is there, and ask for more as soon as the client can take it."""
        if self._closed or self._session.is_resuming:
            return
        while self._unsent:
            if self._client.is_slow or not self._send(self._unsent[0]):
                return
            self._unsent.popleft()
        if not self._client.is_slow:
            self._ask()

    def _send(self, leased: Leased) -> bool:
        """False if the client must confirm others first."""
        if not self._is_leased(leased.receipt):  # it has waited for too long
            return True
        client = self._client
        subscription = self.subscription
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        grant = Grant(subscription.qos, False, False, identifiers)
        parcel = Parcel(leased.message, self._room.clock.now_us())
        if not client.takes(parcel, grant):
            self._settle(leased, Settle.NACK, "the message is larger than the packets that the client takes")
        elif not subscription.qos:
            client.send(parcel, grant, qos=0, packet_id=0)
            if self._settled_by == "sending":
                self._settle(leased, Settle.ACK)
        else:
            flight = Flight(None, None, on_arrival=self._arrival_of(leased))
            return self._session.launch(parcel, grant, subscription.qos, flight)
        return True

    def _ask(self) -> None:
        if self._is_asking:
            return
        enough = max(1, self._at_most // 4)  # asking for each of many messages on its own would cost too much
        room = self._at_most - len(self._held)
        if room < enough:
            self._later()
            return
        self._is_asking = True
        request = LeaseRequest(self.consumer, room, _BYTES_MAX, _WAIT_MS)
        try:
            self._request = self._room.broker.lease(self._who, request, self._answered)
        except MillstreamError as error:
            self._answered(error)

    def _answered(self, found: Sequence[LeasePart] | MillstreamError) -> None:
        self._is_asking, self._request = False, None
        if self._closed:
            return
        if isinstance(found, UnavailableError):
            self._later()
        elif isinstance(found, MillstreamError):
            # Its queue was deleted; when it comes back and subscribes it has another one.
            self._client.fail(MqttViolation(Reason.ADMINISTRATIVE_ACTION, str(found)))
        else:
            for part in found:
                self._take_in(part)
            # Others have their turn: there may be much more of it.
            self._room.loop.call_soon(self.go_on)

    def _take_in(self, part: LeasePart) -> None:
        topic = self._room.broker.topics.registry.get(self._who.namespace, part.topic)
        name = from_topic(part.topic) if self._delivered_as is None else self._delivered_as
        for leased in leased_messages(part, topic.partition_uids[part.partition], name):
            self._held[leased.receipt] = leased
            self._receipts[leased.id] = leased.receipt
            self._unsent.append(leased)

    def _later(self) -> None:
        if self._timer is None:
            self._timer = self._room.loop.call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        for receipt in [receipt for receipt in self._held if not self._is_leased(receipt)]:
            self._forget(receipt)
        self.go_on()

    def _forget(self, receipt: ReceiptHandle) -> Leased | None:
        leased = self._held.pop(receipt, None)
        if leased is not None and self._receipts.get(leased.id) == receipt:
            del self._receipts[leased.id]
        return leased

    # --- what became of them -------------------------------------------------------------------------------------

    def _arrival_of(self, leased: Leased) -> Callable[[bool], None]:
        def arrived(ok: bool) -> None:
            """The client has the message, or does not want it."""
            if self._closed:
                return
            if self._settled_by == "arrival":
                self._settle(leased, Settle.ACK if ok else Settle.REJECT, "" if ok else "the client has refused it")
            elif not ok:
                self._settle(leased, Settle.NACK, "the client has refused it")

        return arrived

    def receipt_of(self, name: str) -> ReceiptHandle | None:
        """The receipt of a message that the client has, or has just settled, by the id it was told."""
        return self._receipts.get(name) or self._settled.get(name)

    def settled(self, receipt: ReceiptHandle) -> None:
        """A message of this client was settled, by whomever."""
        leased = self._forget(receipt)
        if leased is not None:
            self._settled[leased.id] = receipt
            if len(self._settled) > self._at_most:
                del self._settled[next(iter(self._settled))]
            self.go_on()

    def _settle(self, leased: Leased, kind: Settle, reason: str = "") -> None:
        receipt = leased.receipt
        entry = SettleEntry(kind, receipt.nonce, Scope.ONE, receipt.offset, -1, reason=reason)

        def answer(results: Sequence[int] | MillstreamError) -> None:
            if isinstance(results, MillstreamError) and not self._closed:
                self._client.fail(results)

        self._forget(receipt)  # if the lease has ended it is not the client's either
        try:
            self._room.broker.settle(self._who, [entry], answer)
        except MillstreamError as error:
            answer(error)

    def _is_leased(self, receipt: ReceiptHandle) -> bool:
        part = self._room.broker.queues.routed(receipt.nonce)
        lease = part.ledger.lease_of(receipt.nonce) if part is not None else None
        return lease is not None and bool(lease.bits >> receipt.offset - lease.base & 1)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing more is asked for; what it has goes back with its consumer."""
        self._closed = True
        if self._request is not None:
            self._request.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        self._receipts.clear()
        self._settled.clear()
        self._unsent.clear()

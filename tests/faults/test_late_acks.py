"""Every order in which one consumer can lose what another one gets: nothing is handed out after its end was confirmed.

This is the broker's own order, without sockets: what lies between it and a consumer is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from millstream.errors import MillstreamError
from millstream.queues.ledger import Ledger
from millstream.queues.records import DONE, Parcel
from millstream.queues.returned import Returned
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.leases import LeasePart, LeaseRequest, Settle, Settled
from tests.native import Delivered, delivered
from tests.simulated_broker import Client, after_kill, run, started
from tests.unit.broker.test_queues_at_run_time import publish

GROUP = "workers"
#: Of the same key, so that `ordering=key` has something to hold back.
KEYS = [b"a", b"a", b"b"]
MESSAGES = len(KEYS)
#: How a consumer loses what it holds, or gives it back.
LOSSES = ("cut", "close", "release", "nack")
#: What it does then with what it held before, and how it goes on.
ANN = ("lease", "lose", "ack", "lease", "ack")
BOBS = (("wait", "ack", "cut"), ("lease", "ack", "lease"))


def orders(ann: tuple[str, ...], bob: tuple[str, ...]) -> Iterator[list[tuple[str, str]]]:
    """All ways of doing both, each in its own order."""
    for places in combinations(range(len(ann) + len(bob)), len(bob)):
        left = {"ann": list(ann), "bob": list(bob)}
        names = ["bob" if place in places else "ann" for place in range(len(ann) + len(bob))]
        yield [(name, left[name].pop(0)) for name in names]


@dataclass
class Consumer:
    """One that remembers everything that it was ever given, and comes back whenever it is gone."""

    case: Case
    auto_ack: bool = False
    client: Client | None = None
    number: int = 0
    got: list[Delivered] = field(default_factory=list)

    async def do(self, what: str) -> None:
        if self.client is None:
            await self._come()
        assert self.client is not None
        match what:
            case "lease":
                self._take(await self.client.lease(self.number, MESSAGES))
            case "wait":
                self._wait(self.client)
            case "ack":
                await self._settle(Settle.ACK)
            case "release":
                await self._settle(Settle.RELEASE)
            case "nack":
                await self._settle(Settle.NACK)
            case "close":
                await self.client.call(queue_calls.CloseQueue(consumer=self.number))
                self.number = await self._open()
            case _:
                self.client.broker.session_closed(self.client.session)
                await self._come()

    def _wait(self, client: Client) -> None:
        """Ask for whatever comes, now or later."""

        def answered(parts: Sequence[LeasePart] | MillstreamError) -> None:
            assert not isinstance(parts, MillstreamError)
            if client is self.client:  # a broker that was killed says nothing
                self._take(delivered(parts))

        client.broker.lease(client.session, LeaseRequest(self.number, MESSAGES, 1 << 20, 60_000), answered)

    async def _come(self) -> None:
        self.client = Client(self.case.broker.broker)
        self.number = await self._open()

    async def _open(self) -> int:
        assert self.client is not None
        case = self.case
        policy = {"ordering": case.ordering, "ack_durability": case.durability, "max_deliveries": 0}
        return await self.client.open_queue(group=GROUP, policy=policy, auto_ack=self.auto_ack)

    def _take(self, messages: list[Delivered]) -> None:
        self.got += messages
        for message in messages:
            assert message.offset not in self.case.confirmed, "handed out after its end was confirmed"
            if self.auto_ack:
                self.case.confirmed.add(message.offset)

    async def _settle(self, kind: Settle) -> None:
        """Everything it ever got, by the oldest word that it has for each of them first."""
        assert self.client is not None
        for message in self.got:
            # While it waits for the answer others may be given something: that was decided before the answer.
            (result,) = await self.client.settle(kind, message, value=0)
            if kind == Settle.ACK and result == Settled.DONE:
                self.case.confirmed.add(message.offset)


@dataclass
class Case:
    """One order of events, in a group that is there for nothing else."""

    broker: Client
    storage: SimulatedStorage
    ordering: str
    durability: str
    confirmed: set[int] = field(default_factory=set)

    async def play(self, steps: list[tuple[str, str]], *, lose: str, auto_ack: bool) -> None:
        consumers = {"ann": Consumer(self), "bob": Consumer(self, auto_ack)}
        for who, what in steps:
            if what == "lose" and lose == "kill":
                await self._kill(consumers)
            else:
                await consumers[who].do(lose if what == "lose" else what)
        await self._finish(consumers)

    async def _kill(self, consumers: dict[str, Consumer]) -> None:
        if self.durability == "async":
            self.broker.broker.queues.flush()  # a moment later, so that the acks are written
        self.broker = await after_kill(self.broker, self.storage)
        for consumer in consumers.values():
            consumer.client = None

    async def _finish(self, consumers: dict[str, Consumer]) -> None:
        """Whatever is left comes to an end, and then nothing comes any more."""
        last = Consumer(self)
        for consumer in consumers.values():
            if consumer.client is not None:
                consumer.client.broker.session_closed(consumer.client.session)
        for _ in range(MESSAGES):
            await last.do("lease")
            await last.do("ack")
        assert self.confirmed == set(range(MESSAGES)), "a message was lost"
        await last.do("lease")


async def with_messages(storage: SimulatedStorage) -> Client:
    client = await started(storage)
    await client.call(calls.CreateTopic(name="orders"))
    await publish(client, [b"%d" % number for number in range(MESSAGES)], keys=KEYS)
    return client


async def play_all(ordering: str, durability: str, losses: tuple[str, ...], *, auto_ack: bool = False) -> None:
    storage = SimulatedStorage(0)
    client = await with_messages(storage)
    for steps in (some for bob in BOBS for some in orders(ANN, bob)):
        for lose in losses:
            case = Case(client, storage, ordering, durability)
            try:
                await case.play(steps, lose=lose, auto_ack=auto_ack)
            except AssertionError as problem:
                raise AssertionError(f"{problem}: {steps} with {lose}") from problem
            client = case.broker
            await client.call(queue_calls.DeleteQueue(topic="orders", group=GROUP, force=True))


def groups() -> list[Any]:
    """All kinds; in the fast suite the one that has most to go wrong."""
    kinds = [(ordering, durability) for ordering in ("key", "none", "strict") for durability in ("async", "sync")]
    return [kinds[0], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in kinds[1:])]


@pytest.mark.parametrize(("ordering", "durability"), groups())
@pytest.mark.parametrize("auto_ack", [False, True], ids=["acks", "auto_ack"])
def test_nothing_is_handed_out_after_its_end_was_confirmed(ordering: str, durability: str, auto_ack: bool) -> None:
    run(lambda: play_all(ordering, durability, LOSSES, auto_ack=auto_ack))


@pytest.mark.parametrize(("ordering", "durability"), groups())
def test_nor_by_a_broker_that_was_killed_in_between(ordering: str, durability: str) -> None:
    run(lambda: play_all(ordering, durability, ("kill",)))


@pytest.mark.parametrize("losses", [LOSSES, ("kill",)])
def test_a_broker_that_confirms_what_it_does_not_settle_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, losses: tuple[str, ...]
) -> None:
    honest = Ledger.ack
    monkeypatch.setattr(Ledger, "ack", lambda self, *args: honest(self, *args) and DONE)
    with pytest.raises(AssertionError, match="handed out after its end was confirmed"):
        run(lambda: play_all("key", "async", losses))


def test_a_broker_that_has_a_message_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Returned.wait

    def careless(self: Returned, parcel: Parcel) -> None:
        honest(self, parcel)
        honest(self, Parcel(parcel.base, parcel.bits, parcel.history, parcel.terms, parcel.due_us))

    monkeypatch.setattr(Returned, "wait", careless)
    with pytest.raises(AssertionError, match="handed out after its end was confirmed"):
        run(lambda: play_all("none", "async", LOSSES))

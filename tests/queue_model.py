"""A ledger beside a model that knows each message by itself.  Whatever happens, both must say the same.

Every step is a method whose arguments come from outside (Hypothesis, or a seed); `check` follows each of them.  Facts
go through msgpack and a journal; a crash makes a new ledger of what was recorded, and the model takes back the rest.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence

import msgspec

from millstream.queues.ledger import Ledger
from millstream.queues.ranges import lowest, offsets_of
from millstream.queues.records import Dead, Fact, Lease, Result, Rules
from tests.queue_log import SECOND, FakeBatch, FakeLog, granted

READY, LEASED, WAITING, SETTLED, DEAD = "ready", "leased", "waiting", "settled", "dead"
DONE_WITH = (SETTLED, DEAD)


class Message:
    """What the model knows of one message."""

    def __init__(self, key: bytes | None, expiry_us: int) -> None:
        self.key, self.expiry_us = key, expiry_us
        self.state = READY
        self.failures = 0
        self.deliveries = 0
        self.due_us = 0
        self.out = False  # was handed out and is not settled, wherever it is now

    def settle(self, state: str) -> None:
        self.state, self.out = state, False


class QueueModel:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.nonces = itertools.count(1)
        self.now_us = 1_000 * SECOND
        self.log = FakeLog()
        self.messages: dict[int, Message] = {}
        self.trimmed = 0
        self.ledger = self._make_ledger()
        self.ledger.open()
        self.ledger.start_at(0)
        self.journal: list[Fact] = []
        self.recorded: dict[int, Message] = {}
        self.record()

    def _make_ledger(self) -> Ledger:
        return Ledger(self.rules, draw=lambda: 0.0, draw_nonce=lambda: next(self.nonces))

    # --- steps ---------------------------------------------------------------------------------------------------

    def publish(
        self, messages: Sequence[tuple[bytes | None, int, int]], gap: int = 0, step: int = 1, priorities: bool = False
    ) -> None:
        """Messages are a key, a lane, and after how many seconds they expire (0 = never)."""
        start = self.log.end + gap
        offsets = [start + place * step for place in range(len(messages))]
        expiry_us = [self.now_us + after * SECOND if after else 0 for _, _, after in messages]
        batch = FakeBatch(
            offsets,
            append_time_us=self.now_us,
            keys=[key for key, _, _ in messages],
            priorities=[lane for _, lane, _ in messages] if priorities else None,
            expiry_us=expiry_us if any(expiry_us) else None,
        )
        self.log.add_batch(batch)
        for offset, (key, _, _), at_us in zip(offsets, messages, expiry_us, strict=True):
            self.messages[offset] = Message(key, at_us)

    def lease(self, consumer: str, want: int, *, alone: bool, limited: bool = False, cold: bool = False) -> None:
        self.log.cold = {self.log.batch_at(0).base_offset} if cold and self.log.batch_at(0) else set()
        self._waits_end()
        before = {offset for offset, message in self.messages.items() if message.state == READY}
        delivery = self.ledger.lease(
            self.log, consumer=consumer, want=want, now_us=self.now_us, alone=alone, bytes_max=450 if limited else 0
        )
        self.log.cold = set()
        self._bury(delivery.dead)
        offsets = granted(delivery)
        assert len(offsets) == len(set(offsets)) <= want
        for lease in delivery.leases:
            assert lease.granted & 1, "the first offset of a lease is one of its messages"
            for offset in offsets_of(lease.base, lease.granted):
                message = self.messages[offset]
                assert offset in before, f"{offset} was {message.state}"
                assert not self._expired(message)
                assert (lease.delivery, lease.failures) == (message.deliveries + 1, message.failures)
                message.state, message.out = LEASED, True
        self._find_expired()
        # Plain messages are handed out by the run; whoever wants more asks again.
        plain = self.rules.ordering == "none" and not self.rules.fair_by and not self.log.lanes.used
        if alone and not limited and not cold and len(offsets) < (1 if plain else want):
            self._check_nothing_is_left()

    def settle(self, how: str, which: int, bits: int, *, whole: bool) -> None:
        """One of the leases, and all that is left of it or any of its messages."""
        leases = self.leases()
        if not leases:
            return
        lease = leases[which % len(leases)]
        bits = lease.bits if whole else bits % (1 << lease.span) or 1
        base = -1 if whole else lease.base
        chosen = [self.messages.get(offset) for offset in offsets_of(lease.base, bits)]
        valid = not bits & ~lease.bits
        match how:
            case "ack":
                valid = not bits & ~lease.granted and all(
                    message is not None and message.state == SETTLED
                    for message in (self.messages.get(offset) for offset in offsets_of(lease.base, bits & ~lease.bits))
                )
                outcome = self.ledger.ack(lease.nonce, base, bits)
                if valid:
                    for message in chosen:
                        if message is not None and message.state == LEASED:
                            message.settle(SETTLED)
                    assert self.ledger.ack(lease.nonce, base, bits).result == Result.DONE, "to repeat an ack is fine"
            case "nack":
                outcome = self.ledger.nack(lease.nonce, base, bits, now_us=self.now_us, reason="no")
                if valid:
                    self._bury(outcome.dead)
                    self._fail(message for message in chosen if message is not None)
            case "reject":
                outcome = self.ledger.reject(lease.nonce, base, bits, now_us=self.now_us, reason="never")
                self._bury(outcome.dead)
                assert not valid or all(message is not None and message.state == DEAD for message in chosen)
            case "release":
                outcome = self.ledger.release(lease.nonce, base, bits)
                for message in chosen if valid else ():
                    assert message is not None
                    message.state = READY
            case _:
                valid = True
                outcome = self.ledger.extend(lease.nonce, 60_000, now_us=self.now_us)
                assert lease.deadline_us >= min(self.now_us + 60 * SECOND, lease.granted_us + 300 * SECOND)
        assert (outcome.result != Result.INVALID) is valid

    def settle_what_never_was(self, consumer: str) -> None:
        nonce = next(self.nonces)
        stranger = next((lease.nonce for lease in self.leases() if lease.consumer != consumer), nonce)
        for name in (nonce, stranger):
            assert self.ledger.ack(name, consumer=consumer).result == Result.INVALID
            assert self.ledger.nack(name, now_us=self.now_us, consumer=consumer).result == Result.INVALID
            assert self.ledger.reject(name, now_us=self.now_us, consumer=consumer).result == Result.INVALID
            assert self.ledger.release(name, consumer=consumer).result == Result.INVALID
            assert self.ledger.extend(name, 1000, now_us=self.now_us, consumer=consumer).result == Result.INVALID

    def time_passes(self, seconds: int) -> None:
        self.now_us += seconds * SECOND
        late = [lease for lease in self.leases() if lease.deadline_us <= self.now_us]
        failed = [self.messages[offset] for lease in late for offset in offsets_of(lease.base, lease.bits)]
        wakeup_us = self.ledger.next_wakeup_us()
        assert not late or (wakeup_us is not None and wakeup_us <= self.now_us)
        self._bury(self.ledger.expire(self.now_us))
        self._fail(failed)
        self._waits_end()

    def consumer_goes_away(self, consumer: str) -> None:
        mine = [lease for lease in self.leases() if lease.consumer == consumer]
        held = [self.messages[offset] for lease in mine for offset in offsets_of(lease.base, lease.bits)]
        self._bury(self.ledger.return_consumer(consumer, self.now_us))
        for message in held:
            message.deliveries += 1
            assert (message.state == DEAD) == (message.deliveries >= self.rules.max_deliveries)
            if message.state == LEASED:
                message.state = READY

    def sweep(self) -> None:
        self._bury(self.ledger.sweep(self.log, self.now_us))
        self._find_expired()

    def evict(self, count: int) -> None:
        self._waits_end()
        self.ledger.expire(self.now_us)
        ready = sorted(offset for offset, message in self.messages.items() if message.state == READY)
        assert self.ledger.evict(self.log, count) >= min(count, len(ready))
        gone = [offset for offset in ready if offset in self.ledger.settled]
        assert gone == ready[: len(gone)], "the oldest go first"
        for offset in gone:
            self.messages[offset].settle(SETTLED)

    def settle_below(self, size: int, *, retention: bool) -> None:
        end = min(self.ledger.committed + size, self.log.end)
        if retention:
            self.trimmed = max(self.trimmed, end)
            self.ledger.trim(end)
        else:
            self.ledger.purge(end)
        for offset, message in self.messages.items():
            if offset < end and message.state != DEAD:
                message.settle(SETTLED)

    def seek(self, back: int) -> None:
        offset = max(self.ledger.committed - back, self.trimmed)
        self.ledger.start_at(offset)
        for at, message in self.messages.items():
            message.settle(READY if at >= offset else message.state if message.state == DEAD else SETTLED)
            if at >= offset:
                message.failures = message.deliveries = 0
        self.trimmed = offset

    def change_rules_and_back(self) -> None:
        """Whatever intakes know can be found out again."""
        self.ledger.configure(Rules())
        self.ledger.configure(self.rules)

    def record(self) -> None:
        self.journal += self.ledger.drain()
        self.recorded = copy.deepcopy(self.messages)

    def roll(self) -> None:
        self.record()
        self.journal = self.ledger.snapshot()

    def crash(self) -> None:
        """What was recorded is there again; what was leased is ready, and so is what was acked since."""
        self.ledger = self._make_ledger()
        for fact in msgspec.msgpack.decode(msgspec.msgpack.encode(self.journal)):
            self.ledger.apply(fact)
        self.ledger.open()
        self.ledger.trim(self.trimmed)
        for offset, message in self.messages.items():
            old = self.recorded.get(offset, Message(message.key, message.expiry_us))
            message.__dict__.update(old.__dict__)
            if message.state == LEASED:
                message.state = READY
            message.out = message.deliveries > 0 and message.state not in DONE_WITH
            if offset < self.trimmed and message.state != DEAD:
                message.settle(SETTLED)
        self.ledger.expire(self.now_us)
        self._waits_end()
        self.record()

    # --- the model -----------------------------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        return list(self.ledger.leases())

    def _bury(self, dead: Iterable[Dead]) -> None:
        for some in dead:
            self.journal += self.ledger.drain()
            self.journal.append(some.fact)
            for offset in some.offsets():
                assert self.messages[offset].state in (READY, LEASED)
                self.messages[offset].settle(DEAD)
            # The rest of what was drained must hold after a crash as well, so it is recorded when the step is over.
            self._drained = True

    def _fail(self, messages: Iterable[Message]) -> None:
        """What was leased has failed and is tried again, unless it is dead: the ledger must agree about that."""
        for message in messages:
            message.failures += 1
            message.deliveries += 1
            retry = self.rules.retry
            gives_up = message.failures > retry.max_retries or message.deliveries >= self.rules.max_deliveries
            assert gives_up == (message.state == DEAD)
            if not gives_up:
                message.state = WAITING
                message.due_us = self.now_us + 1000 * retry.delay_ms(message.failures, lambda: 0.0)
        self._waits_end()

    def _waits_end(self) -> None:
        for message in self.messages.values():
            if message.state == WAITING and message.due_us <= self.now_us:
                message.state = READY

    def _expired(self, message: Message) -> bool:
        return 0 < message.expiry_us <= self.now_us

    def _find_expired(self) -> None:
        """The ledger may find out at any time that something has expired; never before it has."""
        for offset, message in self.messages.items():
            if message.state == READY and offset in self.ledger.settled:
                assert self._expired(message)
                message.settle(SETTLED)

    def _check_nothing_is_left(self) -> None:
        """A consumer that is alone and asked for more has got everything that can be delivered."""
        if self.ledger.next_wakeup_us() == 0:
            return
        ready = [
            offset for offset, message in self.messages.items() if message.state == READY and not self._expired(message)
        ]
        out = [message for message in self.messages.values() if message.out and message.state != READY]
        if self.rules.ordering == "strict" and out:
            return
        if self.rules.ordering == "key":
            held = {message.key for message in out}
            ready = [
                offset for offset in ready if self.messages[offset].key is None or self.messages[offset].key not in held
            ]
        assert not ready, f"{ready} could have been delivered"

    _drained = False

    def check(self) -> None:
        """Every message is in one place, and the ledger says which."""
        if self._drained:
            self._drained = False
            self.record()
        end = self.log.end
        where: dict[str, set[int]] = {state: set() for state in (READY, LEASED, WAITING, SETTLED, DEAD)}
        for offset, message in self.messages.items():
            where[message.state].add(offset)
        for state in (READY, LEASED, WAITING):
            found = list(self.ledger.offsets(state, end))
            assert found == sorted(set(found))
            assert {offset for offset in found if offset in self.messages} == where[state], state
            if state == READY:
                assert self.ledger.first_ready(end) == next(iter(found), None)
        settled = {offset for offset in self.messages if offset in self.ledger.settled}
        assert settled == where[SETTLED] | where[DEAD]
        counts = self.ledger.counts(end)
        assert counts.leased == len(where[LEASED])
        assert counts.waiting == len(where[WAITING])
        assert counts.ready + counts.leased + counts.waiting + counts.settled == end - min(self.trimmed, end)
        self._check_order()

    def _check_order(self) -> None:
        out = {offset: message for offset, message in self.messages.items() if message.out}
        if self.rules.ordering == "strict":
            assert len(out) <= 1
        if self.rules.ordering != "key":
            return
        for key in {message.key for message in out.values()} - {None}:
            mine = [offset for offset, message in out.items() if message.key == key]
            assert len(mine) == 1, f"{mine} of key {key!r} are out at once"
            older = [message for offset, message in self.messages.items() if offset < mine[0] and message.key == key]
            assert all(message.state in DONE_WITH or self._expired(message) for message in older), "one was passed over"


def some_bits(seed: int, count: int) -> int:
    """A few bits of a number, so that partial settles are as often of one message as of many."""
    return lowest(seed, count) or 1

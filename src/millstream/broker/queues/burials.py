"""Dead letters: what a queue group has given up on goes to the dead letter topic, once and for certain.

The ledger has settled these messages already, but only in memory: that they are dead becomes durable in the same write
as the intent to store their letters (see transfer.py), and until then a crash makes them ready again.  A snapshot of
the journal that is taken meanwhile knows them as settled, so it also says that their letters are still owed.

Whatever dies while letters are written shares the next write, as publishes share a sync: when everything fails, which
is when letters are many, they cost the disk a write for hundreds and not for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from millstream.broker.journal import EntityFact, Fact
from millstream.broker.letter_topics import letter_topic_of
from millstream.broker.transfer import Target
from millstream.errors import InternalError, MillstreamError
from millstream.queues.facts import CUT, settled_fact
from millstream.queues.letters import Place, dead_letter_batch
from millstream.queues.ranges import lowest, normal
from millstream.queues.records import Attempt, Dead, History
from millstream.records import Batch, BatchHeader
from millstream.slicing import batches_of

if TYPE_CHECKING:
    from millstream.broker.queues.part import QueuePart
    from millstream.broker.queues.queues import Queues

__all__ = ["Burials"]

_log = structlog.get_logger("millstream.queues")

#: Letters that travel together: their batch must fit into a frame when it is read, and others wait while it is made.
_LETTERS_BYTES_MAX: Final = 2 * 1024 * 1024
_LETTERS_MAX: Final = 500
#: Those of messages that lie so near to each other in the log.
_NEAR: Final = 65_536
#: When so many in a row could not be written each by itself, it is not their fault.
_REFUSED_MAX: Final = 20
_RETRY_S_FIRST: Final = 0.1
_RETRY_S_MAX: Final = 30.0


class _Burial(NamedTuple):
    """Messages that died together, by their numbers; `certain` is done when all their letters are sure to be stored."""

    numbers: set[int]
    certain: asyncio.Future[None]


class Burials:
    """Messages that one group on one partition has given up on, and whose letters are not certain yet."""

    def __init__(self, host: Queues, part: QueuePart) -> None:
        self._host = host
        self._part = part
        self.entity = f"burials/{part.group.name}"
        self._owed: dict[int, Dead] = {}
        self._number = 0
        #: Whom to tell what became of letters.
        self._burials: dict[int, _Burial] = {}
        self._waiting: list[int] = []
        self._writing = False
        #: Those that could not be written when it was last tried, and why.
        self._failed: list[int] = []
        self._trouble: Exception | None = None
        self._trying_again = False
        for fact in part.keeper.journal.claim(self.entity, self._snapshot):
            self._apply(fact)

    @property
    def first(self) -> int | None:
        """The first message whose letter must still be written, which must not be removed before."""
        return min((dead.base for dead in self._owed.values()), default=None)

    def resume(self) -> None:
        """Write the letters that the last process owed."""
        if self._owed:
            self._begin(list(self._owed))

    def bury(self, dead: Iterable[Dead]) -> asyncio.Future[None]:
        """Write letters; the future is done when it is certain that they will be stored, whatever happens."""
        self._part.record()  # what was decided before belongs into the journal before
        numbers = []
        for some in dead:
            self._number += 1
            self._owed[self._number] = some
            numbers.append(self._number)
        return self._begin(numbers)

    def _begin(self, numbers: list[int]) -> asyncio.Future[None]:
        certain: asyncio.Future[None] = self._host.loop.create_future()
        # Not everybody waits for it, and asyncio complains about errors that nobody looked at.
        certain.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._burials |= dict.fromkeys(numbers, _Burial(set(numbers), certain))
        self._waiting += numbers
        if not self._writing:
            self._writing = True
            self._host.own(self._write_waiting())
        return certain

    # --- remembering ---------------------------------------------------------------------------------------------

    def _snapshot(self) -> list[Fact]:
        return [_owed_fact(number, dead) for number, dead in self._owed.items()]

    def _apply(self, fact: Fact) -> None:
        if fact[0] == CUT:
            self._cut(fact[1])
            return
        kind, number, base, bits, *details = fact
        self._number = max(self._number, number)
        if kind == "written":
            self._written(number, base, int.from_bytes(bits, "little"))
        else:
            self._owed[number] = _dead(base, int.from_bytes(bits, "little"), *details)

    def _cut(self, end: int) -> None:
        """The log lost everything from there on."""
        for number, dead in list(self._owed.items()):
            left = dead.bits & (1 << max(end - dead.base, 0)) - 1
            if left:
                self._owed[number] = _narrowed(dead, left)
            else:
                del self._owed[number]

    def _written(self, number: int, base: int, bits: int) -> None:
        """The letters of some of the dead are certain."""
        dead = self._owed.pop(number, None)  # in replay unknown, unless a snapshot spoke of it
        rest = dead.bits & ~(bits << base - dead.base) if dead is not None else 0
        if dead is not None and rest:
            self._owed[number] = _narrowed(dead, rest)

    # --- writing -------------------------------------------------------------------------------------------------

    async def _write_waiting(self) -> None:
        """Write what has come until now, then what came meanwhile."""
        try:
            while self._waiting:
                numbers, self._waiting = self._waiting, []
                await self._write_apart(numbers)
        finally:
            self._writing = False

    async def _write_apart(self, numbers: Sequence[int]) -> None:
        """Write letters, many at a time.  When a write fails, its halves are tried; what cannot be written now is kept.

        One that can never be written must not keep the others, and a full disk must not make single ones of all.
        """
        pieces = [numbers[at : at + _LETTERS_MAX] for at in range(0, len(numbers), _LETTERS_MAX)][::-1]
        refused: list[int] = []
        in_a_row = 0
        while pieces and in_a_row < 2 * _REFUSED_MAX:
            piece = [number for number in pieces.pop() if number in self._owed]
            try:
                await self._write_all(piece)
            except Exception as error:  # also what nobody foresaw: a letter that is owed is never given up
                self._trouble = error
                self._disappoint(number for number in piece if number not in self._owed)
                if len(piece) > 1 and in_a_row < _REFUSED_MAX:
                    half = len(piece) // 2
                    pieces += [piece[half:], piece[:half]]
                else:
                    refused += piece
                    in_a_row += 1
            else:
                in_a_row = 0
        # What has had no chance is the first to have one.
        self._keep([number for piece in reversed(pieces) for number in piece] + refused)

    def _keep(self, numbers: Iterable[int]) -> None:
        """Letters that cannot be written now: those who wait for them are told, and all are tried again together."""
        owed = [number for number in numbers if number in self._owed]
        self._failed += owed
        self._disappoint(owed)
        if self._failed and not self._trying_again:
            self._trying_again = True
            self._host.own(self._try_again())

    async def _try_again(self) -> None:
        """Until all are written: what is not can neither be forgotten nor be delivered again."""
        wait_s = _RETRY_S_FIRST
        try:
            while self._failed:
                self._complain()
                await asyncio.sleep(wait_s)
                wait_s = min(_RETRY_S_MAX, wait_s * 2)
                numbers, self._failed = self._failed, []
                await self._write_apart(numbers)
        finally:
            self._trying_again = False

    def _complain(self) -> None:
        group, error = self._part.group, self._trouble
        _log.error(
            "dead letters wait",
            topic=group.topic.name,
            group=group.name,
            partition=self._part.number,
            messages=sum(self._owed[number].bits.bit_count() for number in self._failed if number in self._owed),
            reason=str(error),
            exc_info=None if isinstance(error, MillstreamError) else error,
        )

    def _disappoint(self, numbers: Iterable[int]) -> None:
        """Tell those who wait for these letters that they must not rely on them."""
        error = self._trouble
        told = error if isinstance(error, MillstreamError) else InternalError(f"a dead letter waits: {error!r}")
        for number in numbers:
            burial = self._burials.pop(number, None)
            if burial is not None and not burial.certain.done():
                burial.certain.set_exception(told)

    def _end(self, numbers: Iterable[int]) -> None:
        """Stop keeping these: their letters are certain, or not wanted any more."""
        for number in numbers:
            burial = self._burials.pop(number, None)
            if burial is not None:
                burial.numbers.discard(number)
                if not burial.numbers and not burial.certain.done():
                    burial.certain.set_result(None)

    async def _write_all(self, numbers: Sequence[int]) -> None:
        while not self._part.closed and (owed := [number for number in numbers if number in self._owed]):
            await self._write_some(owed)
            self._end(number for number in owed if number not in self._owed)
        self._end(numbers)  # also those of a group that is gone

    async def _write_some(self, numbers: Sequence[int]) -> None:
        """Write as many letters as fit into one batch, of the first in the log and those near to it."""
        host, part = self._host, self._part
        topic = part.group.topic
        target = await self._target()
        buried, letters = await self._letters({number: self._owed[number] for number in numbers})

        def facts() -> Iterator[EntityFact]:
            # Asked for when they are written, which may take a while: a group that was deleted meanwhile has no facts,
            # and the next one of its name knows nothing of this.
            if not part.closed:
                for number, dead in buried.items():
                    yield part.entity, dead.fact
                    yield self.entity, ["written", number, dead.base, _to_bytes(dead.bits)]

        def recorded() -> None:
            for number, dead in buried.items():
                self._written(number, dead.base, dead.bits)
                host.metrics.messages_dead_lettered += dead.bits.bit_count()

        if letters is None:  # retention was faster: there is nothing left to keep
            await part.keeper.journal.ready()
            await part.keeper.journal.record_durably(*facts())
            recorded()
            return
        count = BatchHeader(letters).count
        stored = await host.topics.transfer(topic, part.number).move(target, letters, facts(), on_recorded=recorded)
        host.on_letters(target, stored, stored + count)

    async def _target(self) -> Target:
        """The dead letter topic, made now if need be; letters keep the number of their partition."""
        letters = await letter_topic_of(self._host.topics, self._part.group.topic)
        return Target(letters.namespace, letters.name, self._part.number % len(letters.partitions))

    async def _letters(self, owed: dict[int, Dead]) -> tuple[dict[int, Dead], bytearray | None]:
        """Letters for the first of the dead, as many as travel together, and whose they are."""
        group, number = self._part.group, self._part.number
        base = min(dead.base for dead in owed.values())
        near = {number: dead for number, dead in owed.items() if dead.base - base < _NEAR}
        bits = 0
        for dead in near.values():
            bits |= dead.bits << dead.base - base
        bits, batches = await self._read(base, bits)
        place = Place(group.topic.name, number, group.topic.partition_uids[number])
        now_ms = (self._host.now_us() - self._host.behind_us()) // 1000  # by the clock that stamps the letter, too
        while True:
            buried = {
                number: _narrowed(dead, some)
                for number, dead in near.items()
                if (some := dead.bits & bits >> dead.base - base)
            }
            letters = dead_letter_batch(batches, buried.values(), place, group=group.name, now_ms=now_ms)
            count = bits.bit_count()
            if letters is None or count == 1 or len(letters) <= _LETTERS_BYTES_MAX:
                return buried, letters
            bits = lowest(bits, count // 2)

    async def _read(self, base: int, bits: int) -> tuple[int, list[Batch]]:
        """The first of the dead, and what the log still has of them; nothing is read of what lies between them."""
        keeper = self._part.keeper
        batches: list[Batch] = []
        offset = base
        chosen, count, size = 0, 0, 0
        while bits:
            offset, bits = normal(offset, bits)
            run = await keeper.run_at(offset)
            if run is None:
                chosen |= bits << offset - base  # nothing follows, so all of them are gone
                break
            gone = bits & (1 << max(run.base_offset - offset, 0)) - 1
            here = bits & (1 << run.next_offset - offset) - 1 ^ gone
            mean = max(run.length // run.count, 1)
            some = lowest(here, max(min(_LETTERS_MAX - count, (_LETTERS_BYTES_MAX - size) // mean), not batches))
            batches += batches_of(run.pieces(offset, some))
            chosen |= (gone | some) << offset - base
            if some != here:
                break
            count += some.bit_count()
            size += mean * some.bit_count()
            bits >>= run.next_offset - offset
            offset = run.next_offset
            await asyncio.sleep(0)  # they may be far apart, and each of them a read
        return chosen, batches


def _narrowed(dead: Dead, bits: int) -> Dead:
    """Some of the dead, by themselves."""
    base, bits = normal(dead.base, bits)
    return dead._replace(base=base, bits=bits, fact=settled_fact(dead.fact[1], [(base, bits)]))


def _owed_fact(number: int, dead: Dead) -> Fact:
    attempts = [list(attempt) for attempt in dead.history.attempts]
    return ["owed", number, dead.base, _to_bytes(dead.bits), dead.reason, dead.error, *dead.history[:3], attempts]


def _dead(
    base: int,
    bits: int,
    reason: str,
    error: str,
    deliveries: int,
    failures: int,
    first_us: int,
    attempts: list[list[Any]],
) -> Dead:
    history = History(deliveries, failures, first_us, tuple(Attempt(*attempt) for attempt in attempts))
    return Dead(base, bits, reason, error, history, settled_fact("dead", [(base, bits)]))


def _to_bytes(bits: int) -> bytes:
    return bits.to_bytes(bits.bit_length() + 7 >> 3, "little")

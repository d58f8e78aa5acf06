"""One replay at work: letters in their order, at their rate, each sent once or left where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from millstream.broker.background import comes_within
from millstream.broker.letters.box import LetterBox
from millstream.broker.letters.letters import Letters
from millstream.broker.metrics import Metrics
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.traffic.modes import ModeKeeper
from millstream.broker.transfer import Target
from millstream.dead_letters import DeadLetter, ReplayFailure, ReplayInfo
from millstream.errors import (
    GroupNotFound,
    MillstreamError,
    PayloadTooLarge,
    StorageFailed,
    TopicNotFound,
    UnavailableError,
)
from millstream.partitioning import key_partition
from millstream.queues.letters import replay_batch, replay_bytes
from millstream.queues.replay_plan import Candidate, target_of
from millstream.wire.letter_calls import ReplayLetters

if TYPE_CHECKING:
    from millstream.broker.queues.queues import Queues

__all__ = ["ReplayHost", "ReplayJob", "ReplayOrder"]

_FAILURES_MAX: Final = 100
#: Sent together: enough to share a sync, few enough to be aborted at once; and a batch must fit into a frame when it is
#: read.
_CHUNK: Final = 500
_CHUNK_BYTES: Final = 4 * 1024 * 1024
_READS_AT_A_TIME: Final = 50
#: With a rate limit a chunk is what the rate allows in this time.
_BEAT_S: Final = 0.1
#: How often a target in trouble is looked at again.
_LOOK_AGAIN_S: Final = 1.0


class ReplayHost(Protocol):
    topics: Topics
    queues: Queues
    letters: Letters
    modes: ModeKeeper
    metrics: Metrics
    recorder: Recorder


class ReplayOrder(msgspec.Struct, kw_only=True, frozen=True):
    """What was asked for, and how far the dead letter topics reached then."""

    namespace: str
    call: ReplayLetters
    ends: dict[str, list[int]]
    #: The uids of their partitions: a topic that is made again under the same name is another one.
    uids: dict[str, list[int]] = {}

    def concerns(self, topic: Topic, number: int) -> bool:
        """Whether a partition is one that was there when this was asked for."""
        return not self.uids or not set(self.uids.get(topic.name, ())).isdisjoint(topic.partition_uids[number:][:1])


class ReplayJob:
    """A replay: what was asked for, how far it is, and the sending itself."""

    def __init__(self, host: ReplayHost, order: ReplayOrder, info: ReplayInfo) -> None:
        self.order = order
        self.info = info
        self.task: asyncio.Task[None] | None = None
        #: Set when the job shall end; `info.status` then says how.
        self.ending = asyncio.Event()
        #: Whether `info` says more than what was written down last.
        self.changed = False
        self._host = host
        self._next_s = 0.0  # when the rate allows the next message, by the loop's clock

    def end(self, status: str, reason: str = "") -> None:
        if not self.info.is_over:
            self.info.status = status  # type: ignore[assignment]
            self.info.reason = reason
        self.ending.set()

    async def send_all(self, candidates: Iterable[Candidate]) -> None:
        rate = self.info.rate
        size = max(1, min(_CHUNK, int(rate * _BEAT_S))) if rate else _CHUNK
        waiting = iter(candidates)
        left: list[Candidate] = []
        while not self.ending.is_set():
            left += islice(waiting, size - len(left))
            if not left:
                return
            letters, left = await self._read(left)
            await self._pace(len(letters))
            if self.ending.is_set():
                return
            await self._send(letters)
            self.changed = True

    async def _read(self, candidates: Sequence[Candidate]) -> tuple[list[DeadLetter], list[Candidate]]:
        """The letters of some candidates, as many as may be held at once, and the candidates that are left."""
        namespace = self.order.namespace
        letters: list[DeadLetter] = []
        size = 0
        for number, (topic, partition, offset) in enumerate(candidates):
            if not number % _READS_AT_A_TIME:
                await asyncio.sleep(0)
            known = self._host.topics.registry.find(namespace, topic)
            if known is None or not self.order.concerns(known, partition):
                continue  # deleted, with its letters
            box = self._host.letters.box(known, partition)
            letter = await box.read(offset) if box.is_open(offset) else None
            if letter is not None:
                # As it is sent, not as it died: an edit may make it larger.
                size += replay_bytes(letter, self.order.call.edit)
                if letters and size > _CHUNK_BYTES:
                    return letters, list(candidates[number:])
                letters.append(letter)
        return letters, []

    async def _pace(self, messages: int) -> None:
        """Wait until the rate allows so many more."""
        if not self.info.rate:
            await asyncio.sleep(0)
            return
        now_s = asyncio.get_running_loop().time()
        if self._next_s > now_s:
            await self._pause(self._next_s - now_s)
        self._next_s = max(self._next_s, now_s) + messages / self.info.rate

    async def _pause(self, seconds: float) -> None:
        await comes_within(self.ending, seconds)

    async def _send(self, letters: Iterable[DeadLetter]) -> None:
        """Send letters, in their order for each partition they go to; different partitions at the same time."""
        by_target: dict[Target, list[DeadLetter]] = {}
        for letter in letters:
            target = self._target(letter)
            if target is not None:
                by_target.setdefault(target, []).append(letter)
        await self._until_well(by_target)
        if not self.ending.is_set():
            await asyncio.gather(*(self._send_to(target, its) for target, its in by_target.items()))

    def _target(self, letter: DeadLetter) -> Target | None:
        """Where a letter goes: by its key as from any producer; without one to the partition it was in, if it can."""
        call, namespace = self.order.call, self.order.namespace
        name = target_of(letter, call.target)
        topic = self._host.topics.registry.find(namespace, name)
        if topic is None:
            self._failed(letter, TopicNotFound(f"topic {name!r} does not exist"))
            return None
        size = replay_bytes(letter, call.edit)
        if size > topic.config.max_message_bytes:
            limit = topic.config.max_message_bytes
            self._failed(letter, PayloadTooLarge(f"it has {size} bytes, topic {name!r} allows {limit}"))
            return None
        count = len(topic.partition_uids)
        number = key_partition(letter.key, count) if letter.key is not None else letter.original_partition % count
        return Target(namespace, name, number)

    async def _until_well(self, letters: Mapping[Target, Sequence[DeadLetter]]) -> None:
        """Wait while the broker or a target takes nothing."""
        while (trouble := await self._trouble(letters)) and not self.ending.is_set():
            self.info.status, self.info.reason = "paused", trouble
            self.changed = True
            await self._pause(_LOOK_AGAIN_S)
        if self.info.status == "paused":
            self.info.status, self.info.reason = "running", ""

    async def _trouble(self, letters: Mapping[Target, Sequence[DeadLetter]]) -> str:
        """Why these letters cannot be sent now; empty when they can."""
        if self._host.modes.publish_refusal is not None:
            return str(self._host.modes.publish_refusal)
        for target, its in letters.items():
            topic = self._host.topics.registry.find(target.namespace, target.topic)
            if topic is None:
                continue  # deleted meanwhile: found out when it is sent to
            try:
                failure = self._host.topics.partition_of(topic, target.partition).failed
                if topic.config.max_depth:
                    await self._host.queues.open(topic)
            except StorageFailed as error:
                failure = str(error)
            except (TopicNotFound, GroupNotFound):
                continue
            if failure is not None:
                return f"partition {target.partition} of topic {target.topic!r} takes nothing: {failure}"
            if topic.config.max_depth and topic.config.overflow == "reject":
                depth = self._host.queues.depth(topic)
                # Into an empty queue everything goes: otherwise what is sent together might never fit.
                if depth and depth + len(its) > topic.config.max_depth:
                    return f"topic {target.topic!r} is full: {depth} messages wait to be settled"
        return ""

    async def _send_to(self, target: Target, letters: Sequence[DeadLetter]) -> None:
        boxes = self._host.letters
        for (topic, number), run in groupby(letters, key=lambda letter: (letter.topic, letter.partition)):
            known = self._host.topics.registry.find(self.order.namespace, topic)
            if known is not None and self.order.concerns(known, number):
                await self._move(boxes.box(known, number), target, list(run))

    async def _move(self, box: LetterBox, target: Target, letters: Sequence[DeadLetter]) -> None:
        # Looked at and claimed in one step: somebody may have purged or replayed a letter since it was read.
        letters = [letter for letter in letters if box.is_open(letter.offset)]
        if leased := box.leased(letter.offset for letter in letters):
            # What it does about the letter and what others do about the message would be one thing done twice.
            for letter in letters:
                if letter.offset in leased:
                    self._failed(letter, UnavailableError("a consumer has the letter right now"))
            letters = [letter for letter in letters if letter.offset not in leased]
        if not letters:
            return
        offsets = [letter.offset for letter in letters]
        with box.claim(offsets):
            batch = replay_batch(letters, replay_id=self.info.id, edit=self.order.call.edit)
            try:
                first = await box.move(offsets, target, batch)
            except MillstreamError as error:
                # Deleted at the very moment: those of its messages that had arrived are gone with it, too.
                for letter in letters:
                    self._failed(letter, error)
                return
        self.info.replayed += len(letters)
        self._host.metrics.dead_letters_replayed += len(letters)
        self._note(letters, target, first)

    def _note(self, letters: Sequence[DeadLetter], target: Target, first: int) -> None:
        topic = self._host.topics.registry.find(target.namespace, target.topic)
        if topic is not None:
            partition = self._host.topics.partition_of(topic, target.partition)
            self._host.recorder.replayed(letters, partition, first)

    def _failed(self, letter: DeadLetter, error: MillstreamError) -> None:
        self.info.failed += 1
        if len(self.info.failures) < _FAILURES_MAX:
            failure = ReplayFailure(id=letter.id, reason=str(error), retriable=error.retriable)
            self.info.failures.append(failure)

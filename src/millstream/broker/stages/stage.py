"""One stage: what a task has put there so far, and where it is stored."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.broker.answers import PublishReply
from millstream.broker.partition import LABEL_DISK
from millstream.errors import MillstreamError, OutOfSequence
from millstream.records import BatchHeader
from millstream.wire.stage_calls import StageInfo

__all__ = ["Stage", "Staged"]

_SEQUENCE: Final = 0xFFFF_FFFF


class Staged(NamedTuple):
    """A batch that is on disk and that nobody can see yet."""

    #: In the log of its query.
    offset: int
    topic: str
    partition: int
    messages: int
    bytes: int


class Stage:
    """What is stored counts; what is on its way to the disk is only known, to tell repetitions."""

    __slots__ = (
        "_received",
        "_repeated",
        "attempt",
        "batch",
        "bytes",
        "failure",
        "id",
        "messages",
        "opened_ms",
        "staged",
        "task",
        "touched_ms",
    )

    def __init__(self, stage_id: str, batch: int, task: int, attempt: int, opened_ms: int) -> None:
        self.id = stage_id
        self.batch = batch
        self.task = task
        self.attempt = attempt
        self.opened_ms = self.touched_ms = opened_ms
        self.staged: list[Staged] = []
        self.messages = 0
        self.bytes = 0
        #: Why nothing more is taken: something that was put here is not stored.
        self.failure: MillstreamError | None = None
        self._received = 0
        #: Repetitions of what is on its way: how many messages must be stored before they are answered.
        self._repeated: list[tuple[int, int, PublishReply]] = []

    def receive(self, header: BatchHeader, reply: PublishReply | None) -> int | None:
        """The number of messages before this batch; None when it came before, and then it will be answered."""
        first = self._received
        if header.producer and header.first_sequence != first & _SEQUENCE:
            behind = (first - header.first_sequence) & _SEQUENCE
            if not header.count <= behind <= first:
                raise OutOfSequence(
                    f"stage {self.id} has {first} messages; a batch came that begins with {header.first_sequence}"
                )
            if reply is not None:
                self._repeated.append((first - behind, first - behind + header.count, reply))
                self._answer_repeated()
            return None
        self._received += header.count
        return first

    def store(self, staged: Staged, *, now_ms: int) -> None:
        """A batch is on disk."""
        self.staged.append(staged)
        self.messages += staged.messages
        self._received = max(self._received, self.messages)
        self.bytes += staged.bytes
        self.touched_ms = max(self.touched_ms, now_ms)
        self._answer_repeated()

    def fail(self, error: MillstreamError) -> None:
        self.failure = error
        repeated, self._repeated = self._repeated, []
        for _, _, reply in repeated:
            reply(error, 0, 0, 0, False)

    def _answer_repeated(self) -> None:
        due = [it for it in self._repeated if it[1] <= self.messages]
        self._repeated = [it for it in self._repeated if it[1] > self.messages]
        for first, _, reply in due:
            reply(None, LABEL_DISK, first, self.touched_ms * 1000, True)

    def info(self, ttl_ms: int) -> StageInfo:
        return StageInfo(
            stage=self.id,
            batch=self.batch,
            task=self.task,
            attempt=self.attempt,
            batches=len(self.staged),
            messages=self.messages,
            bytes=self.bytes,
            opened_ms=self.opened_ms,
            expires_ms=self.touched_ms + ttl_ms,
            topics=sorted({staged.topic for staged in self.staged}),
        )

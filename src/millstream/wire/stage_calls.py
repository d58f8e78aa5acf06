"""The control calls of stages and their answers: messages that are written down now and published later, all at once.

A *query* (a Spark query, or any other job with a name of its own) publishes one *batch* of messages after the other.
Each task of a batch opens a stage and puts its messages there; then one call publishes the stages of the batch that
count, and forgets the others.  To publish a batch again is answered and changes nothing.

Messages are put by PUBLISH requests whose topic is `stage_address(stage, topic)`, and whose partition is that of the
topic (with 2**31 added for messages that have a time to deliver them).  They are answered when they are on disk, by
PUBLISHED whose offset counts the messages of the stage.  A batch that has a producer (any one but 0) must continue the
stage: its first sequence is the number of messages that were put before.  So a repetition is recognised.
"""

from __future__ import annotations

import msgspec

from millstream.names import STAGE_PREFIX
from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "AbortStages",
    "ListStages",
    "OpenStage",
    "PublishStages",
    "Published",
    "QueryInfo",
    "StageInfo",
    "StageOpened",
    "StagePart",
    "StagedOffsets",
    "StagesAborted",
    "stage_address",
]


def stage_address(stage: str, topic: str) -> str:
    """The name that PUBLISH requests give, to put messages for a topic into a stage."""
    return f"{STAGE_PREFIX}{stage}.{topic}"


class OpenStage(CallForm, tag="stage.open"):
    """Makes a place for the messages of one task.  Answers with StageOpened."""

    #: The name of whoever publishes batches, 1 to 255 letters, digits and `_ . : @ -`.
    query: str
    #: 0 or more; of one query, batches are published in the order of their numbers.
    batch: int
    task: int = 0
    attempt: int = 0


class StageOpened(AnswerForm):
    #: Empty if `already`.
    stage: str
    #: The batch is published: there is nothing to do any more.
    already: bool = False


class StagePart(msgspec.Struct, kw_only=True):
    """A stage that belongs to a batch, and what its task has put there."""

    stage: str
    #: PUBLISH requests that were confirmed, and the messages in them.
    batches: int
    messages: int


class PublishStages(CallForm, tag="stage.publish"):
    """Publishes a batch: all messages of these stages, exactly once, whatever happens.  Answers with Published.

    Other stages of the batch, and of batches before it, are forgotten.  Without stages the batch is an empty one.
    """

    query: str
    batch: int
    stages: list[StagePart]


class StagedOffsets(AnswerForm):
    """Where messages of a batch are: offsets from `first` to before `until`, perhaps with others between them."""

    topic: str
    #: With 2**31 added where it is the log of schedules.
    partition: int
    first: int
    until: int
    messages: int


class Published(AnswerForm):
    query: str
    batch: int
    #: This call, or an earlier one, has published the batch; always true in an answer that is not an error.
    published: bool
    #: It was an earlier one.
    already: bool
    #: Of the batch that was published last; of one before it, nobody remembers how many they were, and where.
    messages: int
    offsets: list[StagedOffsets] = []
    #: Messages with nowhere to go: their topic was deleted while the batch was being published.
    lost: int = 0


class AbortStages(CallForm, tag="stage.abort"):
    """Forgets stages of a batch, the named ones or all, unless it is published.  Answers with StagesAborted."""

    query: str
    batch: int
    stages: list[str] | None = None


class StagesAborted(AnswerForm):
    #: How many stages were discarded.
    aborted: int
    #: Whether the batch is published, and stays so.
    published: bool = False


class ListStages(CallForm, tag="stage.list"):
    """Answers with a list of QueryInfo, all of the namespace or the one named.

    Those that have stages come first, then those that published last.
    """

    query: str = ""
    limit: int = 100


class StageInfo(AnswerForm):
    stage: str
    batch: int
    task: int
    attempt: int
    batches: int
    messages: int
    bytes: int
    opened_ms: int
    #: When the stage is discarded, unless more is put there.
    expires_ms: int
    topics: list[str]


class QueryInfo(AnswerForm):
    query: str
    #: The batch that was published last; -1 = none yet.
    published: int
    published_ms: int
    #: The batch that is being published right now; -1 = none.
    publishing: int
    #: Messages that are staged.
    messages: int
    #: Bytes of these messages.
    bytes: int
    stages: list[StageInfo]

"""All stages of the broker, by query: what is put there, what becomes of it, and the calls about it.

Publishing is decide, record, replay: one durable fact says that a batch is published and which stages are in it; then
its messages are moved to their topics, and after a crash they are moved again, which changes nothing where they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog

from millstream.broker.answers import PublishReply
from millstream.broker.metrics import Metrics
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.stages.publishing import messages_by_target, move_all, target_key, topic_of
from millstream.broker.stages.query import Publication, Query, QueryDocument
from millstream.broker.stages.stage import Stage
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    NewerData,
    QuotaExceeded,
    ShuttingDown,
    StageLost,
    StorageFailed,
)
from millstream.ids import SCHEDULES
from millstream.names import STAGE_PREFIX, check_group, is_drawn
from millstream.wire import stage_calls
from millstream.wire.messages import PublishRequest

if TYPE_CHECKING:
    from millstream.broker.access.quotas import Quotas
    from millstream.broker.broker import Session
    from millstream.broker.traffic.flow import Flow

__all__ = ["Stages"]

_log = structlog.get_logger("millstream.stages")

_DIRECTORY: Final = "stages"
_BATCH_MAX: Final = 2**63 - 1
#: A query that stages nothing for so long needs no files.
_QUIET_MS: Final = 60_000
#: How long a job without a name may take to publish once more what it had no answer to.
_AGAIN_MS: Final = 600_000
#: How long the broker waits for publications before it stops; the next start goes on with them.
_STOP_S: Final = 5.0
_LIST_MAX: Final = 1_000
_LISTED: Final = "`millstream pipeline stages` lists them"
_SEQUENCE: Final = 0xFFFF_FFFF


class _Host(Protocol):
    settings: Settings
    metrics: Metrics
    topics: Topics
    quotas: Quotas
    flow: Flow
    patience: PatientClock

    def check_publish(self, session: Session, topic: str, /) -> None: ...


class Stages:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(
        self, host: _Host, log: StateLog, opener: PartitionOpener, *, clock: Clock, draw: Callable[[], int]
    ) -> None:
        """`draw` gives 64 bits by chance."""
        self._host = host
        self._log = log
        self._opener = opener
        self._clock = clock
        self._draw = draw
        self._queries: dict[str, Query] = {}
        #: Where each stage is; a stage belongs to a namespace as its query does.
        self._of_stage: dict[str, Query] = {}
        #: In all stages; counted anew whenever some are gone.
        self.bytes = 0
        self._number = 0
        self._opening = asyncio.Lock()
        self._publishing: set[asyncio.Task[Any]] = set()
        #: Queries of namespaces whose deletion a crash has cut short.
        self._stale: list[str] = []
        self._stopping = False

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            stage_calls.OpenStage: self._open,
            stage_calls.PublishStages: self._publish,
            stage_calls.AbortStages: self._abort,
            stage_calls.ListStages: self._list,
        }

    # --- life ----------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Find everything that an earlier process has left."""
        stored = set(self._opener.storage.names(_DIRECTORY))
        for content in self._log.replay().values():
            document = msgspec.convert(content, QueryDocument)
            if document.namespace not in self._host.topics.registry.namespaces:
                self._stale.append(document.key)
                continue
            query = self._add(document)
            number = str(query.document.number)
            if number in stored:
                stored.discard(number)
                self._load(query)
        for number in stored:  # of queries that are forgotten
            try:
                self._opener.storage.remove_tree(f"{_DIRECTORY}/{number}")
            except OSError as error:  # the next start finds it and tries again
                _log.warning("the files of stages could not be removed", directory=number, reason=str(error))
        self._recount()

    def _load(self, query: Query) -> None:
        """Find the stages of a query.  If that fails it waits, and what it has published is not taken for lost."""
        try:
            query.load()
        except (OSError, MillstreamError) as error:
            if not query.unread:
                _log.error("stages cannot be read", query=query.document.query, reason=str(error))
            query.unread = error
        else:
            query.unread = None
            self._of_stage |= dict.fromkeys(query.stages, query)

    def _load_again(self, query: Query) -> None:
        """Once more, for a query that waits.  Raises StorageFailed when it still has to."""
        self._load(query)
        if query.unread:
            kind = NewerData if isinstance(query.unread, NewerData) else StorageFailed
            raise kind(f"the stages of query {query.document.query!r} cannot be read: {query.unread}")
        self._recount()
        if query.document.publishing is not None:
            self._own(self._finish_in_turn(query))

    async def forget_stale(self) -> None:
        """What queries of a namespace that is gone have published must not be taken for that of the next one."""
        if self._stale:
            await self._log.record(dict.fromkeys(self._stale), now_us=self._clock.now_us())
            self._stale = []

    def resume(self) -> None:
        """Finish what a crash has interrupted."""
        for query in self._queries.values():
            if query.document.publishing is not None and not query.unread:
                _log.info("a publication goes on", query=query.document.query, batch=query.document.publishing.batch)
                self._own(self._finish_in_turn(query))

    async def stop(self) -> None:
        self._stopping = True
        if self._publishing:
            _, late = await asyncio.wait(self._publishing, timeout=_STOP_S)
            for task in late:  # it waits for a target that does not answer; what is recorded will happen
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    @property
    def logs(self) -> Iterator[Partition]:
        """The logs of queries that are open."""
        return (query.open_log for query in self._queries.values() if query.open_log is not None)

    def bytes_in(self, namespace: str) -> int:
        """What a namespace has staged and not begun to publish: from then on it is where its topics are."""
        return sum(
            query.staged_bytes
            for query in self._queries.values()
            if query.stages and query.document.namespace == namespace and query.document.publishing is None
        )

    @property
    def count(self) -> int:
        return len(self._of_stage)

    @property
    def query_count(self) -> int:
        return len(self._queries)

    def _add(self, document: QueryDocument) -> Query:
        def open_log() -> Partition:
            size = self._opener.settings.storage.segment_bytes
            return self._opener.open(f"{_DIRECTORY}/{document.number}", 0, segment_bytes=size, counted=False)

        query = self._queries[document.key] = Query(document, open_log)
        self._number = max(self._number, document.number)
        return query

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._opener.loop.create_task(work)
        self._publishing.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._publishing.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not isinstance(problem, MillstreamError):  # those are told to whoever asked
            _log.error("a batch could not be published", exc_info=problem)

    # --- staging -------------------------------------------------------------------------------------------------

    async def _open(self, session: Session, call: stage_calls.OpenStage) -> stage_calls.StageOpened:
        check_group(call.query, "query")
        for name in ("batch", "task", "attempt"):
            if not 0 <= getattr(call, name) <= _BATCH_MAX:
                raise InvalidArgument(f"{name} must be 0 or more, not {getattr(call, name)}")
        while True:
            query = await self._ensure(session.namespace, call.query)
            async with query.files:
                if self._queries.get(query.document.key) is query:  # it may just have been forgotten
                    return self._open_in(query, call)

    def _open_in(self, query: Query, call: stage_calls.OpenStage) -> stage_calls.StageOpened:
        if call.batch <= query.document.published:
            return stage_calls.StageOpened(stage="", already=True)
        limit = self._host.settings.stages.stages_max
        if len(self._of_stage) >= limit:
            raise QuotaExceeded(f"the broker has {limit} stages, as many as stages.stages_max allows; {_LISTED}")
        stage_id = self._new_id(query)
        stage = Stage(stage_id, call.batch, call.task, call.attempt, self._now_ms())
        query.open(stage, now_us=self._clock.now_us())
        self._of_stage[stage_id] = query
        self._host.metrics.stages_opened += 1
        return stage_calls.StageOpened(stage=stage_id)

    def _new_id(self, query: Query) -> str:
        """By chance, so that nobody guesses the stage of another; but never that of a stage that there is."""
        while (stage_id := f"{query.document.number}-{self._draw():016x}") in self._of_stage:
            pass
        return stage_id

    async def _ensure(self, namespace: str, name: str) -> Query:
        """The query of that name, made now if it is new."""
        document = QueryDocument(number=0, namespace=namespace, query=name, used_ms=self._now_ms())
        query = self._queries.get(document.key)
        if query is not None:
            if query.unread:
                self._load_again(query)
            return query
        async with self._opening:
            query = self._queries.get(document.key)
            if query is None:
                self._host.topics.registry.topics(namespace)  # or say that there is no such namespace
                await self._make_room()
                self._number += 1
                document.number = self._number
                await self._record(document)
                query = self._add(document)
        return query

    def put(self, session: Session, request: PublishRequest, reply: PublishReply | None) -> None:
        """Take a PUBLISH whose topic is the address of a stage.  Raises MillstreamError when it is refused."""
        address, number, _, _, batch = request
        stage_id, _, name = address.removeprefix(STAGE_PREFIX).partition(".")
        query = self._of_stage.get(stage_id)
        if query is None or query.document.namespace != session.namespace:
            raise StageLost(f"there is no stage {stage_id!r}, or not any more")
        self._host.check_publish(session, name)
        topic = self._host.topics.registry.get(session.namespace, name)
        partition = self._host.topics.partition_of(topic, number)
        header, due_us = partition.check(batch, topic.config.max_message_bytes)
        if due_us is not None and partition.admit is not None:
            partition.admit(due_us)
        stage = query.stages[stage_id]
        if stage.failure is not None:
            raise stage.failure
        self._host.quotas.publish(session.namespace, batch)
        limit = self._host.settings.stages.bytes_max
        if self.bytes + len(batch) > limit:
            raise QuotaExceeded(f"stages hold {self.bytes} bytes, and stages.bytes_max is {limit}; {_LISTED}")
        if not query.put(stage, (name, number), header, batch, reply, now_us=self._clock.now_us()):
            return
        self.bytes += len(batch)
        metrics = self._host.metrics
        metrics.staged_messages += header.count
        metrics.staged_bytes += len(batch)

    # --- publishing ----------------------------------------------------------------------------------------------

    async def _publish(self, session: Session, call: stage_calls.PublishStages) -> stage_calls.Published:
        check_group(call.query, "query")
        if not 0 <= call.batch <= _BATCH_MAX:
            raise InvalidArgument(f"batch must be 0 or more, not {call.batch}")
        named = [part.stage for part in call.stages]
        if len(set(named)) != len(named):
            raise InvalidArgument("a stage is named twice")
        query = await self._ensure(session.namespace, call.query)
        # Whoever asked may go away meanwhile; what was begun is finished all the same.
        answer: stage_calls.Published = await asyncio.shield(self._own(self._publish_in_turn(session, query, call)))
        return answer

    async def _publish_in_turn(
        self, session: Session, query: Query, call: stage_calls.PublishStages
    ) -> stage_calls.Published:
        async with query.turn:
            _check_query(session, query)
            if query.document.publishing is not None:
                await self._finish(query)
            already = call.batch <= query.document.published
            if already:
                self._host.metrics.stages_repeated += 1
            else:
                stages = list(query.chosen(call.batch, call.stages))
                self._check_targets(session, stages)
                await self._decide(query, call.batch, stages)
                await self._finish(query)
            document = query.document
            last = call.batch == document.published
            return stage_calls.Published(
                query=call.query,
                batch=call.batch,
                published=True,
                already=already,
                messages=document.messages if last else 0,
                offsets=document.offsets if last else [],
                lost=document.lost if last else 0,
            )

    def _check_targets(self, session: Session, stages: list[Stage]) -> None:
        """Raises when the messages of these stages cannot be published, or not by this client."""
        if self._stopping:
            raise ShuttingDown("the broker is shutting down")
        registry = self._host.topics.registry
        #: By topic, and whether they are to come later; with one of the partitions.
        sums: dict[tuple[str, bool], tuple[int, int]] = {}
        for (name, number), messages in messages_by_target(stages).items():
            self._host.check_publish(session, name)
            self._host.topics.partition_of(registry.get(session.namespace, name), number)
            kind = name, number >= SCHEDULES
            sums[kind] = number, sums.get(kind, (0, 0))[1] + messages
        # The limits are those of topics, and nothing of the batch is there yet to be counted.
        for (name, later), (number, messages) in sums.items():
            topic = registry.get(session.namespace, name)
            partition = self._host.topics.partition_of(topic, number)
            if partition.admit is not None:
                partition.admit([0] * messages)  # when they are due was asked one by one, how many they are was not
            if topic.config.max_depth and not later:
                self._host.flow.check_depth(topic, number, messages)

    async def _decide(self, query: Query, batch: int, stages: list[Stage]) -> None:
        """From here on the batch is published, whatever happens."""
        before = query.document
        producer = before.producer or await self._host.topics.new_producer_id()
        publication = Publication(batch=batch, stages=[stage.id for stage in stages])
        document = msgspec.structs.replace(before, publishing=publication, producer=producer, used_ms=self._now_ms())
        query.in_doubt = True
        await self._record(document)
        query.in_doubt = False
        query.document = document

    async def _finish_in_turn(self, query: Query) -> None:
        async with query.turn:
            if query.document.publishing is not None:
                await self._finish(query)

    async def _finish(self, query: Query) -> None:
        """Move what is to be published, and write down that it is."""
        document = query.document
        publication = document.publishing
        assert publication is not None
        stages = [query.stages[stage_id] for stage_id in publication.stages if stage_id in query.stages]
        if len(stages) < len(publication.stages):  # only a disk that lost what it had confirmed can do that
            missing = len(publication.stages) - len(stages)
            _log.error("stages are lost", query=document.query, batch=publication.batch, stages=missing)
        moved = await move_all(query, stages, lambda target: self._host.topics.partition(*target))
        sent = messages_by_target(stages)
        sequences = dict(document.sequences)
        for place, messages in sent.items():
            key = target_key(*place)
            sequences[key] = (sequences.get(key, 0) + messages) & _SEQUENCE
        messages = sum(offsets.messages for offsets in moved)
        lost = sum(sent.values()) - messages
        now_ms = self._now_ms()
        done = msgspec.structs.replace(
            document,
            published=publication.batch,
            published_ms=now_ms,
            used_ms=now_ms,
            messages=messages,
            lost=lost,
            offsets=moved,
            publishing=None,
            # Where something is missing, what comes next would be out of sequence: it goes with another identity.
            producer=0 if lost else document.producer,
            sequences={} if lost else sequences,
        )
        await self._record(done)
        query.document = done
        for stage in list(query.stages.values()):
            if stage.batch <= done.published:
                del self._of_stage[stage.id]
        query.published()
        self._recount()
        self._host.metrics.stage_batches_published += 1
        self._host.metrics.stage_messages_published += messages

    async def _abort(self, session: Session, call: stage_calls.AbortStages) -> stage_calls.StagesAborted:
        query = self._queries.get(f"query/{session.namespace}/{call.query}")
        if query is None:
            return stage_calls.StagesAborted(aborted=0)
        if query.unread:
            self._load_again(query)
        async with query.turn:
            _check_query(session, query)
            if query.in_doubt:
                raise StorageFailed("whether the batch is published is not known before the broker has restarted")
            going = query.document.publishing
            if call.batch <= query.document.published or (going is not None and going.batch == call.batch):
                return stage_calls.StagesAborted(aborted=0, published=True)
            dropped = [
                stage
                for stage in query.stages.values()
                if stage.batch == call.batch and (call.stages is None or stage.id in call.stages)
            ]
            self._drop(query, dropped)
            self._host.metrics.stages_aborted += len(dropped)
            return stage_calls.StagesAborted(aborted=len(dropped))

    def _drop(self, query: Query, stages: list[Stage]) -> None:
        query.drop(stages, now_us=self._clock.now_us())
        for stage in stages:
            del self._of_stage[stage.id]
            stage.fail(StageLost(f"stage {stage.id!r} is gone: it was aborted, or nothing came for too long"))
        self._recount()

    def _recount(self) -> None:
        self.bytes = sum(query.staged_bytes for query in self._queries.values() if query.stages)

    async def _list(self, session: Session, call: stage_calls.ListStages) -> list[stage_calls.QueryInfo]:
        if not 1 <= call.limit <= _LIST_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIST_MAX}, not {call.limit}")
        ttl_ms = self._host.settings.stages.ttl_ms
        found = [
            query
            for query in self._queries.values()
            if query.document.namespace == session.namespace and call.query in ("", query.document.query)
        ]
        found.sort(key=lambda query: (not query.stages, -query.document.published_ms, query.document.query))
        return [query.info(ttl_ms) for query in found[: call.limit]]

    # --- forgetting ----------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Forget stages that nobody comes back for, files that nobody needs, and queries that are long gone."""
        for query in list(self._queries.values()):
            if query.turn.locked() or query.in_doubt or (query.document.publishing is not None and not query.unread):
                continue
            try:
                if query.unread:
                    self._load_again(query)
                    continue
                await self._tidy(query, self._host.patience.now_us() // 1000)
            except MillstreamError as error:  # its disk has failed; that of others has not
                _log.error("a query could not be tidied up", query=query.document.query, reason=str(error))

    async def _tidy(self, query: Query, now_ms: int) -> None:
        settings = self._host.settings.stages
        late = [stage for stage in query.stages.values() if stage.touched_ms + settings.ttl_ms <= now_ms]
        if late:
            _log.warning("stages expired", query=query.document.query, stages=len(late))
            self._drop(query, late)
            self._host.metrics.stages_expired += len(late)
        if query.document.used_ms + settings.query_ttl_ms <= now_ms:
            await self._forget(query)
        elif query.open_log is not None and query.document.used_ms + _QUIET_MS <= now_ms:
            async with query.files:
                if query.is_idle:
                    await self._remove_files(query)

    async def forget_namespace(self, namespace: str) -> None:
        for query in [query for query in self._queries.values() if query.document.namespace == namespace]:
            async with query.turn:
                self._drop(query, list(query.stages.values()))
            await self._forget(query)

    async def _make_room(self) -> None:
        """Before a query is added to too many: forget one that is over, or the one that has been silent for longest."""
        limit = self._host.settings.stages.queries_max
        while len(self._queries) >= limit:
            idle = [query for query in self._queries.values() if query.is_idle]
            if not idle:
                raise QuotaExceeded(f"{limit} queries have stages, as many as stages.queries_max allows")
            await self._forget(min(idle, key=lambda query: (not self._is_over(query), query.document.used_ms)))
            await asyncio.sleep(0)  # it may have been taken up again meanwhile

    def _is_over(self, query: Query) -> bool:
        """Whether nobody will ask for it again, as those may who go by a name of their own."""
        return is_drawn(query.document.query) and query.document.used_ms + _AGAIN_MS <= self._now_ms()

    async def _forget(self, query: Query) -> None:
        async with query.files:
            if query.is_idle and self._queries.get(query.document.key) is query:
                await self._log.record({query.document.key: None}, now_us=self._clock.now_us())
                del self._queries[query.document.key]
                await self._remove_files(query)

    async def _remove_files(self, query: Query) -> None:
        log = query.closed()
        if log is not None:
            await log.retire(StageLost("the stage is gone"))
        directory = f"{_DIRECTORY}/{query.document.number}"
        try:
            await self._opener.loop.run_in_executor(None, self._opener.storage.remove_tree, directory)
        except OSError as error:  # the next start finds it and tries again
            _log.warning("the files of stages could not be removed", directory=directory, reason=str(error))

    async def _record(self, document: QueryDocument) -> None:
        await self._log.record({document.key: document}, now_us=self._clock.now_us())

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000


def _check_query(session: Session, query: Query) -> None:
    """Raises Forbidden unless a client may produce to all topics of a query: it decides what becomes of its batches."""
    topics = {topic_of(target) for target in query.document.sequences}
    topics |= {staged.topic for stage in query.stages.values() for staged in stage.staged}
    for topic in sorted(topics):
        session.access.require("produce", session.namespace, topic)

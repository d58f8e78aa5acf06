"""Topics at run time: creating, changing and deleting them, and opening their partitions when they are first used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import structlog

from millstream.broker.answers import describe
from millstream.broker.journal import SEGMENT_BYTES, Journal
from millstream.broker.letter_topics import remake_letter_topic
from millstream.broker.lost_ends import UncheckedEnds, forget_lost
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.registry import Registry, Topic
from millstream.broker.state import StateLog
from millstream.broker.topic_files import directory_of, remove_files
from millstream.broker.traffic.duplicates import no_window
from millstream.broker.transfer import Transfer
from millstream.errors import PartitionNotFound, PayloadTooLarge, StorageFailed, TopicNotFound
from millstream.ids import SCHEDULES, schedule_uid
from millstream.log.memory import MemoryStorage
from millstream.topics import TopicConfig
from millstream.wire import calls

__all__ = ["Topics"]

_log = structlog.get_logger("millstream.topics")

_SHORT_TAIL_BYTES: Final = 1024 * 1024
#: How often the broker says how far it is, while clients wait.
_SAY_AGAIN_US: Final = 2_000_000
_NAMES_AT_A_TIME: Final = 500
_RECOVERY_THREADS: Final = 4  # more only wait for the same disk


class Admit(Protocol):
    """Raises QuotaExceeded when a namespace may not have so many more partitions, or not another topic."""

    def __call__(self, namespace: str, partitions: int, /, *, new_topic: bool) -> None: ...


class Topics:
    """The registry with its files."""

    def __init__(
        self,
        registry: Registry,
        log: StateLog,
        opener: PartitionOpener,
        *,
        draw_uid: Callable[[], int],
        on_deleted: Callable[[Topic], Awaitable[None]],
    ) -> None:
        self.registry = registry
        self._on_deleted = on_deleted
        self._log = log
        self._opener = opener
        self._draw_uid = draw_uid
        #: Asked before a topic is made; raises when the namespace may not have another one.
        self.admit: Admit = lambda *_, **__: None
        #: Told of topics that were made or changed.
        self.on_changed: Callable[[Topic], Awaitable[None]] = _told_nobody
        #: Told of every partition that is opened.
        self.on_opened: Callable[[Topic, int, Partition], None] = lambda *_: None
        #: Called when the log of what is scheduled for a partition was opened.
        self.on_schedule_log: Callable[[Topic, int, Partition], None] = lambda *_: None
        self.unchecked = UncheckedEnds(registry)
        self._ephemeral = MemoryStorage()
        registry.begin_anew(draw_uid)
        self._changing = asyncio.Lock()
        self._producer_ids: list[int] = []
        self._numbering = asyncio.Lock()

    # --- partitions ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of this run of the broker; see node.py."""
        return self._opener.epoch

    def partition(self, namespace: str, name: str, number: int) -> Partition:
        """The running partition, opened now if need be."""
        return self.partition_of(self.registry.find(namespace, name) or self.registry.get(namespace, name), number)

    def partition_of(self, topic: Topic, number: int) -> Partition:
        """The running partition; with SCHEDULES added to its number, the log of what is scheduled for it."""
        if not 0 <= number < len(topic.partitions):
            if number & SCHEDULES:
                return self._schedule_log(topic, number ^ SCHEDULES)
            last = len(topic.partitions) - 1
            raise PartitionNotFound(f"topic {topic.name!r} has partitions 0 to {last}, not {number}")
        partition: Partition | None = topic.partitions[number]
        return partition if partition is not None else self._open(topic, number)

    # --- what stands beside a partition --------------------------------------------------------------------------

    def journal(self, topic: Topic, number: int) -> Journal:
        """What the broker remembers about a partition, opened now if need be."""
        name = f"{number}.state"
        journal: Journal | None = topic.beside.get(name)
        if journal is None:
            journal = topic.beside[name] = Journal(
                self._open_beside(topic, name, 0, segment_bytes=SEGMENT_BYTES),
                clock=self._opener.clock,
                loop=self._opener.loop,
                flush_s=self._opener.settings.storage.ack_flush_interval_ms / 1000,
            )
        return journal

    def transfer(self, topic: Topic, number: int) -> Transfer:
        """What moves messages from a partition to others."""
        name = f"{number}.transfer"
        transfer: Transfer | None = topic.beside.get(name)
        if transfer is None:
            transfer = topic.beside[name] = Transfer(
                self.journal(topic, number),
                resolve=lambda target: self.partition(*target),
                exists=lambda target: self.registry.find(target.namespace, target.topic) is not None,
                new_producer=self.new_producer_id,
                remake=partial(remake_letter_topic, self, topic),
            )
        return transfer

    def _schedule_log(self, topic: Topic, number: int) -> Partition:
        if not 0 <= number < len(topic.partitions):
            raise PartitionNotFound(f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}")
        name = f"{number}.schedules"
        partition: Partition | None = topic.beside.get(name)
        if partition is None:
            uid = schedule_uid(topic.partition_uids[number])
            size = topic.config.segment_bytes
            partition = topic.beside[name] = self._open_beside(topic, name, uid, segment_bytes=size, schedules=True)
            try:
                self.on_schedule_log(topic, number, partition)
            except BaseException:
                # Nobody would deliver what it takes in; the next one who asks tries again.
                del topic.beside[name]
                partition.log.close()
                raise
        return partition

    def _open_beside(
        self, topic: Topic, name: str, uid: int, *, segment_bytes: int, schedules: bool = False
    ) -> Partition:
        _check_stays(topic)
        return self._opener.open(
            f"{directory_of(topic)}/{name}",
            uid,
            segment_bytes=segment_bytes,
            ephemeral=self._ephemeral if topic.config.mode == "ephemeral" else None,
            counted=schedules,
            schedules=schedules,
        )

    def stored_beside(self, suffix: str) -> Iterator[tuple[Topic, int]]:
        """Partitions that have something on disk beside them: `state` or `schedules`."""
        for topic in list(self.registry.all_topics()):
            if not topic.deleting and topic.config.mode != "ephemeral":
                for name in self._opener.storage.names(directory_of(topic)):
                    number, _, kind = name.partition(".")
                    # What somebody else has put there is none of the broker's.
                    if kind == suffix and number.isdecimal() and int(number) < len(topic.partitions):
                        yield topic, int(number)

    @property
    def moves_undone(self) -> int:
        transfers = (beside for topic in self.registry.all_topics() for beside in topic.beside.values())
        return sum(transfer.undone for transfer in transfers if isinstance(transfer, Transfer))

    def open_logs(self) -> Iterator[Partition]:
        """Every log of every topic that is open: the partitions, and what stands beside them."""
        for topic in self.registry.all_topics():
            yield from filter(None, topic.partitions)
            for beside in topic.beside.values():
                if isinstance(beside, Journal):
                    yield beside.partition
                elif isinstance(beside, Partition):
                    yield beside

    def journals(self) -> list[Journal]:
        """Those that are open."""
        besides = (beside for topic in self.registry.all_topics() for beside in topic.beside.values())
        return [beside for beside in besides if isinstance(beside, Journal)]

    def flush_journals(self) -> None:
        for journal in self.journals():
            journal.flush()

    def is_untouched(self, topic: Topic, number: int) -> bool:
        """Whether a partition was never used: nothing is stored and nothing is open."""
        return topic.partitions[number] is None and not self._stored(topic, f"{number}")

    def _stored(self, topic: Topic, name: str) -> list[str]:
        """The files in a directory of a topic.  Raises StorageFailed when it cannot be read now."""
        storage = self._ephemeral if topic.config.mode == "ephemeral" else self._opener.storage
        directory = f"{directory_of(topic)}/{name}"
        try:
            return storage.names(directory)
        except OSError as problem:
            raise StorageFailed(f"cannot read the directory {directory}: {problem.strerror or problem}") from problem

    def stored_bytes(self, topic: Topic) -> int:
        """What the messages of a topic, and those scheduled for it, take on disk or in memory."""
        total = 0
        storage = self._ephemeral if topic.config.mode == "ephemeral" else self._opener.storage
        for number, partition in enumerate(topic.partitions):
            schedules = f"{number}.schedules"
            for name, running in ((f"{number}", partition), (schedules, topic.beside.get(schedules))):
                if running is not None:
                    total += running.log.size_bytes
                else:
                    directory = f"{directory_of(topic)}/{name}"
                    files = [file for file in storage.names(directory) if file.endswith(".log")]
                    total += sum(storage.size(f"{directory}/{file}") for file in files)
        return total

    def idle_partitions(self) -> Iterator[tuple[Topic, int]]:
        """Partitions that nobody has used since the broker started; many of them may have no files at all."""
        for topic in list(self.registry.all_topics()):
            if topic.config.mode != "ephemeral":
                for number in range(len(topic.partitions)):
                    if not topic.deleting and topic.partitions[number] is None:
                        yield topic, number

    def close_idle(self, topic: Topic, number: int) -> None:
        """Put a partition away that was opened only to look after it."""
        partition: Partition | None = topic.partitions[number]
        if partition is not None and partition.is_idle and partition.is_synced:
            topic.partitions[number] = None  # also if no note can be left: whoever comes next opens it anew
            partition.log.close()

    def open_partitions(self) -> Iterator[tuple[Topic, Partition]]:
        for topic in self.registry.all_topics():
            for partition in topic.partitions:
                if partition is not None:
                    yield topic, partition

    def recover(self) -> None:
        """After a crash, before the first client is let in: repair what would take long to repair.

        A partition with a short tail is repaired when it is first used, in less time than it takes to notice, so that
        ten thousand of them do not make everybody wait.
        """
        started_us = said_us = self._now_us()
        storage = self._opener.storage
        long_tails: list[tuple[str, int]] = []
        for topic in self.registry.all_topics():
            if topic.deleting or topic.config.mode == "ephemeral":
                continue
            for number in filter(str.isdecimal, storage.names(directory_of(topic))):
                directory = f"{directory_of(topic)}/{number}"
                segments = [name for name in storage.names(directory) if name.endswith(".log")]
                # With more than one segment the last but one may be unsealed, if the crash came just after a roll.
                if len(segments) > 1 or any(storage.size(f"{directory}/{n}") > _SHORT_TAIL_BYTES for n in segments):
                    long_tails.append((directory, topic.config.segment_bytes))
        with ThreadPoolExecutor(_RECOVERY_THREADS) as pool:
            for done, _ in enumerate(pool.map(lambda tail: self._opener.repair(*tail), long_tails), 1):
                if self._now_us() - said_us > _SAY_AGAIN_US:
                    said_us = self._now_us()
                    _log.info("recovering", partitions=done)
        if long_tails:
            took_ms = (self._now_us() - started_us) // 1000
            _log.info("recovered after an unclean stop", partitions=len(long_tails), took_ms=took_ms)

    def _open(self, topic: Topic, number: int) -> Partition:
        _check_stays(topic)
        partition = self._opener.open(
            f"{directory_of(topic)}/{number}",
            topic.partition_uids[number],
            segment_bytes=topic.config.segment_bytes,
            ephemeral=self._ephemeral if topic.config.mode == "ephemeral" else None,
        )
        try:
            self.unchecked.check(topic, number, partition.log.next_offset)
            if partition.is_durable and self._stored(topic, f"{number}.state"):
                forget_lost(self.journal(topic, number), partition.log.next_offset)
        except BaseException:
            # What it takes in now could be taken for what was lost; the next one who asks tries again.
            partition.log.close()
            raise
        partition.shows_unsynced = self._shows_unsynced(topic)
        topic.partitions[number] = partition
        self.on_opened(topic, number, partition)
        return partition

    # --- changes -------------------------------------------------------------------------------------------------

    async def create(
        self, namespace: str, call: calls.CreateTopic, *, own: bool = False, in_new: bool = False
    ) -> calls.TopicInfo:
        """`own`: the broker needs it itself, for dead letters above all; that is not refused.

        `in_new`: its namespace is made with it if there is none, both or neither.
        """
        async with self._changing:
            existing = self.registry.find(namespace, call.name)
            if existing is not None and call.if_missing:
                return self.info(existing)
            config = TopicConfig.from_mapping(call.config, self.default_config)
            if not own:
                self.admit(namespace, call.partitions, new_topic=True)
            facts = self.registry.decide_create_topic(
                namespace,
                call.name,
                partitions=call.partitions,
                config=config,
                now_ms=self._now_us() // 1000,
                draw_uid=self._draw_uid,
                in_new=in_new,
            )
            made = range(call.partitions if config.mode != "ephemeral" else 0)
            await self._record(facts, self._make_directories(f"topics/{namespace}/{call.name}", made))
        _log.info("topic created", namespace=namespace, topic=call.name, partitions=call.partitions)
        topic = self.registry.get(namespace, call.name)
        await self.on_changed(topic)
        return self.info(topic)

    async def _make_directories(self, directory: str, numbers: range) -> None:
        """Spare the loop the syncs that a new directory takes, for each partition when it is first used."""
        paths = [f"{directory}/{number}" for number in numbers]
        if not paths:
            return
        # What could not be made now is made, or refused with the reason, when the partition is opened.
        with suppress(OSError):
            await self._opener.loop.run_in_executor(None, partial(self._opener.storage.make_directory, *paths))

    async def metadata(self, namespace: str, call: calls.Metadata) -> list[calls.TopicMetadata]:
        """What clients need to publish; makes missing topics when asked to and allowed to."""
        answer: list[calls.TopicMetadata] = []
        settings = self._opener.settings.topics
        for looks, name in enumerate(call.topics):
            if looks % _NAMES_AT_A_TIME == _NAMES_AT_A_TIME - 1:
                await asyncio.sleep(0)
            topic = self.registry.find(namespace, name)
            if topic is None and call.create and settings.auto_create:
                self._check_first(name, call)
                made = calls.CreateTopic(name=name, partitions=settings.default_partitions, if_missing=True)
                await self.create(namespace, made, in_new=True)
            topic = self.registry.get(namespace, name)
            limit, uids = topic.config.max_message_bytes, topic.partition_uids
            answer.append(calls.TopicMetadata(name=name, partition_uids=uids, max_message_bytes=limit))
        return answer

    def _check_first(self, name: str, call: calls.Metadata) -> None:
        """Raises MillstreamError when the messages for which a topic would be made were refused by it."""
        partitions, limit = self._opener.settings.topics.default_partitions, self.default_config.max_message_bytes
        if call.dedup_id and not self.default_config.dedup_window_ms:
            raise no_window(name)
        if call.message_bytes > limit:
            raise PayloadTooLarge(f"a message has {call.message_bytes} bytes, topic {name!r} would allow {limit}")
        if not 0 <= call.partition < partitions:
            raise PartitionNotFound(f"topic {name!r} would have partitions 0 to {partitions - 1}, not {call.partition}")

    async def alter(self, namespace: str, call: calls.AlterTopic) -> calls.TopicInfo:
        async with self._changing:
            topic = self.registry.get(namespace, call.name)
            facts = self.registry.decide_alter_topic(
                topic, call.config, partitions=call.partitions, draw_uid=self._draw_uid
            )
            if call.partitions is not None and call.partitions > len(topic.partitions):
                self.admit(namespace, call.partitions - len(topic.partitions), new_topic=False)
            wanted = call.partitions if call.partitions and topic.config.mode != "ephemeral" else 0
            made = range(len(topic.partitions), wanted)
            await self._record(facts, self._make_directories(directory_of(topic), made))
        for partition in topic.partitions:
            if partition is not None:
                partition.shows_unsynced = self._shows_unsynced(topic)
        await self.on_changed(topic)
        return self.info(topic)

    def _shows_unsynced(self, topic: Topic) -> bool:
        return (topic.config.visible or self._opener.settings.storage.visible) == "written"

    async def delete(self, namespace: str, name: str) -> None:
        """Remove a topic with its messages and what groups have read of it.

        A deletion cut short, by a crash or a disk that refuses, is finished at the next start or by deleting again.
        """
        async with self._changing:
            topic = self.registry.topics(namespace).get(name) or self.registry.get(namespace, name)
            if not topic.deleting:
                try:
                    await self._record({topic.key: {**topic.document(), "deleting": True}})
                except StorageFailed:
                    # Where a sync has failed it may be on disk: what the next start removes must not be confirmed now.
                    topic.deleting = self._log.partition.failed is not None
                    raise
            await self._finish_deletion(topic)
        _log.info("topic deleted", namespace=namespace, topic=name)

    async def finish_deletions(self) -> None:
        for topic in [topic for topic in self.registry.all_topics() if topic.deleting]:
            try:
                await self._finish_deletion(topic)
            except StorageFailed as error:
                _log.error("a deleted topic could not be removed", topic=topic.name, reason=str(error))

    async def _finish_deletion(self, topic: Topic) -> None:
        gone = TopicNotFound(f"topic {topic.name!r} was deleted")
        for number, partition in enumerate(topic.partitions):
            if partition is not None:
                await partition.retire(gone)
                topic.partitions[number] = None
        besides, topic.beside = list(topic.beside.values()), {}
        for beside in besides:
            if isinstance(beside, Journal):
                await beside.partition.retire(gone)
            elif isinstance(beside, Partition):
                await beside.retire(gone)
        # Before the topic is forgotten: a new one of its name must not be read from the middle.
        await self._on_deleted(topic)
        try:
            if topic.config.mode == "ephemeral":
                self._ephemeral.remove_tree(directory_of(topic))
            else:
                await self._opener.loop.run_in_executor(None, remove_files, self._opener.storage, topic)
        except OSError as error:
            raise StorageFailed(f"topic {topic.name!r} cannot be removed: {error}; delete it again") from None
        await self._record({topic.key: None})

    async def create_namespace(self, name: str, *, if_missing: bool = False) -> None:
        async with self._changing:
            if not if_missing or name not in self.registry.namespaces:
                await self._record(self.registry.decide_create_namespace(name, now_ms=self._now_us() // 1000))

    async def delete_namespace(self, name: str, *, force: bool, forget: Callable[[], Awaitable[None]]) -> None:
        """With its topics, also those whose deletion was cut short: the next of their names would find their files."""
        self.registry.decide_delete_namespace(name, force=force)  # or say why not
        if force:
            await forget()  # first of all, so that nothing is left to the next of its name, not even after a crash
        while True:
            for topic in list(self.registry.topics(name)):
                with suppress(TopicNotFound):  # somebody else has deleted it meanwhile
                    await self.delete(name, topic)
            async with self._changing:
                facts = self.registry.decide_delete_namespace(name, force=force)
                if not self.registry.topics(name):  # nobody has made another one meanwhile
                    if not force:
                        await forget()  # what else it has; not before it is certain that it goes
                    await self._record(facts)
                    await forget()  # those who have come back meanwhile; before there can be another of its name
                    return

    async def new_producer_id(self) -> int:
        """A producer id that nobody has had."""
        async with self._numbering:
            if not self._producer_ids:
                first = self.registry.producer_ids_until
                await self._record(self.registry.decide_producer_block())
                self._producer_ids = list(range(self.registry.producer_ids_until - 1, first - 1, -1))
            return self._producer_ids.pop()

    async def _record(self, facts: Mapping[str, Any], beside: Awaitable[None] | None = None) -> None:
        """Record facts, then let them hold; `beside` is done at the same time, so that both share the disk's time."""
        recorded = self._log.record(facts, now_us=self._now_us())
        await (recorded if beside is None else asyncio.gather(recorded, beside))
        self.registry.replay(facts)

    @property
    def default_config(self) -> TopicConfig:
        """What a topic is like that is made without being described."""
        settings = self._opener.settings
        return TopicConfig(
            retention_ms=settings.topics.retention_ms,
            max_message_bytes=settings.topics.max_message_bytes,
            segment_bytes=settings.storage.segment_bytes,
        )

    # --- looking -------------------------------------------------------------------------------------------------

    def info(self, topic: Topic, partitions: list[calls.PartitionInfo] | None = None) -> calls.TopicInfo:
        config = {name: getattr(topic.config, name) for name in topic.config.__struct_fields__}
        for name in ("fsync", "visible"):  # which the broker's own settings fill in
            config[name] = config[name] or getattr(self._opener.settings.storage, name)
        return calls.TopicInfo(
            name=topic.name,
            partition_count=len(topic.partition_uids),
            created_ms=topic.created_ms,
            config=msgspec.to_builtins(config),
            partitions=partitions or [],
        )

    async def describe(self, namespace: str, name: str) -> calls.TopicInfo:
        topic = self.registry.get(namespace, name)
        partitions = []
        for number in range(len(topic.partition_uids)):
            if self.is_untouched(topic, number):
                partitions.append(describe(number))
                continue
            await asyncio.sleep(0)  # opening takes a moment; others go first
            try:
                partitions.append(describe(number, self.partition(namespace, name, number)))
            except StorageFailed as error:  # the others can be looked at
                partitions.append(describe(number, failed=str(error)))
        return self.info(topic, partitions)

    def _now_us(self) -> int:
        return self._opener.clock.now_us()


def _check_stays(topic: Topic) -> None:
    """Whoever had to wait on the way here may hold a topic that is gone: a new one may have its name and directory."""
    if topic.deleting:
        raise TopicNotFound(f"topic {topic.name!r} was deleted")


async def _told_nobody(_: Topic) -> None:
    """For a broker that has no queues, or not yet."""

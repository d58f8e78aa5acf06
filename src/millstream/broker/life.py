"""The life of a broker: what it is made of, what goes on by itself while it runs, and how it comes to rest.

`Broker` is what doors call; nothing here is called by them.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.broker.access.audit import Audit
from millstream.broker.access.control import AccessControl
from millstream.broker.access.quotas import MEASURE_S, Quotas
from millstream.broker.background import every
from millstream.broker.cleanup import Cleanup
from millstream.broker.committer import Committer, Rounds
from millstream.broker.cut_moves import CutMoves
from millstream.broker.group_topics import GroupTopics
from millstream.broker.groups import Groups
from millstream.broker.health import Health
from millstream.broker.holds import Holds
from millstream.broker.journal import SEGMENT_BYTES
from millstream.broker.letters.letters import Letters
from millstream.broker.letters.replays import Replays
from millstream.broker.messages.messages import Messages
from millstream.broker.mqtt.mqtt import Mqtt
from millstream.broker.node import (
    TOPICS_STATE,
    check_data,
    close_all,
    load_node_id,
    next_epoch,
    note_epoch,
    take_clean_marker,
)
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.patience import WATCH_S as PATIENCE_S
from millstream.broker.pipelines import Pipelines
from millstream.broker.queues.queues import Queues
from millstream.broker.registry import Registry, Topic
from millstream.broker.rounds import open_rounds
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.sessions import Session
from millstream.broker.stages.stages import Stages
from millstream.broker.state import StateLog
from millstream.broker.stats.stats import SAMPLE_S as STATS_S
from millstream.broker.stats.stats import Stats
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.traces.spans import Spans, open_provider
from millstream.broker.traces.store import TraceStore
from millstream.broker.traffic.flow import SAMPLE_S, Flow
from millstream.broker.traffic.inboxes import Inboxes
from millstream.broker.traffic.modes import WATCH_S, ModeKeeper, resident_bytes
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.broker.webhooks.sender import Sender
from millstream.broker.webhooks.webhooks import Webhooks
from millstream.clock import Clock
from millstream.errors import ShuttingDown
from millstream.log.cache import FileCache, TailCache
from millstream.log.format import raise_format
from millstream.log.storage import Storage

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

__all__ = ["Life"]

_log = structlog.get_logger("millstream.broker")

_EXPIRE_INTERVAL_S: Final = 0.25
_SWEEP_INTERVAL_S: Final = 1.0
_CLOCK_INTERVAL_S: Final = 1.0
_ACCESS_INTERVAL_S: Final = 0.5
_NOTE_INTERVAL_S: Final = 1.0
_MQTT_INTERVAL_S: Final = 1.0
_STATE_SEGMENT_BYTES: Final = 4 * 1024 * 1024


class Life:
    """Opens the parts of one broker, begins what they do by themselves, and ends it."""

    committer: Committer
    opener: PartitionOpener
    cleanup: Cleanup
    holds: Holds

    def __init__(
        self,
        broker: Broker,
        storage: Storage,
        *,
        clock: Clock,
        rng: random.Random,
        rounds: Rounds | None,
        sessions: Callable[[], list[Session]],
        flush_later: Callable[[Partition], None],
    ) -> None:
        """`rounds` carries out syncs where there are no threads."""
        self._broker = broker
        self.storage = storage
        self._clock = clock
        self._rng = rng
        self._rounds = rounds
        self._sessions = sessions
        self._flush_later = flush_later
        self._clean = False
        self.state_logs: list[StateLog] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.stopping = asyncio.Event()

    async def open(self) -> None:
        """Recover what is stored and make all parts of the broker; nothing goes on by itself yet."""
        broker = self._broker
        check_data(self.storage)
        loop = asyncio.get_running_loop()
        raise_format(self.storage)
        self._open_storage(loop)
        self._clean = take_clean_marker(self.storage)
        broker.epoch = self.opener.epoch = next_epoch(self.storage, self._clock.now_us())
        broker.node_id = load_node_id(self.storage, lambda: self._rng.getrandbits(64))
        self._open_topics(loop)
        self._open_queues(loop)
        self._open_access()
        self._open_mqtt(loop)
        self._open_stages()
        broker.messages = Messages(broker, clock=self._clock, loop=loop)
        note_epoch(self.storage, broker.epoch)
        if not self._clean:
            broker.topics.recover()
        await broker.topics.finish_deletions()
        await broker.queues.registry.forget_stale()
        await broker.stages.forget_stale()
        await broker.groups.mend(clean=self._clean)
        await broker.mqtt.mend(clean=self._clean)
        self._open_watches(loop)
        self._cut_moves = CutMoves(broker.topics, hidden=not self._clean)

    def _open_storage(self, loop: asyncio.AbstractEventLoop) -> None:
        broker = self._broker
        settings = broker.settings.storage
        self.committer = Committer(loop, rounds=self._rounds or open_rounds(loop), on_round=broker.metrics.count_sync)
        self.opener = PartitionOpener(
            storage=self.storage,
            settings=broker.settings,
            clock=self._clock,
            loop=loop,
            committer=self.committer,
            metrics=broker.metrics,
            files=FileCache(limit=settings.open_files_max),
            tail=TailCache(bytes_max=settings.tail_cache_bytes),
            flush_later=self._flush_later,
            on_failed=self._partition_failed,
        )

    def _open_topics(self, loop: asyncio.AbstractEventLoop) -> None:
        """Topics, and those who only read them: subscriptions and stream groups."""
        broker = self._broker
        log = self._open_state(TOPICS_STATE)
        limits = broker.settings.topics
        registry = Registry(
            topics_max=limits.max_topics,
            partitions_max=limits.max_partitions,
            namespaces_max=limits.max_namespaces,
        )
        registry.replay(log.replay())
        broker.topics = Topics(
            registry,
            log,
            self.opener,
            draw_uid=lambda: self._rng.getrandbits(32),
            on_deleted=self._topic_deleted,
        )
        broker.subscriptions = Subscriptions(broker.topics, loop=loop, metrics=broker.metrics)
        broker.inboxes = Inboxes(
            broker.subscriptions, clock=self._clock, draw_name=lambda: f"{self._rng.getrandbits(128):032x}"
        )
        log = self._open_state("state/groups")
        broker.groups = Groups(
            GroupTopics(broker.topics),
            log,
            clock=self._clock,
            metrics=broker.metrics,
            draw_suffix=lambda: secrets.token_hex(4),
            groups_max=broker.settings.groups.max_groups,
        )
        broker.groups.replay(log.replay())

    def _open_queues(self, loop: asyncio.AbstractEventLoop) -> None:
        """Queues, who records what happens in them, and everything that moves messages in or out of them."""
        broker = self._broker
        settings = broker.settings.traces
        broker.recorder = Recorder(broker, TraceStore(self.opener, settings), settings, clock=self._clock, loop=loop)
        log = self._open_state("state/queues")
        broker.queues = Queues(
            broker.topics,
            log,
            clock=self._clock,
            patience=broker.patience,
            metrics=broker.metrics,
            rng=self._rng,
            loop=loop,
            flush_s=broker.settings.storage.ack_flush_interval_ms / 1000,
            recorder=broker.recorder,
        )
        broker.queues.registry.replay(log.replay())
        broker.topics.on_changed = self._topic_changed
        self._sender = Sender(loop, clock=self._clock, allow_private=broker.settings.webhooks.allow_private)
        broker.letters = Letters(broker, self._sender, clock=self._clock, loop=loop)
        broker.letters.listeners.append(broker.recorder.dead_letter)
        log = self._open_state("state/replays")
        broker.replays = Replays(broker, log, clock=self._clock, rng=self._rng)
        broker.replays.replay(log.replay())
        log = self._open_state("state/schedules")
        broker.schedules = Schedules(broker, log, clock=self._clock, loop=loop, stopping=self.stopping)
        log = self._open_state("state/webhooks")
        broker.webhooks = Webhooks(
            broker,
            log,
            self._sender,
            clock=self._clock,
            loop=loop,
            draw_id=lambda: f"wh-{self._rng.getrandbits(48):012x}",
            draw_secret=lambda: secrets.token_hex(32),
        )
        broker.webhooks.replay(log.replay())

    def _open_access(self) -> None:
        broker = self._broker
        log = self._open_state("state/access")
        documents = log.replay()
        broker.audit = Audit(broker, clock=self._clock)
        broker.access = AccessControl(broker, log, broker.audit, clock=self._clock, rng=self._rng)
        broker.access.replay(documents)
        broker.quotas = Quotas(broker, log, clock=self._clock)
        broker.quotas.replay(documents)
        broker.topics.admit = broker.quotas.admit_partitions

    def _open_mqtt(self, loop: asyncio.AbstractEventLoop) -> None:
        broker = self._broker
        retained = self._open_state("state/retained")
        journal = self.opener.open("state/mqtt", 0, segment_bytes=SEGMENT_BYTES, counted=False)
        broker.mqtt = Mqtt(broker, retained, journal, clock=self._clock, rng=self._rng, loop=loop)
        broker.mqtt.replay()

    def _open_stages(self) -> None:
        """What other systems leave with the broker: batches of queries, and how their pipelines are."""
        broker = self._broker
        draw, stages = (lambda: self._rng.getrandbits(64)), self._open_state("state/stages")
        broker.stages = Stages(broker, stages, self.opener, clock=self._clock, draw=draw)
        broker.stages.replay()
        broker.pipelines = Pipelines(
            self._open_state("state/pipelines"), broker.settings.pipelines, clock=self._clock, patience=broker.patience
        )
        broker.pipelines.replay()

    def _open_watches(self, loop: asyncio.AbstractEventLoop) -> None:
        """Who looks after the broker itself: its limits, its figures, its files and its health."""
        broker = self._broker
        broker.flow = Flow(broker.topics.registry, broker.queues, clock=self._clock, loop=loop, metrics=broker.metrics)
        broker.modes = ModeKeeper(
            broker.settings,
            free_bytes=self.storage.free_bytes,
            memory_bytes=resident_bytes,
            state_failure=self._state_failure,
            sessions=self._sessions,
            metrics=broker.metrics,
        )
        broker.stats = Stats(broker, self.opener, clock=self._clock)
        self.cleanup = Cleanup(broker, self.opener, self.state_logs, self.stopping)
        broker.health = Health(
            broker,
            self.opener,
            clock=self._clock,
            connections=lambda: len(self._sessions()),
            state_failure=lambda: self._state_failure() or self._mqtt_failure(),
            state_logs=self.state_logs,
        )

        def draw_id() -> str:
            return f"{self._rng.getrandbits(64):016x}"

        self.holds = Holds(broker, self.storage, logs=self._logs, clock=self._clock, loop=loop, draw_id=draw_id)

    def begin(self) -> None:
        """What goes on by itself from now on."""
        broker = self._broker
        loop = asyncio.get_running_loop()
        if broker.settings.traces.enabled and broker.settings.traces.otlp_endpoint:
            provider = open_provider(broker.settings.traces.otlp_endpoint, broker.node_id)
            broker.spans = Spans(provider, broker.recorder, clock=self._clock)
        sync_s = broker.settings.storage.fsync_interval_ms / 1000
        cleanup_s = broker.settings.storage.cleanup_interval_ms / 1000
        again_and_again: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (_EXPIRE_INTERVAL_S, broker.groups.expire),
            (sync_s, self._sync_interval),
            (cleanup_s, self.cleanup.run),
            (_SWEEP_INTERVAL_S, broker.queues.sweep),
            (_ACCESS_INTERVAL_S, broker.access.expire),
            (MEASURE_S, broker.quotas.measure),
            (WATCH_S, broker.modes.watch),
            (SAMPLE_S, broker.flow.sample),
            (STATS_S, broker.stats.sample),
            (cleanup_s, broker.recorder.tidy),
            (_CLOCK_INTERVAL_S, broker.schedules.watch),
            (PATIENCE_S, broker.patience.watch),
            (_NOTE_INTERVAL_S, broker.replays.note),
            (cleanup_s, broker.schedules.tidy),
            (_MQTT_INTERVAL_S, broker.mqtt.sweep),
            (cleanup_s, broker.stages.sweep),
            (cleanup_s, broker.pipelines.sweep),
        ]
        broker.modes.measure()
        stopping = loop.create_task(self.stopping.wait())
        self.tasks = [loop.create_task(every(seconds, work, stopping)) for seconds, work in again_and_again]
        self.tasks.append(stopping)
        broker.schedules.start()
        broker.stats.start()
        broker.replays.resume()
        broker.webhooks.start()
        broker.mqtt.start()
        broker.stages.resume()
        if broker.settings.traces.enabled:
            self.tasks.append(loop.create_task(broker.recorder.resume()))
        if not self._clean:
            self.tasks.append(loop.create_task(self._cut_moves.finish_before(self.stopping)))

    async def stop(self) -> None:
        """Put everything on disk and leave a note that the next start can trust it."""
        broker = self._broker
        self.stopping.set()
        await asyncio.gather(*self.tasks)
        await asyncio.gather(broker.webhooks.stop(), broker.replays.stop(), broker.letters.stop(), broker.stages.stop())
        self._sender.close()
        await broker.schedules.stop()
        await broker.stats.stop()
        await self.holds.close()
        broker.flush()
        goodbye = ShuttingDown("the broker is shutting down")
        await broker.mqtt.stop()
        await broker.queues.close(goodbye)
        await broker.recorder.stop()
        if broker.spans is not None:
            await broker.spans.close()
        broker.topics.flush_journals()
        broker.health.close()
        partitions = self._logs()
        for partition in partitions:
            partition.cancel_all(goodbye)
            if partition.is_durable and partition.failed is None:
                self.committer.request(partition)
        await self.committer.close()
        broker.stats.close()
        broker.recorder.store.close()
        settled = not (self._cut_moves.hidden or broker.topics.moves_undone or broker.topics.unchecked)
        close_all(self.storage, partitions, settled=settled)

    async def _topic_changed(self, topic: Topic) -> None:
        """Made or altered, by a client or by the broker itself."""
        broker = self._broker
        await broker.queues.registry.topic_changed(topic)
        await broker.groups.refresh(topic.namespace)

    async def _topic_deleted(self, topic: Topic) -> None:
        broker = self._broker
        await broker.groups.forget_topic(topic.namespace, topic.name)
        await broker.queues.registry.forget_topic(topic)
        broker.letters.forget_topic(topic.namespace, topic.name)
        await broker.mqtt.forget_topic(topic)

    def _open_state(self, directory: str) -> StateLog:
        partition = self.opener.open(directory, 0, segment_bytes=_STATE_SEGMENT_BYTES, counted=False)
        log = StateLog(partition)
        self.state_logs.append(log)
        return log

    def _logs(self) -> list[Partition]:
        """All that are open, but for history and traces, on which nothing depends."""
        broker = self._broker
        states = (log.partition for log in self.state_logs)
        return [*broker.topics.open_logs(), *states, *broker.health.logs, *broker.mqtt.logs, *broker.stages.logs]

    async def _sync_interval(self) -> None:
        self.committer.request_waiting()

    def _state_failure(self) -> str | None:
        """Why the broker cannot remember what it decides, if so."""
        return next((log.partition.failed for log in self.state_logs if log.partition.failed is not None), None)

    def _mqtt_failure(self) -> str | None:
        """Why sessions of MQTT cannot be remembered: worth a restart, and no reason to refuse everybody's messages."""
        return next((log.failed for log in self._broker.mqtt.logs if log.failed is not None), None)

    def _partition_failed(self, partition: Partition, reason: str) -> None:
        _log.error("partition stopped accepting messages", directory=partition.log.directory, reason=reason)

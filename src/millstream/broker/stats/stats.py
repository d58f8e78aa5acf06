"""How the broker is doing, at run time: measures every few seconds, and answers those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.history.choice import Choice
from millstream.broker.history.history import KeptHistory
from millstream.broker.history.measures import unit_of
from millstream.broker.history.tiers import Series
from millstream.broker.latency import quantile_us
from millstream.broker.opening import PartitionOpener
from millstream.broker.patience import PatientClock
from millstream.broker.stats.exposition import Collected, Exposition, histograms_of
from millstream.broker.stats.overview import busiest_topics, check_limit, furthest_behind, sums, within
from millstream.broker.stats.rates import NO_PACE, Pace, Paces
from millstream.broker.stats.survey import Finder, Host, Survey, take_survey
from millstream.broker.traffic.modes import ModeKeeper
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import InvalidArgument
from millstream.version import VERSION
from millstream.wire import stats_calls as calls

if TYPE_CHECKING:
    from millstream.broker.mqtt.mqtt import Mqtt
    from millstream.broker.pipelines import Pipelines
    from millstream.broker.stages.stages import Stages

__all__ = ["SAMPLE_S", "Stats"]

SAMPLE_S: Final = 5.0
_HOUR_MS: Final = 3_600_000
#: Of each kind.  A topic has three numbers, a group two; with the broker's own that makes 220 series and 18 MB.
_SUBJECTS_MAX: Final = 40
_POINTS_MAX: Final = 2_000
_TIME_MS_MAX: Final = 1 << 53  # as far as numbers in JSON are exact

_Subject = tuple[str, str, str]


class _Host(Host, Protocol):
    settings: Settings
    software: str
    node_id: str
    modes: ModeKeeper
    mqtt: Mqtt
    stages: Stages
    pipelines: Pipelines
    patience: PatientClock


class _Session(Protocol):
    @property
    def namespace(self) -> str: ...


class _Marks:
    """What histograms and counters were at the last measurement."""

    def __init__(self, host: Host) -> None:
        latency = host.metrics.latency
        self.publish = list(latency.publish.counts)
        self.fsync = list(latency.fsync.counts)
        self.end_to_end = _end_to_end(host)
        self.throttled = host.metrics.publishes_throttled


def _end_to_end(host: Host) -> list[int]:
    latency = host.metrics.latency
    kinds = (latency.to_stream.counts, latency.to_queue.counts, latency.to_subscription.counts)
    return [sum(counts) for counts in zip(*kinds, strict=True)]


class Stats:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(self, host: _Host, opener: PartitionOpener, *, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._loop = opener.loop
        self._started_ms = clock.now_us() // 1000
        self._born_ms = clock.monotonic_ms()
        self._paces = Paces(self._born_ms)
        self._finder = Finder(host)
        self._exposition = Exposition(host.settings.metrics.series_max)
        self._writing = asyncio.Lock()
        self._scrapes = 0
        self.history = KeptHistory(opener, host.patience)
        self._topics: Choice[_Subject] = Choice(_SUBJECTS_MAX)
        self._groups: Choice[_Subject] = Choice(_SUBJECTS_MAX)
        #: Of the last measurement and of the one before.
        self._marks = [_Marks(host)] * 2
        self._measured_ms = self._born_ms
        self._loading: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loading = self._loop.create_task(self._load())

    async def _load(self) -> None:
        await self.history.load()
        subjects = list(self.history.subjects())
        dropped = self._topics.resume(it for it in subjects if not it[2])
        dropped += self._groups.resume(it for it in subjects if it[2])
        self._forget(dropped)

    async def stop(self) -> None:
        if self._loading is not None:
            await self._loading
        self.history.finish()

    def close(self) -> None:
        """After the last sync."""
        self.history.close()

    # --- measuring -----------------------------------------------------------------------------------------------

    async def survey(self) -> Survey:
        return await take_survey(self._host, self._clock)

    async def sample(self) -> None:
        """Measure everything; called every SAMPLE_S."""
        await self._finder.find()
        survey = await self.survey()
        # With ten thousand topics each of these takes milliseconds, in which nobody else would be served.
        paces = self._paces.of(survey)
        self._paces.remember(survey)
        await asyncio.sleep(0)
        # Together: what is counted between the two would be in no measurement.
        values = self._of_broker(survey, paces)
        self._marks = [self._marks[1], _Marks(self._host)]
        self._measured_ms = survey.monotonic_ms
        await asyncio.sleep(0)
        self._choose(survey, paces, values)
        self.history.note(survey.time_ms, values, may_write=self._host.modes.publish_refusal is None)

    def _of_broker(self, survey: Survey, paces: dict[tuple[str, str], Pace]) -> dict[Series, float]:
        metrics = self._host.metrics
        seconds = max(survey.monotonic_ms - self._measured_ms, 1) / 1000
        total = sums(survey, paces)
        rates = total["rates"]
        assert isinstance(rates, calls.Rates)
        values: dict[str, Any] = {
            **{f"{name}_rate": getattr(rates, name) for name in rates.__struct_fields__},
            **{name: total[name] for name in _SUMS},
            **self._percentiles(self._marks[1]),
            "throttled_rate": (metrics.publishes_throttled - self._marks[1].throttled) / seconds,
            "connections": metrics.connections,
            "memory_bytes": metrics.memory_bytes,
            "disk_free_bytes": metrics.disk_free_bytes,
        }
        return {Series(name): float(value) for name, value in values.items()}

    def _percentiles(self, before: _Marks) -> dict[str, float]:
        latency = self._host.metrics.latency
        return {
            "publish_p99_ms": _p99_ms(latency.publish.counts, before.publish),
            "end_to_end_p99_ms": _p99_ms(_end_to_end(self._host), before.end_to_end),
            "fsync_p99_ms": _p99_ms(latency.fsync.counts, before.fsync),
        }

    def _choose(self, survey: Survey, paces: dict[tuple[str, str], Pace], values: dict[Series, float]) -> None:
        """Add the numbers of the topics and groups that have a history of their own."""
        busy: dict[_Subject, float] = {}
        for row in survey.topics:
            pace = paces.get((row.namespace, row.topic), NO_PACE)
            busy[row.namespace, row.topic, ""] = pace.published + pace.consumed + bool(row.depth)
        behind: dict[_Subject, float] = {}
        standings: dict[_Subject, tuple[int, int]] = {}
        for queue in survey.queues:
            standings[queue.namespace, queue.topic, queue.group] = queue.depth, queue.oldest_ms
        for stream in survey.streams:  # one history for both kinds: of one name, the queue group has it
            standings.setdefault((stream.namespace, stream.topic, stream.group), (stream.lag, stream.oldest_ms))
        for key, (lag, _) in standings.items():
            behind[key] = lag + bool(busy.get((key[0], key[1], "")))
        self._forget(self._topics.choose(busy) + self._groups.choose(behind))
        for row in survey.topics:
            key = (row.namespace, row.topic, "")
            if key in self._topics:
                pace = paces.get((row.namespace, row.topic), NO_PACE)
                values[Series("published_rate", *key)] = pace.published
                values[Series("consumed_rate", *key)] = pace.consumed
                values[Series("depth", *key)] = row.depth
        for key, (lag, oldest_ms) in standings.items():
            if key in self._groups:
                values[Series("lag", *key)] = lag
                values[Series("oldest_ms", *key)] = oldest_ms

    def _forget(self, subjects: list[_Subject]) -> None:
        for namespace, topic, group in subjects:
            for name in ("lag", "oldest_ms") if group else ("published_rate", "consumed_rate", "depth"):
                self.history.tiers.forget(Series(name, namespace, topic, group))

    # --- calls ---------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {
            calls.DescribeOverview: self._overview,
            calls.ReadHistory: self._history,
            calls.Metrics: self._metrics,
        }

    async def _overview(self, session: _Session, call: calls.DescribeOverview) -> calls.Overview:
        check_limit(call.limit)
        survey = await self.survey()
        paces = self._paces.of(survey)
        shown = survey if call.everywhere else within(survey, session.namespace)
        host, metrics = self._host, self._host.metrics
        recent = survey.monotonic_ms - self._measured_ms >= 1000 * SAMPLE_S / 2
        # In turns: with ten thousand topics each of these takes a while.
        await asyncio.sleep(0)
        summed = sums(shown, paces)
        await asyncio.sleep(0)
        busiest = busiest_topics(shown, paces, call.limit)
        await asyncio.sleep(0)
        behind = furthest_behind(shown, call.limit)
        return calls.Overview(
            time_ms=survey.time_ms,
            namespace="" if call.everywhere else session.namespace,
            software=host.software,
            node_id=host.node_id,
            uptime_ms=survey.monotonic_ms - self._born_ms,
            mode=host.modes.mode,
            reason=host.modes.reason or "",
            namespaces=survey.namespaces,
            connections=metrics.connections,
            subscriptions=metrics.subscriptions,
            memory_bytes=metrics.memory_bytes,
            disk_free_bytes=metrics.disk_free_bytes,
            **self._percentiles(self._marks[recent]),  # type: ignore[arg-type]
            **summed,  # type: ignore[arg-type]
            busiest=busiest,
            furthest_behind=behind,
        )

    async def _history(self, session: _Session, call: calls.ReadHistory) -> calls.History:
        unit = unit_of(call.metric, topic=call.topic, group=call.group)
        if not 1 <= call.points <= _POINTS_MAX:
            raise InvalidArgument(f"points must be between 1 and {_POINTS_MAX}, not {call.points}")
        if not (0 <= call.from_ms <= _TIME_MS_MAX and 0 <= call.until_ms <= _TIME_MS_MAX):
            raise InvalidArgument("from_ms and until_ms are times in milliseconds since 1970")
        if call.topic:
            self._host.topics.registry.get(session.namespace, call.topic)  # or say that there is none
        now_ms = self._clock.now_us() // 1000
        until_ms = call.until_ms or now_ms
        from_ms = call.from_ms or until_ms - _HOUR_MS
        if from_ms >= until_ms:
            raise InvalidArgument(f"from_ms must be before until_ms, which is {until_ms}")
        await self.history.loaded.wait()
        namespace = session.namespace if call.topic else ""
        series = Series(call.metric, namespace, call.topic, call.group)
        step_ms, points = self.history.tiers.query(series, from_ms, until_ms, call.points, now_ms=now_ms)
        return calls.History(
            metric=call.metric,
            unit=unit,
            topic=call.topic,
            group=call.group,
            from_ms=from_ms,
            until_ms=until_ms,
            step_ms=step_ms,
            points=[
                calls.HistoryPoint(
                    time_ms=time_ms, avg=_readable(point.avg), min=_readable(point.min), max=_readable(point.max)
                )
                for time_ms, point in points
            ],
        )

    async def _metrics(self, _: _Session, call: calls.Metrics) -> calls.MetricsText:
        text, media_type = await self.exposition(call.accept)
        return calls.MetricsText(media_type=media_type, text=text.decode())

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as Prometheus wants them, and the media type."""
        self._scrapes += 1
        collected = self._collect(await self.survey())
        async with self._writing:
            return await self._loop.run_in_executor(None, self._exposition.write, collected, accept)

    def _collect(self, survey: Survey) -> Collected:
        host = self._host
        numbers = host.metrics.as_dict() | {
            "started_ms": self._started_ms,
            "namespaces": survey.namespaces,
            "topics": len(survey.topics),
            "partitions": sum(row.partitions for row in survey.topics),
            "partitions_cold": sum(row.cold for row in survey.topics),
            "journal_bytes": survey.journal_bytes,
            "history_bytes": self.history.tiers.memory_bytes,
            "scrapes": self._scrapes,
            "mqtt_sessions": host.mqtt.session_count,
            "mqtt_retained": host.mqtt.retained.count,
            "mqtt_retained_bytes": host.mqtt.retained.bytes,
            "stages": host.stages.count,
            "stages_bytes": host.stages.bytes,
            "stage_queries": host.stages.query_count,
        }
        return Collected(
            version=VERSION,
            node=host.node_id,
            mode=host.modes.mode,
            doors=dict(host.metrics.connections_by_door),
            numbers=numbers,
            survey=survey,
            pipelines=host.pipelines.rows(),
            histograms=histograms_of(host.metrics.latency),
        )


#: Measures of the broker that are sums of the overview.
_SUMS: Final = (
    "depth",
    "leased",
    "waiting",
    "scheduled",
    "dead_letters",
    "oldest_ms",
    "consumers",
    "log_bytes",
)


def _p99_ms(counts: list[int], before: list[int]) -> float:
    return round(quantile_us(0.99, counts, before) / 1000, 3)


def _readable(number: float) -> float:
    """What is kept has seven digits; more would be made up."""
    return float(f"{number:.7g}")

"""Replays: sending dead letters again, as jobs that survive the broker.

A state log remembers what was asked for, and how far the dead letter topics reached then, so that what dies again is
not sent in circles.  Which letters are left needs no bookkeeping of its own: each batch that is sent settles its
letters in the same write (see transfer.py), so a job that is taken up again after a crash looks for what is not settled
and goes on, in the same order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from millstream.broker.letters.job import ReplayHost, ReplayJob, ReplayOrder
from millstream.broker.letters.letters import require_choice
from millstream.broker.state import StateLog
from millstream.clock import Clock
from millstream.dead_letters import DeadLetter, ReplayInfo
from millstream.errors import InvalidArgument, MillstreamError, QuotaExceeded, ReplayNotFound, TopicNotFound
from millstream.queues.letters import replay_id_of
from millstream.queues.replay_plan import ReplayPlanner
from millstream.wire.letter_calls import AbortReplay, ListReplays, ReplayLetters, ReplayStarted, ShowReplay

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Replays"]

_log = structlog.get_logger("millstream.replays")

_RUNNING_MAX: Final = 16
_REPORTS_MAX: Final = 200
#: A replay ends when this many of its messages, and half of them, have died again: it is not helping.
_RELAPSES_MIN: Final = 20
_STOP_S: Final = 5.0
_IDS_MAX: Final = 10_000

# What is asked for is recorded once, how far it is again and again.
_ORDER: Final = "order/"
_PROGRESS: Final = "progress/"


class Replays:
    """All replays of the broker."""

    def __init__(self, host: ReplayHost, log: StateLog, *, clock: Clock, rng: random.Random) -> None:
        self._host = host
        self._log = log
        self._clock = clock
        self._rng = rng
        self._jobs: dict[str, ReplayJob] = {}
        #: One at a time, or those that begin together would be more than there may be.
        self._beginning = asyncio.Lock()
        host.letters.listeners.append(self._relapsed)

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            ReplayLetters: self.begin,
            ListReplays: self._list,
            ShowReplay: self._show,
            AbortReplay: lambda session, call: self.abort(session.namespace, call.id),
        }

    # --- life ----------------------------------------------------------------------------------------------------

    def replay(self, documents: Mapping[str, Any]) -> None:
        """Take facts as true, at start."""
        for key, document in documents.items():
            if key.startswith(_PROGRESS):
                try:
                    info = msgspec.convert(document, ReplayInfo)
                    order = msgspec.convert(documents[_ORDER + info.id], ReplayOrder)
                except (KeyError, msgspec.ValidationError) as error:  # damage; the letters are where they were
                    replay = key.removeprefix(_PROGRESS)
                    _log.error("a replay cannot be read and does not go on", replay=replay, reason=repr(error))
                    continue
                self._jobs[info.id] = ReplayJob(self._host, order, info)

    def resume(self) -> None:
        """Go on with what the last run of the broker has left unfinished."""
        for job in self._jobs.values():
            if not job.info.is_over:
                _log.info("replay goes on", replay=job.info.id, sent=job.info.replayed, of=job.info.total)
                self._start(job, None)

    async def stop(self) -> None:
        """Let each job finish the chunk in hand; the next start goes on from there."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None and not job.task.done()]
        for job in self._jobs.values():
            job.ending.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in late:  # it waits for a target that does not answer; what is recorded will happen
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        try:
            await self.note()
        except MillstreamError as error:  # the next start finds out for itself how far they are
            _log.warning("the progress of replays was not noted", reason=str(error))

    async def note(self) -> None:
        """Write down how far the jobs are; called about once a second."""
        changed = [job for job in self._jobs.values() if job.changed]
        if changed:
            for job in changed:
                job.changed = False
            try:
                await self._record({_PROGRESS + job.info.id: msgspec.to_builtins(job.info) for job in changed})
            except MillstreamError:
                for job in changed:  # next time: one that has ended must not go on after a restart
                    job.changed = True
                raise

    async def _record(self, facts: Mapping[str, Any]) -> None:
        await self._log.record(facts, now_us=self._clock.now_us())

    # --- what is asked -------------------------------------------------------------------------------------------

    async def begin(self, session: Session, call: ReplayLetters) -> ReplayStarted:
        namespace = session.namespace
        require_choice(call.ids, call.filter, call.everything)
        if len(call.ids) > _IDS_MAX:
            raise InvalidArgument(f"a replay takes {_IDS_MAX} ids at most, not {len(call.ids)}; use a filter")
        if call.rate < 0:
            raise InvalidArgument(f"rate must be 0 (no limit) or more, not {call.rate}")
        registry = self._host.topics.registry
        if call.target and registry.find(namespace, call.target) is None and not call.dry_run:
            raise TopicNotFound(f"topic {call.target!r}, the target of the replay, does not exist")
        ends = self._host.letters.ends(namespace)
        uids = {topic: registry.get(namespace, topic).partition_uids for topic in ends}
        planner = await self._plan(namespace, call, ends)
        plan = planner.plan(now_ms=self._now_ms())
        for topic in plan.targets:  # a letter says itself where it came from, and anybody may have written it
            session.access.require("produce", namespace, topic)
        if call.dry_run:
            return ReplayStarted(plan=plan)
        order = ReplayOrder(namespace=namespace, call=call, ends=ends, uids=uids)
        async with self._beginning:
            running = sum(not job.info.is_over for job in self._jobs.values())
            if running >= _RUNNING_MAX:
                raise QuotaExceeded(f"{running} replays are running already; wait for one to end, or abort one")
            info = ReplayInfo(
                id=f"r-{self._rng.getrandbits(48):012x}",
                status="running",
                target=call.target,
                rate=call.rate,
                total=plan.total,
                created_ms=self._now_ms(),
            )
            await self._record(
                {_ORDER + info.id: msgspec.to_builtins(order), _PROGRESS + info.id: msgspec.to_builtins(info)}
            )
            job = self._jobs[info.id] = ReplayJob(self._host, order, info)
        task = self._start(job, planner)
        if not plan.total:
            await task  # over at once, and the answer can say so
        await self._forget_old()
        _log.info("replay began", replay=info.id, messages=plan.total, target=call.target or "original topics")
        return ReplayStarted(plan=plan, replay=info)

    async def _plan(self, namespace: str, call: ReplayLetters, ends: Mapping[str, Sequence[int]]) -> ReplayPlanner:
        registry = self._host.topics.registry
        planner = ReplayPlanner(
            target=call.target,
            edit=call.edit,
            rate=call.rate,
            topic_exists=lambda topic: registry.find(namespace, topic) is not None,
            groups_of=lambda topic: self._groups_of(namespace, topic),
            asked="ids" if call.ids else "everything" if call.everything else "filter",
        )
        if call.ids:
            async for letter in self._host.letters.with_ids(namespace, call.ids):
                planner.add(letter)
        else:
            async for letters, _ in self._host.letters.scan(namespace, call.filter, ends=ends):
                for letter in letters:
                    planner.add(letter)
        return planner

    def _ends_of(self, order: ReplayOrder) -> dict[str, list[int]]:
        """What an order that is taken up again is about: of topics that were made again since, nothing."""
        find = self._host.topics.registry.find
        return {
            name: [end if order.concerns(topic, number) else 0 for number, end in enumerate(ends)]
            for name, ends in order.ends.items()
            if (topic := find(order.namespace, name)) is not None
        }

    def _groups_of(self, namespace: str, name: str) -> list[str]:
        topic = self._host.topics.registry.find(namespace, name)
        return [] if topic is None else [group.name for group in self._host.queues.registry.on_topic(topic)]

    async def _list(self, session: Session, _: ListReplays) -> list[ReplayInfo]:
        infos = [job.info for job in self._jobs.values() if job.order.namespace == session.namespace]
        newest = sorted(infos, key=lambda info: -info.created_ms)
        return [msgspec.structs.replace(info, failures=[]) for info in newest]

    async def _show(self, session: Session, call: ShowReplay) -> ReplayInfo:
        return self._get(session.namespace, call.id).info

    def _get(self, namespace: str, replay_id: str) -> ReplayJob:
        job = self._jobs.get(replay_id)
        if job is None or job.order.namespace != namespace:
            raise ReplayNotFound(f"there is no replay {replay_id[:80]!r}")
        return job

    async def abort(self, namespace: str, replay_id: str) -> ReplayInfo:
        """End a replay; answers when it sends no more."""
        job = self._get(namespace, replay_id)
        job.end("aborted")
        if job.task is not None:
            await asyncio.wait([job.task], timeout=_STOP_S)
        job.changed = True
        await self.note()  # a crash must not bring it back to life
        return job.info

    async def forget_namespace(self, namespace: str) -> None:
        for job in [job for job in self._jobs.values() if job.order.namespace == namespace]:
            if not job.info.is_over:
                await self.abort(namespace, job.info.id)
            await self._forget(job)

    async def _forget_old(self) -> None:
        over = sorted((job for job in self._jobs.values() if job.info.is_over), key=lambda job: job.info.created_ms)
        for job in over[: max(0, len(over) - _REPORTS_MAX)]:
            await self._forget(job)

    async def _forget(self, job: ReplayJob) -> None:
        # First of all, or its progress could be noted behind this.
        if self._jobs.pop(job.info.id, None) is None:
            return  # somebody else has seen to it
        try:
            await self._record({_ORDER + job.info.id: None, _PROGRESS + job.info.id: None})
        except MillstreamError:
            self._jobs[job.info.id] = job
            raise

    # --- the work ------------------------------------------------------------------------------------------------

    def _start(self, job: ReplayJob, planner: ReplayPlanner | None) -> asyncio.Task[None]:
        job.task = asyncio.get_running_loop().create_task(self._run(job, planner))
        return job.task

    async def _run(self, job: ReplayJob, planner: ReplayPlanner | None) -> None:
        info = job.info
        try:
            if planner is None:
                planner = await self._plan(job.order.namespace, job.order.call, self._ends_of(job.order))
                # Those that failed are among the rest and get another chance.
                info.replayed, info.failed, info.failures = max(0, info.total - planner.total), 0, []
            await job.send_all(planner.candidates())
            if not job.ending.is_set():
                # Nothing sent is not what anybody has asked for; the plan knows why.
                job.end("completed", "" if info.total else "; ".join(planner.plan(now_ms=self._now_ms()).warnings))
        except MillstreamError as error:
            job.end("failed", str(error))
        except Exception as error:
            _log.exception("a replay failed in a way it does not know", replay=info.id)
            job.end("failed", f"internal error: {error!r}")
        if info.is_over:
            info.finished_ms = self._now_ms()
            _log.info("replay ended", replay=info.id, status=info.status, sent=info.replayed, reason=info.reason)
        job.changed = True

    def _relapsed(self, namespace: str, letter: DeadLetter) -> None:
        """A message has died; if a replay had brought it back, that is worth knowing, and enough of them end it."""
        job = self._jobs.get(replay_id_of(letter))
        if job is None or job.order.namespace != namespace:
            return
        info = job.info
        info.relapsed += 1
        job.changed = True
        if not info.is_over and info.relapsed >= max(_RELAPSES_MIN, info.replayed / 2):
            job.end("failed", f"{info.relapsed} of {info.replayed} replayed messages died again; the rest stays")

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

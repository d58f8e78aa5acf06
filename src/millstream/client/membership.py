"""Membership of a stream in its group: one background thread per stream with a connection of its own.

The thread joins, sends heartbeats, commits, and leaves.  It never waits for the user's code: heartbeats go on however
long a message takes, so a slow handler does not cost a stream its place in the group.

The broker says what the member may hold.  What is new, the stream picks up between two messages.  What it has to give
up it stops reading, commits and drops, and only then the next heartbeat leaves it out, which releases it to others.  If
the handler takes so long that the broker's patience (`rebalance_ms`) is nearly at an end, the thread gives the
partition up by itself: better one message handled twice than the whole member thrown out.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.bell import Bell
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.knock import Flag
from millstream.client.blocking.transport import Transport
from millstream.client.commits import NO_PROGRESS, CommitTicket, Progress, moved_on
from millstream.client.forks import belongs_to_one_process
from millstream.client.messages import TopicPartition
from millstream.client.metadata import commit_call
from millstream.client.ownership import Changes, Ownership
from millstream.client.settings import StreamSettings
from millstream.errors import (
    ConnectionLost,
    GroupNotFound,
    InternalError,
    InvalidArgument,
    MillstreamError,
    RequestTimeout,
    ShuttingDown,
    StaleGeneration,
    UnknownMember,
)
from millstream.wire import calls

__all__ = ["Membership"]

_log = logging.getLogger("millstream.client")

_HEARTBEAT_S: Final = 3.0
#: While partitions are on their way to us we ask more often; the broker's push is usually faster.
_PENDING_HEARTBEAT_S: Final = 1.0
#: The share of the broker's patience after which a partition is given up without the handler's consent.
_PATIENCE: Final = 0.8
_LEAVE_S: Final = 5.0
#: Long enough to be told that a session is too short.
_LIMIT_S_MIN: Final = 1.0
#: As the broker cuts it; a member's id has little room for more.
_CLIENT_ID_LETTERS_MAX: Final = 256
#: How long the end of the program waits for its members to leave.
_EXIT_S: Final = 2.0

_live: Final[set[Membership]] = set()


class Membership:
    """One member of a group.  All methods may be called from any thread."""

    def __init__(
        self,
        target: Target,
        settings: StreamSettings,
        *,
        on_change: Callable[[], None],
        progress: Callable[[], Progress | None],
    ) -> None:
        """`progress` tells what may be committed, or None when the stream is gone.  Neither may keep it alive."""
        assert settings.group is not None
        self._target = target
        self._settings = settings
        self._group = settings.group
        self._on_change = on_change
        self._progress = progress
        # May be entered again: the garbage collector ends a stream in any thread at any moment, also where it is held.
        self._lock = threading.RLock()
        self._joined = Flag()
        self._bell = Bell()
        self._connection: Connection | None = None
        #: Drawn before the first join and kept until the membership ends, so that a join whose answer was lost is
        #: repeated by the same member.
        self._member_id = ""
        self._admitted = False
        self._ownership = Ownership()
        self._tickets: deque[CommitTicket] = deque()
        self._committed: dict[TopicPartition, int] = {}
        self._heartbeat_due_s = 0.0
        self._commit_due_s = time.monotonic() + settings.commit_interval_s
        self._stopping = False
        #: Why it is not a member yet, or does not get on.
        self._trouble: MillstreamError | None = None
        self.failure: MillstreamError | None = None
        self._thread = threading.Thread(target=self._run, name=f"millstream-group-{settings.group}", daemon=True)

    # --- for the stream ------------------------------------------------------------------------------------------

    @property
    def member_id(self) -> str:
        return self._member_id

    @property
    def generation(self) -> int:
        return self._ownership.generation

    def start(self) -> None:
        _live.add(self)
        belongs_to_one_process(self)
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait for the broker's first answer.  Raises its refusal, or RequestTimeout."""
        if not self._joined.wait(timeout_s):
            why = f": {self._trouble}" if self._trouble is not None else ""
            raise RequestTimeout(f"group {self._group!r} did not admit this member within {timeout_s:g} s{why}")
        if self.failure is not None:
            raise self.failure
        if self._stopping and not self._admitted:
            raise ConnectionLost("the stream was closed before the group had admitted it")

    def changes(self, held: set[TopicPartition], epoch: int) -> Changes:
        """What a stream that reads these partitions, and has followed up to `epoch`, has to do."""
        with self._lock:
            return self._ownership.changes(held, epoch)

    def took(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The stream is ready to read these.  Returns those it still may, each with the number of its holding.

        It must not touch the others.
        """
        with self._lock:
            return self._ownership.took(places)

    def dropped(self, places: set[TopicPartition], *, lost: bool = False) -> None:
        """The stream has stopped reading these; unless they were lost, the broker hears of it at once."""
        with self._lock:
            self._ownership.dropped(places, lost=lost)
            for place in places:
                self._committed.pop(place, None)
            if not lost:
                self._heartbeat_due_s = 0.0
        self._bell.ring()

    def commit(
        self,
        offsets: dict[TopicPartition, int],
        holdings: dict[TopicPartition, int],
        epoch: int | None,
        callback: Callable[[CommitTicket], None] | None = None,
    ) -> CommitTicket:
        """Commit, in the background, what a stream has read in these holdings and this epoch of the broker.

        The ticket tells when it is done.
        """
        ticket = CommitTicket(offsets, holdings, epoch, callback)
        with self._lock:
            if not self._stopping and self.failure is None:
                self._tickets.append(ticket)
                self._bell.ring()
                return ticket
        ticket.finish(self.failure or ConnectionLost("the stream is closed"))
        return ticket

    def stop(self, *, wait_s: float = _LEAVE_S) -> None:
        """Commit what was asked for, leave the group, end."""
        with self._lock:
            self._stopping = True
        self._joined.set()  # who waits for that waits no longer
        self._bell.ring()
        if wait_s and threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(wait_s)

    def _forked(self) -> None:
        """The thread that would do it is the parent's, and so is the bell that would wake it."""
        self._lock = threading.RLock()
        self.failure = ConnectionLost("the stream belongs to the process that this one was forked from")
        _live.discard(self)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff()
        try:
            while not self._stopping:
                try:
                    if self._connection is None:
                        self._connect()
                    self._work()
                    backoff.reset()
                    self._sleep()
                except (ConnectionLost, ShuttingDown, RequestTimeout) as error:
                    self._disconnect()
                    self._trouble = error
                    _log.info("group %s: %s; connecting again", self._group, error)
                    self._pause(backoff.next_s())
                except MillstreamError as error:
                    if error.retriable:
                        self._trouble = error
                        self._pause(backoff.next_s())
                        continue
                    self._fail(error)
                    return
            self._leave()
        except Exception as error:
            # Without heartbeats the partitions go to others: the stream must not read on as if nothing were.
            _log.exception("group %s: the membership ended in a way it does not know", self._group)
            self._fail(InternalError(f"the membership in group {self._group!r} failed: {error!r}"))
        finally:
            self._joined.set()
            for ticket in self._tickets:
                ticket.finish(self.failure or ConnectionLost("the stream is closed"))
            self._disconnect()
            self._bell.close()
            _live.discard(self)

    def _connect(self) -> None:
        transport = Transport.open(self._target, timeout_s=min(self._target.timeout_s, 10))
        transport.on_push = lambda _: self._hurry()
        self._connection = Connection(transport)
        self._heartbeat_due_s = 0.0

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _hurry(self) -> None:
        self._heartbeat_due_s = 0.0

    def _call(self, call: calls.Call, kind: Any) -> Any:
        assert self._connection is not None
        # A broker that is silent for a whole session has given us up anyway.
        limit_s = min(self._target.timeout_s, max(_LIMIT_S_MIN, self._settings.session_ms / 1000))
        return self._connection.call(call, kind, deadline_s=time.monotonic() + limit_s)

    def _work(self) -> None:
        """Everything that is due."""
        if self._progress() is None:
            self._stopping = True  # the stream was dropped without being closed
            return
        if not self._admitted:
            self._join()
        self._commit_tickets()
        now_s = time.monotonic()
        if self._settings.commits_itself and now_s >= self._commit_due_s:
            self._commit_due_s = now_s + self._settings.commit_interval_s
            self._commit_finished()
        self._lose_patience(now_s)
        while time.monotonic() >= self._heartbeat_due_s and not self._stopping:
            self._heartbeat()

    def _sleep(self) -> None:
        connection = self._connection
        assert connection is not None
        if connection.transport.goaway:
            raise ConnectionLost("the broker asks its clients to go")
        now_s = time.monotonic()
        due_s = self._heartbeat_due_s
        if self._settings.commits_itself:
            due_s = min(due_s, self._commit_due_s)
        patience_s = self._ownership.patience_ends_s()
        if patience_s is not None:
            due_s = min(due_s, patience_s)
        if due_s > now_s and not self._tickets and not self._stopping:
            connection.transport.wait(min(due_s - now_s, 1.0), self._bell.fileno())
        self._bell.clear()
        connection.poll()

    def _pause(self, seconds: float) -> None:
        self._bell.wait(0 if self._stopping else seconds)

    # --- group protocol ------------------------------------------------------------------------------------------

    def _join(self) -> None:
        settings = self._settings
        if not self._member_id:
            self._member_id = f"{self._target.client_id[:_CLIENT_ID_LETTERS_MAX]}-{secrets.token_hex(4)}"
        call = calls.JoinGroup(
            group=self._group,
            topics=list(settings.topics),
            member_id=self._member_id,
            instance_id=settings.instance_id,
            strategy=settings.strategy,  # type: ignore[arg-type]
            protocol=settings.protocol,  # type: ignore[arg-type]
            session_ms=settings.session_ms,
            rebalance_ms=settings.rebalance_ms,
            start="latest" if settings.start == "latest" else "earliest",
        )
        assignment: calls.Assignment = self._call(call, calls.Assignment)
        self._admitted = True
        self._follow(assignment)
        self._joined.set()

    def _heartbeat(self) -> None:
        with self._lock:
            call = calls.HeartbeatGroup(
                group=self._group,
                member_id=self._member_id,
                generation=self._ownership.generation,
                owned=self._ownership.listing(),
                instance_id=self._settings.instance_id,
            )
            pace_s = _PENDING_HEARTBEAT_S if self._ownership.awaiting else _HEARTBEAT_S
            self._heartbeat_due_s = time.monotonic() + min(pace_s, self._settings.session_ms / 3000)
        try:
            assignment: calls.Assignment = self._call(call, calls.Assignment)
        except (UnknownMember, GroupNotFound, StaleGeneration) as error:
            # Removed, or the group was deleted, or the broker lost the end of its state in a power cut.
            _log.warning("group %s: %s; joining again", self._group, error)
            self._lose_everything()
            self._join()
            return
        self._follow(assignment)

    def _follow(self, assignment: calls.Assignment) -> None:
        """Act on the broker's word."""
        patience_s = self._settings.rebalance_ms / 1000 * _PATIENCE
        with self._lock:
            told, released = self._ownership.follow(assignment, patience_until_s=time.monotonic() + patience_s)
            if released:
                self._heartbeat_due_s = 0.0
        if told:
            self._on_change()

    def _lose_everything(self) -> None:
        with self._lock:
            self._ownership.lose_everything()
            # A new name: what the old membership still has on its way must not count for the next one.
            self._member_id = ""
            self._admitted = False
            self._committed.clear()
        self._on_change()

    def _lose_patience(self, now_s: float) -> None:
        """The handler had its time: give up without it, so that the member as a whole stays."""
        with self._lock:
            late = self._ownership.late(now_s)
        if not late:
            return
        if self._settings.commits_itself:
            epoch, offsets = self._progress() or NO_PROGRESS
            try:
                self._commit_each({place: offsets[place] for place in sorted(late & offsets.keys())}, epoch)
            except (ConnectionLost, ShuttingDown, RequestTimeout):
                raise  # then nothing else goes through either
            except MillstreamError as error:
                again = "messages will be delivered again"
                _log.warning("group %s: progress could not be committed, %s: %s", self._group, again, error)
        with self._lock:
            self._ownership.force(late)
            self._heartbeat_due_s = 0.0
        _log.warning("group %s: gave up %s while a message was still being handled", self._group, sorted(late))
        self._on_change()

    # --- commits -------------------------------------------------------------------------------------------------

    def _commit_tickets(self) -> None:
        while self._tickets:
            ticket = self._tickets[0]
            try:
                self._check_held(ticket)
                if ticket.offsets:
                    self._call(self._commit_call(ticket.offsets, ticket.epoch), Any)
            except (ConnectionLost, ShuttingDown):
                raise  # again, on the next connection
            except MillstreamError as error:
                self._tickets.popleft()
                ticket.finish(error)
            else:
                self._tickets.popleft()
                self._note_committed(ticket.offsets)
                ticket.finish(None)

    def _check_held(self, ticket: CommitTicket) -> None:
        """Raises StaleGeneration where a partition was given up since its messages were read.

        When it is ours again the broker would accept the commit, which takes back what others have committed since.
        """
        with self._lock:
            for place in sorted(ticket.offsets):
                if not self._ownership.holds(place, ticket.holdings.get(place, 0)):
                    raise moved_on(self._group, place)

    def _commit_call(self, offsets: dict[TopicPartition, int], epoch: int | None) -> calls.CommitOffsets:
        generation, instance_id = self._ownership.generation, self._settings.instance_id
        return commit_call(self._group, offsets, self._member_id, generation, instance_id, epoch)

    def _commit_finished(self) -> None:
        epoch, finished = self._progress() or NO_PROGRESS
        with self._lock:
            changed = {
                place: offset
                for place, offset in finished.items()
                if self._ownership.holds(place) and self._committed.get(place) != offset
            }
        if changed:
            self._commit_each(changed, epoch)

    def _commit_each(self, offsets: dict[TopicPartition, int], epoch: int | None) -> None:
        """Commit together, or one by one when some of them are no longer ours."""
        if not offsets:
            return
        try:
            self._call(self._commit_call(offsets, epoch), Any)
            self._note_committed(offsets)
        except UnknownMember:
            pass  # the next heartbeat finds out
        except (StaleGeneration, InvalidArgument):  # one has moved on, or its topic is gone
            if len(offsets) > 1:
                for place, offset in offsets.items():
                    self._commit_each({place: offset}, epoch)

    def _note_committed(self, offsets: dict[TopicPartition, int]) -> None:
        with self._lock:
            self._committed |= offsets

    # --- end -----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        try:
            if self._connection is None:
                self._connect()
            if self._admitted:
                self._commit_tickets()
                if self._settings.commits_itself:
                    self._commit_finished()
            if self._member_id:  # also when the answer to the join was never seen
                instance_id = self._settings.instance_id
                call = calls.LeaveGroup(group=self._group, member_id=self._member_id, instance_id=instance_id)
                self._call(call, Any)
        except MillstreamError as error:
            _log.info("group %s: could not leave: %s", self._group, error)

    def _fail(self, error: MillstreamError) -> None:
        with self._lock:
            self.failure = error
        self._joined.set()
        self._on_change()


@atexit.register
def _leave_all() -> None:
    """A program that ends leaves its groups, so that nobody waits for the end of its session."""
    for member in list(_live):
        member.stop(wait_s=0)
    deadline_s = time.monotonic() + _EXIT_S
    for member in list(_live):
        member.stop(wait_s=max(0.01, deadline_s - time.monotonic()))

"""The calls of one native connection: begun in their order, a few at a time, while the client reads its answers.

A frame of a few bytes may ask for an answer of megabytes, and one read brings thousands of them.  So there is room for
the answers of those that have begun, too, as far as one can tell how large they will be.  Those that wait because their
client wants them to, for messages or for others, are not counted: nobody behind them needs to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.broker import Session
from millstream.broker.logs import SLOW_MS, waits_ms
from millstream.errors import InternalError, MillstreamError
from millstream.wire.letter_calls import ListLetters
from millstream.wire.message_calls import BrowseMessages
from millstream.wire.messages import encode_error, encode_json_response
from millstream.wire.queue_calls import LeaseMessages, PeekQueue

if TYPE_CHECKING:
    from millstream.server.tcp import NativeListener

__all__ = ["AnswerSizes", "Calls"]

_log = structlog.get_logger("millstream.tcp")

#: What is begun before anybody looks again whether the client keeps up; what may be under way, with an answer to come.
_AT_ONCE: Final = 16
#: Their answers hold what is in messages: as many as fit into 4 MiB and one more, as text.
_SHOW_MESSAGES: Final = (BrowseMessages, ListLetters, LeaseMessages, PeekQueue)
_PAGE_BYTES: Final = 6 * 1024 * 1024


class AnswerSizes:
    """How large the answer to a call may be: as large as the largest to one of its kind so far."""

    def __init__(self) -> None:
        self._largest: dict[type, int] = dict.fromkeys(_SHOW_MESSAGES, _PAGE_BYTES)

    def of(self, call: object) -> int:
        return self._largest.get(type(call), 0)

    def note(self, call: object, size: int) -> None:
        if size > self._largest.get(type(call), 0):
            self._largest[type(call)] = size


class Calls:
    """What a client has asked for and has no answer to yet."""

    def __init__(
        self,
        listener: NativeListener,
        *,
        write: Callable[[bytes], None],
        has_room: Callable[[], bool],
        free_bytes: Callable[[], int],
    ) -> None:
        """`has_room`: whether the client has read enough of its answers to get more; `free_bytes`: of how many."""
        self._listener = listener
        self._loop = listener.loop
        self._write = write
        self._has_room = has_room
        self._free_bytes = free_bytes
        self._sizes = listener.answer_sizes
        #: All that were asked for and not answered.
        self.owed = 0
        #: Those that have not begun.
        self.waiting: deque[tuple[Session, int, object]] = deque()
        self._begun = 0  # in this turn
        self._working = 0
        self._expected_bytes = 0  # of the answers to those at work

    def put(self, session: Session, correlation: int, call: object) -> None:
        self.owed += 1
        self.waiting.append((session, correlation, call))
        self.go_on()

    def go_on(self) -> None:
        """Begin what waits, as far as there is room."""
        while self.waiting and max(self._begun, self._working) < _AT_ONCE and self._has_room():
            expected_bytes = self._sizes.of(self.waiting[0][2])
            if self._working and self._expected_bytes + expected_bytes > self._free_bytes():
                return
            if not self._begun:
                # Two turns of the loop: in the first one they run, and answer if they need not wait.
                self._loop.call_soon(self._loop.call_soon, self._end_turn)
            session, correlation, call = self.waiting.popleft()
            waits = waits_ms(call) > 0
            self._begun += 1
            if waits:
                expected_bytes = 0
            self._working += not waits
            self._expected_bytes += expected_bytes
            task = self._run(session, correlation, call, waits=waits, expected_bytes=expected_bytes)
            self._listener.own(self._loop.create_task(task))

    def _end_turn(self) -> None:
        self._begun = 0
        self.go_on()

    def forget(self) -> None:
        """The client is gone.  What has begun goes on."""
        self.owed -= len(self.waiting)
        self.waiting.clear()

    async def _run(self, session: Session, correlation: int, call: object, *, waits: bool, expected_bytes: int) -> None:
        began_ns = perf_counter_ns()
        broker = self._listener.broker
        try:
            answer = encode_json_response(await broker.call(session, call), correlation)
        except MillstreamError as error:
            broker.metrics.requests_failed += 1
            answer = encode_error(error, correlation)
        except Exception:
            _log.exception("call failed", call=type(call).__name__)
            answer = encode_error(InternalError("the broker failed to handle a request; see its log"), correlation)
        took_ms = (perf_counter_ns() - began_ns) // 1_000_000
        if took_ms > SLOW_MS and took_ms > SLOW_MS + waits_ms(call):
            self._note_slow(session, call, correlation, took_ms)
        self.owed -= 1
        self._working -= not waits
        self._expected_bytes -= expected_bytes
        self._sizes.note(call, len(answer))
        self._write(answer)
        self._listener.connections.progressed()
        self.go_on()

    def _note_slow(self, session: Session, call: object, correlation: int, took_ms: int) -> None:
        self._listener.slow.write(
            _log.warning,
            "slow call",
            call=type(call).__struct_config__.tag,  # type: ignore[attr-defined]
            took_ms=took_ms,
            client=session.client_id,
            address=session.address,
            correlation=correlation,
        )

"""Workers of the synchronous client: a queue, and threads that handle its messages.

A handler that is a coroutine function runs in an event loop in a thread of its own, with the asynchronous client: its
tasks can share what only tasks of one loop can share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.client.address import Target
from millstream.client.blocking.knock import Flag
from millstream.client.blocking.limit import Limit
from millstream.client.blocking.queue import Queue
from millstream.client.functions import check_done, is_asynchronous
from millstream.client.leases import QueueMessage
from millstream.client.outcomes import settle_failure, settle_success
from millstream.client.settings import QueueSettings
from millstream.client.spans import handling
from millstream.durations import is_span
from millstream.errors import InvalidArgument, MillstreamError

if TYPE_CHECKING:
    from millstream.client.asynchronous.worker import AsyncWorker

__all__ = ["Worker", "run_workers", "stop_workers"]

_log = logging.getLogger("millstream.worker")

#: How long `stop` waits for handlers that run.
_STOP_S: Final = 30.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class _Engine(Protocol):
    """What handles the messages."""

    failure: BaseException | None

    def start(self) -> None: ...

    def ask_to_stop(self) -> None:
        """Begin nothing new."""

    @property
    def is_inside(self) -> bool:
        """Whether it is one of its handlers that asks."""

    @property
    def has_ended(self) -> bool: ...

    def join(self, deadline_s: float) -> bool:
        """Wait for what runs; False when it still does."""

    def close(self) -> None: ...


class Worker:
    """A handler and the queue it works on; made by `client.worker`.  Calling it calls the handler."""

    def __init__(
        self, handler: Callable[[Any], Any], settings: QueueSettings, make_engine: Callable[[], _Engine]
    ) -> None:
        self._handler = handler
        self._settings = settings
        self._make_engine = make_engine
        self._engine: _Engine | None = None
        self._stopped = False
        self.__name__ = getattr(handler, "__name__", "worker")
        self.__doc__ = handler.__doc__

    def __call__(self, message: Any) -> Any:
        return self._handler(message)

    def __repr__(self) -> str:
        return f"<Worker {self.__name__} on {self._settings.name}>"

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the worker before it was asked to stop."""
        return None if self._engine is None else self._engine.failure

    def start(self) -> Worker:
        """Open the queue and begin, in the background.  Raises the error with which the broker refuses."""
        if self._stopped:
            raise InvalidArgument("the worker was stopped: make another one")
        if self._engine is None:
            # Known before it starts: its first handler may call `stop` before `start` is over, and a signal may come.
            engine = self._engine = self._make_engine()
            try:
                engine.start()
            except Exception:
                self._engine = None
                engine.ask_to_stop()
                engine.close()
                raise
        return self

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """Begin nothing new, give back what was leased ahead, and wait for the handlers that are running.

        Returns False if some are still running after `timeout_s`.  A handler may call this, and is not waited for.
        """
        if not is_span(timeout_s):
            raise InvalidArgument(f"timeout_s is a number of seconds, not {timeout_s!r}")
        return _stop([self], timeout_s)

    def run(self) -> None:
        """Work until SIGINT or SIGTERM, or until a handler calls `stop`, then stop in good order.

        Raises the error that ended the worker, if one did.
        """
        run_workers([self])

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ThreadEngine:
    """Plain functions, in threads."""

    def __init__(
        self, handler: Callable[[Any], Any], concurrency: int, name: str, open_queue: Callable[[], Queue]
    ) -> None:
        self._handler = handler
        self._open_queue = open_queue
        self._queue: Queue | None = None
        self._asked_to_stop = False
        self._threads = [
            threading.Thread(target=self._work, name=f"millstream-worker-{name}-{number}", daemon=True)
            for number in range(concurrency)
        ]
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._queue = queue = self._open_queue()
        if self._asked_to_stop:  # while the queue was opened: the threads end at once
            queue.close()
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        queue = self._queue
        assert queue is not None
        try:
            while (message := queue.next()) is not None:
                self._handle(message)
        except BaseException as error:  # also SystemExit, of which a thread dies without a word
            self.failure = self.failure or error
            _log.error("a worker ends: %s", error if isinstance(error, MillstreamError) else repr(error))
            queue.drain()

    def _handle(self, message: QueueMessage) -> None:
        try:
            with handling(message):
                check_done(self._handler(message))
        except BaseException as problem:
            settle_failure(message, problem)
            if not isinstance(problem, Exception):
                raise
        else:
            settle_success(message)

    def ask_to_stop(self) -> None:
        self._asked_to_stop = True
        if self._queue is not None:
            self._queue.drain()

    @property
    def is_inside(self) -> bool:
        return threading.current_thread() in self._threads

    @property
    def has_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, deadline_s: float) -> bool:
        for thread in self._threads:
            _join(thread, deadline_s)
        return self.has_ended

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


class LoopEngine:
    """Coroutine functions, in an event loop of their own."""

    def __init__(
        self, handler: Callable[[Any], Any], concurrency: int, target: Target, settings: QueueSettings
    ) -> None:
        self._handler = handler
        self._concurrency = concurrency
        self._target = target
        self._settings = settings
        self._started = Flag()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._worker: AsyncWorker | None = None
        self._thread = threading.Thread(target=self._run, name=f"millstream-worker-{settings.name}", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        self._started.wait()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        from millstream.client.asynchronous.client import AsyncClient

        self._loop = asyncio.get_running_loop()
        client = AsyncClient(self._target)
        await client.open()
        try:
            worker = await client.make_worker(self._handler, self._settings, self._concurrency).start()
            self._worker = worker
            self._started.set()
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([stopping, worker.ended], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await worker.stop(None)
            self.failure = worker.failure
        finally:
            await client.close()

    def ask_to_stop(self) -> None:
        if self.is_inside and self._worker is not None:
            self._worker._begin_nothing_new()  # now: the next message may be there when the handler returns
        if self._loop is None:
            self._stop.set()  # nobody waits for it yet
        else:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    @property
    def is_inside(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, deadline_s: float) -> bool:
        _join(self._thread, deadline_s)
        return self.has_ended

    def close(self) -> None:
        """The thread closes what it has opened."""


def _join(thread: threading.Thread, deadline_s: float) -> None:
    if thread.is_alive():  # it may not have been started: a signal came
        thread.join(min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX))


def make_worker(
    handler: Callable[[Any], Any],
    settings: QueueSettings,
    concurrency: int,
    target: Target,
    open_queue: Callable[[QueueSettings], Queue],
) -> Worker:
    def make_engine() -> _Engine:
        if is_asynchronous(handler):
            return LoopEngine(handler, concurrency, target, settings)
        return ThreadEngine(handler, concurrency, settings.name, lambda: open_queue(settings))

    return Worker(handler, settings, make_engine)


def run_workers(workers: Iterable[Worker]) -> None:
    """Work until SIGINT or SIGTERM, or until a worker fails or all were stopped by their handlers; then stop in good
    order.  A second signal ends at once."""
    running = list(workers)
    try:
        with _stop_signals() as stop:
            for worker in running:
                worker.start()
            while not stop.wait(0.2) and not any(worker.failure for worker in running):
                if all(worker._engine is not None and worker._engine.has_ended for worker in running):
                    break
    finally:
        _stop(running, _STOP_S)  # here signals have their usual effect again
    for worker in running:
        if worker.failure is not None:
            raise worker.failure


def stop_workers(workers: Iterable[Worker]) -> None:
    """Stop them one by one, none of which begins anything new meanwhile.  A handler may call it, too."""
    stopping = list(workers)
    _begin_nothing_new(stopping)
    limit = Limit(_STOP_S)
    for worker in stopping:
        worker.stop(max(0.0, limit.left_s))


def _begin_nothing_new(workers: list[Worker]) -> list[_Engine]:
    engines = [worker._engine for worker in workers if worker._engine is not None]
    for worker in workers:
        worker._stopped = True
    for engine in engines:
        engine.ask_to_stop()
    return engines


def _stop(workers: list[Worker], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    engines = _begin_nothing_new(workers)
    if any(engine.is_inside for engine in engines):
        return True  # it cannot wait for itself, and its message is settled when it returns
    done = [engine.join(deadline_s) for engine in engines]
    for engine in engines:
        engine.close()
    for worker, ended in zip(workers, done, strict=False):
        if not ended:
            _log.warning("%r: a handler still runs; its message is delivered again", worker)
    return all(done)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Flag]:
    """A flag that the first SIGINT or SIGTERM sets, if this is the main thread."""
    stop = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}

    def on_signal(*_: object) -> None:
        restore()
        stop.set()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()

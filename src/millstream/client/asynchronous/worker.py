"""Workers of the asynchronous client: a queue, and tasks that handle its messages.

A handler that is a plain function runs in threads, so that it may block.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from millstream.client.asynchronous.queue import AsyncQueue
from millstream.client.asynchronous.signals import stop_signals
from millstream.client.functions import check_done, is_asynchronous
from millstream.client.leases import AsyncQueueMessage
from millstream.client.outcomes import settle_failure, settle_success
from millstream.client.settings import QueueSettings, check_timeout
from millstream.client.spans import handling
from millstream.errors import InvalidArgument, MillstreamError

__all__ = ["AsyncWorker", "run_workers", "stop_workers"]

_log = logging.getLogger("millstream.worker")

_STOP_S: Final = 30.0


class AsyncWorker:
    """A handler and the queue it works on; made by `client.worker`.  Calling it calls the handler."""

    def __init__(
        self,
        handler: Callable[[Any], Any],
        settings: QueueSettings,
        concurrency: int,
        open_queue: Callable[[QueueSettings], Awaitable[AsyncQueue]],
    ) -> None:
        self._handler = handler
        self._settings = settings
        self._concurrency = concurrency
        self._open_queue = open_queue
        self._queue: AsyncQueue | None = None
        self._opening = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._stopped = False
        #: Done when all tasks are.
        self.ended: asyncio.Future[Any]
        #: What ended the worker before it was asked to stop.
        self.failure: BaseException | None = None
        self.__name__ = getattr(handler, "__name__", "worker")
        self.__doc__ = handler.__doc__

    def __call__(self, message: Any) -> Any:
        return self._handler(message)

    def __repr__(self) -> str:
        return f"<AsyncWorker {self.__name__} on {self._settings.name}>"

    async def start(self) -> AsyncWorker:
        """Open the queue and begin.  Raises the error with which the broker refuses."""
        if self._stopped:
            raise InvalidArgument("the worker was stopped: make another one")
        async with self._opening:
            if self._queue is None:
                await self._begin(await self._open_queue(self._settings))
        return self

    async def _begin(self, queue: AsyncQueue) -> None:
        if self._stopped:  # while the queue was opened: the tasks end at once
            await queue.close()
        self._queue = queue
        if not is_asynchronous(self._handler):
            self._threads = ThreadPoolExecutor(self._concurrency, f"millstream-worker-{self._settings.name}")
        self._tasks = [asyncio.create_task(self._work(queue)) for _ in range(self._concurrency)]
        self.ended = asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, queue: AsyncQueue) -> None:
        try:
            while (message := await queue.next()) is not None:
                await self._handle(message)
        except MillstreamError as error:
            self.failure = self.failure or error
            _log.error("a worker ends: %s", error)
            queue.drain()

    async def _handle(self, message: AsyncQueueMessage) -> None:
        try:
            with handling(message):
                result = await self._called(message)
                while inspect.isawaitable(result):  # also of a function around a coroutine function
                    result = await result
                check_done(result)
        except BaseException as problem:
            task = asyncio.current_task()
            if isinstance(problem, asyncio.CancelledError) and task is not None and not task.cancelling():
                # Not we were cancelled but what the handler waited for: that is a failure like any other.
                settle_failure(message, RuntimeError("what the handler waited for was cancelled"))
                return
            settle_failure(message, problem)
            if not isinstance(problem, Exception):
                raise
        else:
            settle_success(message)

    async def _called(self, message: AsyncQueueMessage) -> Any:
        """What the handler returns."""
        if self._threads is None:
            return self._handler(message)
        context = contextvars.copy_context()  # with the span
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, self._handler, message)

    def _begin_nothing_new(self) -> None:
        self._stopped = True
        if self._queue is not None:
            self._queue.drain()

    async def stop(self, timeout_s: float | None = _STOP_S) -> bool:
        """Begin nothing new, give back what was leased ahead, and wait for the handlers that are running.

        Handlers that are still running after `timeout_s` are cancelled and their messages given back; then this returns
        False.  A handler may call this, and is not waited for.
        """
        check_timeout(timeout_s)
        self._begin_nothing_new()
        queue = self._queue
        if queue is None:
            return True
        if asyncio.current_task() in self._tasks:
            return True  # it cannot wait for itself, and its message is settled when it returns
        running = set(self._tasks)
        try:
            _, running = await asyncio.wait(self._tasks, timeout=timeout_s)
        finally:  # also when nobody waits any longer: after a second SIGINT, say
            for task in running:
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await queue.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        return not running

    async def run(self) -> None:
        """Work until SIGINT or SIGTERM, or until a handler calls `stop`, then stop in good order.

        Raises the error that ended the worker, if one did.
        """
        await run_workers([self])

    async def __aenter__(self) -> AsyncWorker:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def stop_workers(workers: Iterable[AsyncWorker]) -> None:
    """Stop them one by one, none of which begins anything new meanwhile.  A handler may call it, too."""
    stopping = list(workers)
    for worker in stopping:
        worker._begin_nothing_new()
    deadline_s = time.monotonic() + _STOP_S
    for worker in stopping:
        await worker.stop(max(0.0, deadline_s - time.monotonic()))


async def run_workers(workers: Iterable[AsyncWorker]) -> None:
    """Work until SIGINT or SIGTERM, or until a worker fails or all were stopped by their handlers; then stop in good
    order.  A second signal ends at once."""
    running = list(workers)
    try:
        with stop_signals() as stop:
            for worker in running:
                await worker.start()
            await _wait_for_the_first(running, stop)
    finally:
        await asyncio.gather(*(worker.stop() for worker in running))  # here signals have their usual effect again
    for worker in running:
        if worker.failure is not None:
            raise worker.failure


async def _wait_for_the_first(workers: list[AsyncWorker], stop: asyncio.Event) -> None:
    """Until one of them fails, or all have ended, or `stop` is set."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        at_work = {worker.ended for worker in workers}
        while at_work and not stopping.done() and not any(worker.failure for worker in workers):
            await asyncio.wait([stopping, *at_work], return_when=asyncio.FIRST_COMPLETED)
            at_work = {ended for ended in at_work if not ended.done()}
    finally:
        stopping.cancel()

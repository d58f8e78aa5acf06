"""The part of an asynchronous client that is about queues; see the synchronous twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from millstream.client.address import Target
from millstream.client.asking import T
from millstream.client.asynchronous.opening import OpeningQueue
from millstream.client.asynchronous.queue import AsyncQueue
from millstream.client.asynchronous.queues import AsyncQueues
from millstream.client.asynchronous.worker import AsyncWorker, run_workers, stop_workers
from millstream.client.functions import check_handler
from millstream.client.outcomes import check_concurrency, check_settles, prefetch_for
from millstream.client.queue_requests import explain_call
from millstream.client.settings import QueueOptions, QueueSettings
from millstream.wire import calls, queue_calls

__all__ = ["AsyncWork"]


class AsyncWork:
    """Queues and workers of an asynchronous client."""

    _target: Target
    _replier: Callable[..., object]
    _adopt: Callable[[Any], None]

    def _prepare_work(self) -> None:
        self._workers: list[AsyncWorker] = []

    async def _call(self, call: calls.Call, kind: type[T]) -> T:
        raise NotImplementedError

    def queue(
        self, topic: str, *, group: str = "default", prefetch: int = 500, **options: Unpack[QueueOptions]
    ) -> OpeningQueue:
        """Work on the messages of a topic, with `async for`, `async with` or `await`; see `AsyncQueue`."""
        settings = QueueSettings.of(topic, group, prefetch, options)
        return OpeningQueue(lambda: self._open_queue(settings))

    async def _open_queue(self, settings: QueueSettings) -> AsyncQueue:
        queue = AsyncQueue(self._target, settings, self._call)
        queue.reply_with(self._replier)
        self._adopt(queue)
        await queue.open()
        return queue

    @property
    def queues(self) -> AsyncQueues:
        """Queue groups: look at them, and change them."""
        return AsyncQueues(self._call)

    async def why(self, about: str) -> queue_calls.Explanation:
        """Explain, with a sentence and facts, why a message (its id) or a queue (`topic/group`) is not delivered."""
        return await self._call(explain_call(about), queue_calls.Explanation)

    # --- workers -------------------------------------------------------------------------------------------------

    def worker(
        self,
        topic: str,
        *,
        group: str = "default",
        concurrency: int = 1,
        prefetch: int | None = None,
        **options: Unpack[QueueOptions],
    ) -> Callable[[Callable[[Any], Any]], AsyncWorker]:
        """Make a function the handler of a queue: `@client.worker("orders")`, then `await` its `run()` or `start()`.

        A message is acked when the handler returns, and nacked when it raises an exception; `Reject` and `Retry` say
        more.  Coroutine functions run as `concurrency` tasks, plain functions in that many threads.
        """
        check_concurrency(concurrency)
        settings = QueueSettings.of(topic, group, prefetch_for(prefetch, concurrency), options)
        check_settles(settings)
        return lambda handler: self.make_worker(handler, settings, concurrency)

    def make_worker(self, handler: Callable[[Any], Any], settings: QueueSettings, concurrency: int) -> AsyncWorker:
        check_handler(handler)
        worker = AsyncWorker(handler, settings, concurrency, self._open_queue)
        self._workers.append(worker)
        return worker

    async def run_workers(self) -> None:
        """Run all workers of this client until SIGINT or SIGTERM, then stop them in good order."""
        await run_workers(self._workers)

    async def _stop_workers(self) -> None:
        await stop_workers(self._workers)

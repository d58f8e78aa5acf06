"""The part of a client that is about queues: taking messages to work on, and workers that do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from millstream.client.address import Target
from millstream.client.asking import T
from millstream.client.blocking.queue import Queue
from millstream.client.blocking.queues import Queues
from millstream.client.blocking.worker import Worker, make_worker, run_workers, stop_workers
from millstream.client.functions import check_handler
from millstream.client.outcomes import check_concurrency, check_settles, prefetch_for
from millstream.client.queue_requests import explain_call
from millstream.client.settings import QueueOptions, QueueSettings
from millstream.wire import calls, queue_calls

__all__ = ["Work"]


class Work:
    """Queues and workers of a client."""

    _target: Target
    _replier: Callable[..., object]

    def _prepare_work(self) -> None:
        self._workers: list[Worker] = []

    def _call(self, call: calls.Call, kind: type[T]) -> T:
        raise NotImplementedError

    def _adopt(self, child: Any) -> None:
        raise NotImplementedError

    def queue(
        self, topic: str, *, group: str = "default", prefetch: int = 500, **options: Unpack[QueueOptions]
    ) -> Queue:
        """Work on the messages of a topic, or of all that match a pattern, and settle each; see `Queue`.

        `prefetch` limits how many messages are leased and not settled; see QueueOptions for the rest.  Raises
        ConfigInvalid if the group exists with settings other than those given.
        """
        return self._open_queue(QueueSettings.of(topic, group, prefetch, options))

    def _open_queue(self, settings: QueueSettings) -> Queue:
        queue = Queue(self._target, settings, self._call)
        queue.reply_with(self._replier)
        self._adopt(queue)
        queue.open()
        return queue

    @property
    def queues(self) -> Queues:
        """Queue groups: look at them, and change them."""
        return Queues(self._call)

    def why(self, about: str) -> queue_calls.Explanation:
        """Explain, with a sentence and facts, why a message (its id) or a queue (`topic/group`) is not delivered."""
        return self._call(explain_call(about), queue_calls.Explanation)

    # --- workers -------------------------------------------------------------------------------------------------

    def worker(
        self,
        topic: str,
        *,
        group: str = "default",
        concurrency: int = 1,
        prefetch: int | None = None,
        **options: Unpack[QueueOptions],
    ) -> Callable[[Callable[[Any], Any]], Worker]:
        """Make a function the handler of a queue: `@client.worker("orders")`, then `run()` or `start()` it.

        A message is acked when the handler returns, and nacked when it raises an exception; `Reject` and `Retry` say
        more.  Plain functions run in `concurrency` threads, coroutine functions as that many tasks of one event loop.
        """
        check_concurrency(concurrency)
        settings = QueueSettings.of(topic, group, prefetch_for(prefetch, concurrency), options)
        check_settles(settings)

        def decorate(handler: Callable[[Any], Any]) -> Worker:
            check_handler(handler)
            worker = make_worker(handler, settings, concurrency, self._target, self._open_queue)
            self._workers.append(worker)
            return worker

        return decorate

    def run_workers(self) -> None:
        """Run all workers of this client until SIGINT or SIGTERM, then stop them in good order."""
        run_workers(self._workers)

    def _stop_workers(self) -> None:
        stop_workers(self._workers)

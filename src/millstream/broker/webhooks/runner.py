"""One webhook at work: leases messages like any other consumer, sends them, and settles them by the answers.

As many workers as the webhook has requests at a time each take one message and keep it until it is settled.  They ask
for messages one after the other, and only when the next request may go out, so that what has to wait for its turn waits
in the queue, where others can have it.  One more task extends the leases of everything in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.background import comes_within
from millstream.broker.metrics import Metrics
from millstream.broker.webhooks.sender import Sender, TargetForbidden
from millstream.clock import Clock
from millstream.dead_letters import MAX_RETRIES_EXCEEDED
from millstream.errors import ConfigInvalid, InvalidArgument, MillstreamError, RequestError
from millstream.names import is_pattern
from millstream.receipts import ReceiptHandle
from millstream.webhooks.content import compose
from millstream.webhooks.registration import Webhook, held_ms_max
from millstream.webhooks.targets import parse_target
from millstream.webhooks.verdicts import Answer, Verdict, judge
from millstream.wire import queue_calls
from millstream.wire.leases import Scope, Settle, SettleEntry
from millstream.wire.queue_calls import LeasedMessage, SettleItem

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

__all__ = ["Pace", "Runner", "Tally"]

_log = structlog.get_logger("millstream.webhooks")

#: How long a lease lasts without word from here, and how often there is word.
_LEASE_MS: Final = 30_000
_KEEP_S: Final = 10.0
_WAIT_MS: Final = 60_000
#: After the broker could not serve, or failed.
_PAUSE_S: Final = 1.0
#: What is being sent when a webhook stops may finish within this time.
GRACE_S: Final = 2.0
#: A rate may be as small as somebody likes; no timer has to last for years.
_WAIT_S_MAX: Final = 3_600.0
#: How far a limited rate may catch up after a moment of being late.
_SLACK_S: Final = 0.05


@dataclass(slots=True)
class Tally:
    """What has become of a webhook's messages since the broker started."""

    delivered: int = 0
    failed: int = 0
    dead: int = 0
    consecutive_failures: int = 0
    last_error: str = ""
    last_status: int = 0
    last_delivery_ms: int = 0


class Pace:
    """When the next request may go out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next_s = 0.0
        self._restarted = asyncio.Event()

    def restart(self) -> None:
        """Forget when the next request may go out: that was reckoned by another rate."""
        self._next_s = 0.0
        self._restarted.set()
        self._restarted = asyncio.Event()

    async def open(self) -> None:
        """Wait until a request may go out."""
        while True:
            wait_s = self._next_s - self._loop.time()
            if wait_s <= 0:
                return
            # And look again: another may have taken the turn.
            await comes_within(self._restarted, min(wait_s, _WAIT_S_MAX))

    async def turn(self, rate: float) -> None:
        """Wait until a request may go out, and take this turn."""
        await self.open()
        if rate:
            self._next_s = max(self._next_s, self._loop.time() - _SLACK_S) + 1 / rate


class Runner:
    """Runs from `open` to `close`; the webhook may be replaced meanwhile, which holds from the next attempt on."""

    def __init__(
        self,
        broker: Broker,
        sender: Sender,
        webhook: Webhook,
        tally: Tally,
        *,
        clock: Clock,
        metrics: Metrics,
        on_stop: Callable[[str], None],
    ) -> None:
        """`on_stop` is called once, with the reason, when the webhook cannot or should not go on."""
        self.webhook = webhook
        self._broker = broker
        self._sender = sender
        self._tally = tally
        self._clock = clock
        self._metrics = metrics
        self._on_stop = on_stop
        self._loop = asyncio.get_running_loop()
        self._pace = Pace(self._loop)
        self._line = asyncio.Lock()
        self._consumer = 0
        self._ending = False
        self._keeper: asyncio.Task[None] | None = None
        self._workers: dict[int, asyncio.Task[None]] = {}
        #: Workers whose request is out.
        self._sending: set[asyncio.Task[None] | None] = set()
        #: Receipts of what is in hand.
        self._held: dict[str, None] = {}
        self._session = broker.own_session(webhook.namespace, f"webhook {webhook.id}")

    @property
    def in_flight(self) -> int:
        return len(self._held)

    # --- life ----------------------------------------------------------------------------------------------------

    async def open(self, start: str = "") -> None:
        """Become a consumer of the group; it is made if there is none.  The topic is not.  Raises TopicNotFound."""
        webhook = self.webhook
        if not is_pattern(webhook.topic):
            self._broker.topics.registry.get(webhook.namespace, webhook.topic)
            self.check(webhook)
        call = queue_calls.OpenQueue(
            topic=webhook.topic,
            group=webhook.group,
            consumer=f"webhook {webhook.id}",
            lease_ms=_LEASE_MS,
            policy={"processing_ms": 0},  # how long a message may be held is for the webhook to say
            start=start,  # type: ignore[arg-type]
        )
        try:
            opened = await self._broker.call(self._session, call)
        except ConfigInvalid:  # unless the group exists and says it
            call.policy = None
            opened = await self._broker.call(self._session, call)
        assert isinstance(opened, queue_calls.QueueOpened)
        self._consumer = opened.consumer

    def check(self, webhook: Webhook) -> None:
        """Complain if the group exists and lets go of messages before all attempts are made.

        A lease that ends while its message is retried would let the message be delivered a second time.
        """
        try:
            group = self._broker.queues.registry.get(webhook.namespace, webhook.topic, webhook.group)
        except RequestError:
            return
        held_ms, allowed_ms = held_ms_max(webhook), group.policy.processing_ms
        if allowed_ms and held_ms > allowed_ms:
            raise InvalidArgument(
                f"all attempts may take {held_ms} ms, but queue group {webhook.group!r} lets nobody hold a message "
                f"longer than processing_ms = {allowed_ms}; change the retry delays, the timeout or the group"
            )

    def start(self) -> None:
        self._keeper = self._loop.create_task(self._keep())
        self._adjust()

    def replace(self, webhook: Webhook) -> None:
        if webhook.rate != self.webhook.rate:
            self._pace.restart()
        self.webhook = webhook
        self._adjust()

    def _adjust(self) -> None:
        """Have as many workers as the webhook says; those that are too many end after the message in hand."""
        for number in range(self.webhook.concurrency):
            if number not in self._workers and not self._ending:
                task = self._loop.create_task(self._work(number))
                self._workers[number] = task

    async def close(self) -> None:
        """Stop sending and give back everything.  What is out gets a moment to be answered."""
        self._ending = True
        workers = set(self._workers.values())
        for task in workers - self._sending:
            task.cancel()
        if workers:
            _, late = await asyncio.wait(workers, timeout=GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if self._keeper is not None:
            self._keeper.cancel()
        self._broker.session_closed(self._session)

    def _stop(self, reason: str) -> None:
        if not self._ending:
            self._ending = True
            self._on_stop(reason)

    # --- the work ------------------------------------------------------------------------------------------------

    async def _work(self, number: int) -> None:
        try:
            while not self._ending:
                try:
                    async with self._line:
                        if number >= self.webhook.concurrency:
                            break
                        message = await self._next()
                    if message is not None:
                        await self._deliver(message)
                except RequestError as error:  # the topic or the group is gone
                    self._stop(str(error))
                except MillstreamError:  # the broker serves nobody at the moment
                    await asyncio.sleep(_PAUSE_S)
                except Exception:
                    _log.exception("a webhook failed in a way it does not know", webhook=self.webhook.id)
                    await asyncio.sleep(_PAUSE_S)
        finally:
            del self._workers[number]

    async def _next(self) -> LeasedMessage | None:
        await self._pace.open()
        call = queue_calls.LeaseMessages(
            topic=self.webhook.topic, group=self.webhook.group, consumer=self._consumer, max=1, wait_ms=_WAIT_MS
        )
        found = await self._broker.call(self._session, call)
        assert isinstance(found, list)
        return found[0] if found else None

    async def _deliver(self, message: LeasedMessage) -> None:
        receipt = message.receipt
        self._held[receipt] = None
        action, reason = "release", ""
        try:
            verdict = Verdict("retry")
            attempt = 0
            while verdict.kind == "retry" and not self._ending:
                attempt += 1
                await asyncio.sleep(verdict.wait_ms / 1000)
                await self._pace.turn(self.webhook.rate)
                if attempt > 1 and await self._settle("extend", receipt) != "done":
                    action = ""  # purged, or somebody else's by now
                    return
                answer = await self._send(message, attempt)
                verdict = self._judge(answer, attempt)
            if verdict.kind in ("ack", "reject", "exhausted"):
                action, reason = verdict.kind, verdict.error
            elif verdict.kind == "pause":
                self._stop(verdict.error)
        except TargetForbidden as problem:
            self._failed(0, str(problem))
            self._stop(str(problem))
        finally:
            del self._held[receipt]
            if action == "exhausted":
                await self._give_up(receipt, reason)
            elif action:
                await self._settle(action, receipt, reason)

    async def _send(self, message: LeasedMessage, attempt: int) -> Answer:
        webhook = self.webhook
        request = compose(webhook, message, attempt=attempt, now_ms=self._now_ms())
        task = asyncio.current_task()
        self._sending.add(task)
        try:
            return await self._sender.post(
                parse_target(webhook.url), request.headers, request.body, timeout_s=webhook.timeout_ms / 1000
            )
        finally:
            self._sending.discard(task)

    def _judge(self, answer: Answer, attempt: int) -> Verdict:
        webhook, tally = self.webhook, self._tally
        verdict = judge(
            answer,
            attempt=attempt,
            retry_delays_ms=webhook.retry_delays_ms,
            reject_client_errors=webhook.reject_client_errors,
        )
        if verdict.kind == "ack":
            tally.delivered += 1
            tally.consecutive_failures = 0
            tally.last_status = answer.status
            tally.last_delivery_ms = self._now_ms()
            self._metrics.webhook_deliveries += 1
            return verdict
        self._failed(answer.status, verdict.error)
        if verdict.kind in ("reject", "exhausted"):
            tally.dead += 1
            self._metrics.webhook_messages_dead += 1
            _log.warning("a webhook gave a message up", webhook=webhook.id, attempts=attempt, reason=verdict.error)
        return verdict

    def _failed(self, status: int, error: str) -> None:
        tally = self._tally
        tally.failed += 1
        tally.consecutive_failures += 1
        tally.last_status, tally.last_error = status, error
        self._metrics.webhook_failures += 1

    # --- leases --------------------------------------------------------------------------------------------------

    async def _settle(self, action: str, receipt: str, reason: str = "") -> str:
        item = SettleItem(receipt=receipt, action=action, reason=reason)  # type: ignore[arg-type]
        if action == "extend":
            item.delay_ms = _LEASE_MS
        outcomes = await self._broker.call(self._session, queue_calls.SettleMessages(items=[item]))
        assert isinstance(outcomes, list)
        return str(outcomes[0].result)

    async def _give_up(self, receipt: str, reason: str) -> None:
        """A reject that says of itself what only the queue says otherwise: here the retries were the webhook's."""
        handle = ReceiptHandle.parse(receipt)
        entry = SettleEntry(
            Settle.REJECT, handle.nonce, Scope.ONE, handle.offset, reason=reason, cause=MAX_RETRIES_EXCEEDED
        )
        answered: asyncio.Future[object] = self._loop.create_future()

        def answer(result: object) -> None:
            if not answered.done():  # nobody waits for it any more
                answered.set_result(result)

        self._broker.settle(self._session, [entry], answer)
        result = await answered
        if isinstance(result, MillstreamError):
            raise result

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_S)
            items = [SettleItem(receipt=receipt, action="extend", delay_ms=_LEASE_MS) for receipt in self._held]
            if items:
                with contextlib.suppress(MillstreamError):  # whoever has lost a lease finds out before the next attempt
                    await self._broker.call(self._session, queue_calls.SettleMessages(items=items))

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

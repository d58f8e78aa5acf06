"""All webhooks of the broker: facts of a state log, a runner for each that is not paused, and their control calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from millstream.broker.state import StateLog
from millstream.broker.webhooks.runner import Runner, Tally
from millstream.broker.webhooks.sender import Sender, TargetForbidden
from millstream.clock import Clock
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    NamespaceNotFound,
    QuotaExceeded,
    RequestError,
    TopicNotFound,
    WebhookNotFound,
)
from millstream.names import did_you_mean, is_pattern
from millstream.webhooks.content import compose_test
from millstream.webhooks.registration import Secret, Webhook, check_secret, check_webhook, rotated, valid_secrets
from millstream.webhooks.targets import parse_target
from millstream.wire import webhook_calls
from millstream.wire.webhook_calls import WebhookCreated, WebhookInfo, WebhookTested

if TYPE_CHECKING:
    from millstream.broker.broker import Broker, Session

__all__ = ["Webhooks"]

_log = structlog.get_logger("millstream.webhooks")

_WEBHOOKS_MAX: Final = 1_000
_RETRY_S: Final = 1.0
#: Names among which one is looked for that was perhaps meant; each takes some microseconds.
_GUESSED_MAX: Final = 1_000
#: Somebody waits for the answer to a test.
_TEST_TIMEOUT_S: Final = 10.0


class _Entry:
    """A webhook and what runs for it."""

    def __init__(self, webhook: Webhook) -> None:
        self.webhook = webhook
        self.tally = Tally()
        self.runner: Runner | None = None
        self.changing = asyncio.Lock()

    def info(self, now_ms: int) -> WebhookInfo:
        webhook, tally = self.webhook, self.tally
        old = valid_secrets(webhook, now_ms)[1:]
        return WebhookInfo(
            id=webhook.id,
            topic=webhook.topic,
            group=webhook.group,
            url=parse_target(webhook.url).shown,
            state="paused" if webhook.paused else "failing" if tally.consecutive_failures else "active",
            paused_reason=webhook.reason,
            header_names=sorted(webhook.headers),
            concurrency=webhook.concurrency,
            rate=webhook.rate,
            timeout_ms=webhook.timeout_ms,
            retry_delays_ms=webhook.retry_delays_ms,
            reject_client_errors=webhook.reject_client_errors,
            payload=webhook.payload,
            created_ms=webhook.created_ms,
            rotating_until_ms=max((secret.until_ms for secret in old), default=0),
            delivered=tally.delivered,
            failed=tally.failed,
            dead=tally.dead,
            in_flight=self.runner.in_flight if self.runner is not None else 0,
            consecutive_failures=tally.consecutive_failures,
            last_error=tally.last_error,
            last_status=tally.last_status,
            last_delivery_ms=tally.last_delivery_ms,
        )


class Webhooks:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(
        self,
        broker: Broker,
        log: StateLog,
        sender: Sender,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        draw_id: Callable[[], str],
        draw_secret: Callable[[], str],
    ) -> None:
        self._broker = broker
        self._log = log
        self._sender = sender
        self._clock = clock
        self._loop = loop
        self._draw_id = draw_id
        self._draw_secret = draw_secret
        self._entries: dict[str, _Entry] = {}
        self._creating = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            webhook_calls.CreateWebhook: self._create,
            webhook_calls.ListWebhooks: self._list,
            webhook_calls.DescribeWebhook: self._describe,
            webhook_calls.UpdateWebhook: self._update,
            webhook_calls.PauseWebhook: self._pause,
            webhook_calls.RotateSecret: self._rotate,
            webhook_calls.DeleteWebhook: self._delete,
            webhook_calls.TestWebhook: self._test,
        }

    # --- life ----------------------------------------------------------------------------------------------------

    def replay(self, documents: Mapping[str, Any]) -> None:
        for document in documents.values():
            webhook = msgspec.convert(document, Webhook)
            self._entries[webhook.id] = _Entry(webhook)

    def start(self) -> None:
        """Go on with what the last run of the broker has left; what is registered needs no asking again."""
        for entry in self._entries.values():
            if not entry.webhook.paused:
                self._own(self._take_up(entry))

    async def stop(self) -> None:
        """Send no more; what is in hand goes back to its queue."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        runners = [entry.runner for entry in self._entries.values() if entry.runner is not None]
        await asyncio.gather(*(runner.close() for runner in runners), *self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.error("background work failed", work=repr(task.get_coro()), exc_info=problem)

    async def _take_up(self, entry: _Entry) -> None:
        while True:
            try:
                async with entry.changing:
                    self._check_there(entry)
                    if entry.runner is None and not entry.webhook.paused:
                        await self._run(entry)
                return
            except RequestError as error:  # its topic is gone, or it was deleted itself
                await self._pause_itself(entry, str(error))
                return
            except MillstreamError as error:
                _log.warning("a webhook waits", webhook=entry.webhook.id, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _run(self, entry: _Entry, start: str = "") -> None:
        runner = Runner(
            self._broker,
            self._sender,
            entry.webhook,
            entry.tally,
            clock=self._clock,
            metrics=self._broker.metrics,
            on_stop=lambda reason: self._own(self._pause_itself(entry, reason)),
        )
        try:
            await runner.open(start)
        except BaseException:
            await runner.close()
            raise
        entry.runner = runner
        runner.start()

    async def _halt(self, entry: _Entry) -> None:
        runner, entry.runner = entry.runner, None
        if runner is not None:
            await runner.close()

    async def _pause_itself(self, entry: _Entry, reason: str) -> None:
        if self._closed:
            return
        async with entry.changing:
            webhook = entry.webhook
            if webhook.paused or webhook.id not in self._entries:
                return
            _log.warning("a webhook paused itself", webhook=webhook.id, topic=webhook.topic, reason=reason)
            entry.webhook = msgspec.structs.replace(webhook, paused=True, reason=reason)
            await self._halt(entry)
            await self._record(entry.webhook)

    async def forget_namespace(self, namespace: str) -> None:
        """A namespace is gone, and its topics with it."""
        for entry in [entry for entry in self._entries.values() if entry.webhook.namespace == namespace]:
            await self._remove(entry)

    async def _record(self, webhook: Webhook) -> None:
        await self._log.record({webhook.id: msgspec.to_builtins(webhook)}, now_us=self._clock.now_us())

    # --- calls ---------------------------------------------------------------------------------------------------

    async def _create(self, session: Session, call: webhook_calls.CreateWebhook) -> WebhookCreated:
        # With those that are being made: it takes a while, and many may be made at once.
        if len(self._entries) + self._creating >= _WEBHOOKS_MAX:
            raise QuotaExceeded(f"a broker has {_WEBHOOKS_MAX} webhooks at most")
        self._creating += 1
        try:
            return await self._make(session, call)
        finally:
            self._creating -= 1

    async def _make(self, session: Session, call: webhook_calls.CreateWebhook) -> WebhookCreated:
        secret = check_secret(call.secret) if call.secret else self._draw_secret()
        webhook = Webhook(
            id=self._draw_id(),
            namespace=session.namespace,
            topic=call.topic,
            group=call.group,
            url=call.url,
            created_ms=self._now_ms(),
            secrets=[Secret(secret)],
            **_given(call.options),
        )
        await self._check(webhook)
        self._check_topic(session, call.topic)
        namespaces = self._broker.topics.registry.namespaces
        home = namespaces.get(webhook.namespace)
        entry = _Entry(webhook)
        async with entry.changing:
            await self._run(entry, call.start)
            try:
                await self._record(webhook)
            except BaseException:
                await self._halt(entry)
                raise
            self._entries[webhook.id] = entry
        if home is not None and namespaces.get(webhook.namespace) is not home:  # it was deleted, perhaps made again
            await self._remove(entry)
            raise NamespaceNotFound(f"namespace {webhook.namespace!r} was deleted")
        _log.info("webhook created", webhook=webhook.id, topic=webhook.topic, group=webhook.group)
        return WebhookCreated(webhook=entry.info(self._now_ms()), secret=secret)

    async def _list(self, session: Session, call: webhook_calls.ListWebhooks) -> list[WebhookInfo]:
        now_ms = self._now_ms()
        infos = [entry.info(now_ms) for entry in self._entries.values() if entry.webhook.namespace == session.namespace]
        wanted = [info for info in infos if call.topic in (None, info.topic) and call.group in (None, info.group)]
        return sorted(wanted, key=lambda info: (info.topic, info.group, info.created_ms, info.id))

    async def _describe(self, session: Session, call: webhook_calls.DescribeWebhook) -> WebhookInfo:
        return self._get(session, call.id).info(self._now_ms())

    async def _update(self, session: Session, call: webhook_calls.UpdateWebhook) -> WebhookInfo:
        entry = self._get(session, call.id)
        async with entry.changing:
            self._check_there(entry)
            changes = _given(call.options)
            if call.url is not None:
                changes["url"] = call.url
            webhook = msgspec.structs.replace(entry.webhook, **changes)
            await self._check(webhook)
            if entry.runner is not None:
                entry.runner.check(webhook)
            await self._change(entry, webhook)
        return entry.info(self._now_ms())

    async def _pause(self, session: Session, call: webhook_calls.PauseWebhook) -> WebhookInfo:
        entry = self._get(session, call.id)
        async with entry.changing:
            self._check_there(entry)
            if call.paused != entry.webhook.paused:
                webhook = msgspec.structs.replace(entry.webhook, paused=call.paused, reason="")
                if call.paused:
                    await self._change(entry, webhook)
                    await self._halt(entry)
                else:
                    await self._resume(entry, webhook)
        return entry.info(self._now_ms())

    async def _resume(self, entry: _Entry, webhook: Webhook) -> None:
        before, entry.webhook = entry.webhook, webhook
        entry.tally.consecutive_failures = 0
        try:
            await self._run(entry)
            await self._record(webhook)
        except BaseException:
            entry.webhook = before
            await self._halt(entry)
            raise

    async def _rotate(self, session: Session, call: webhook_calls.RotateSecret) -> WebhookCreated:
        entry = self._get(session, call.id)
        secret = call.secret or self._draw_secret()
        async with entry.changing:
            self._check_there(entry)
            webhook = rotated(entry.webhook, secret, keep_ms=call.keep_ms, now_ms=self._now_ms())
            await self._change(entry, webhook)
        _log.info("webhook secret replaced", webhook=webhook.id)
        return WebhookCreated(webhook=entry.info(self._now_ms()), secret=secret)

    async def _delete(self, session: Session, call: webhook_calls.DeleteWebhook) -> None:
        await self._remove(self._get(session, call.id))

    async def _test(self, session: Session, call: webhook_calls.TestWebhook) -> WebhookTested:
        webhook = self._get(session, call.id).webhook
        request = compose_test(webhook, now_ms=self._now_ms())
        began_s = self._loop.time()
        timeout_s = min(webhook.timeout_ms / 1000, _TEST_TIMEOUT_S)
        try:
            answer = await self._sender.post(
                parse_target(webhook.url), request.headers, request.body, timeout_s=timeout_s
            )
        except TargetForbidden as problem:
            raise InvalidArgument(str(problem)) from None
        return WebhookTested(
            delivered=answer.is_success,
            status=answer.status,
            error="" if answer.is_success else answer.error,
            took_ms=round((self._loop.time() - began_s) * 1000),
        )

    # --- what they have in common --------------------------------------------------------------------------------

    def _get(self, session: Session, webhook_id: str) -> _Entry:
        entry = self._entries.get(webhook_id)
        if entry is None or entry.webhook.namespace != session.namespace:
            raise WebhookNotFound(f"there is no webhook {webhook_id[:80]!r}")
        return entry

    def _check_topic(self, session: Session, name: str) -> None:
        """Raises TopicNotFound, with a name that was perhaps meant, of those that this client may know of."""
        registry, namespace = self._broker.topics.registry, session.namespace
        if is_pattern(name) or registry.find(namespace, name) is not None:
            return
        try:
            registry.get(namespace, name)
        except TopicNotFound as error:
            names = (topic.name for topic in registry.matching(namespace, None))
            known = (other for other in names if session.access.sees(namespace, other))
            raise TopicNotFound(f"{error}{did_you_mean(name, islice(known, _GUESSED_MAX))}") from None

    async def _check(self, webhook: Webhook) -> None:
        check_webhook(webhook)
        try:
            await self._sender.check(parse_target(webhook.url))
        except TargetForbidden as problem:
            raise InvalidArgument(str(problem)) from None

    def _check_there(self, entry: _Entry) -> None:
        """For whoever has waited for its turn to change a webhook.  Raises WebhookNotFound: it may be gone by now."""
        if entry.webhook.id not in self._entries:
            raise WebhookNotFound(f"webhook {entry.webhook.id!r} was deleted")

    async def _change(self, entry: _Entry, webhook: Webhook) -> None:
        await self._record(webhook)
        entry.webhook = webhook
        if entry.runner is not None:
            entry.runner.replace(webhook)

    async def _remove(self, entry: _Entry) -> None:
        async with entry.changing:
            webhook = entry.webhook
            if self._entries.pop(webhook.id, None) is None:
                return
            try:
                await self._log.record({webhook.id: None}, now_us=self._clock.now_us())
            except BaseException:
                self._entries[webhook.id] = entry
                raise
            await self._halt(entry)
        _log.info("webhook deleted", webhook=webhook.id)

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000


def _given(options: webhook_calls.WebhookOptions) -> dict[str, Any]:
    """The options that somebody has set."""
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}

"""The asynchronous client: the same words as the synchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ssl
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

from millstream.addresses import DEFAULT_ADDRESS
from millstream.client.address import Target
from millstream.client.arguments import as_list
from millstream.client.asking import T
from millstream.client.asynchronous.admin import AsyncAdmin
from millstream.client.asynchronous.connection import AsyncLink
from millstream.client.asynchronous.ongoing import Ongoing
from millstream.client.asynchronous.opening import Opening, OpeningStream
from millstream.client.asynchronous.producer import AsyncProducer
from millstream.client.asynchronous.pubsub import AsyncPubSub
from millstream.client.asynchronous.queue import AsyncQueue
from millstream.client.asynchronous.stream import AsyncStream
from millstream.client.asynchronous.subscription import AsyncSubscription
from millstream.client.asynchronous.work import AsyncWork
from millstream.client.functions import refuse_asynchronous
from millstream.client.messages import BatchFailure, Message, Outgoing, Receipt, TopicPartition
from millstream.client.metadata import METADATA_AGE_S, Topic, is_repeatable, remember_topic
from millstream.client.publishing import as_entries, fsync_number
from millstream.client.settings import ProducerSettings, StartAt, StreamSettings
from millstream.client.spans import traced
from millstream.client.values import Headers, Key, Value, make_entry
from millstream.durations import Duration
from millstream.entries import AnyEntry, Priority
from millstream.errors import ConnectionLost, InvalidArgument, MillstreamError, RequestError
from millstream.names import DEFAULT_NAMESPACE, check_topic
from millstream.vigil import Vigil
from millstream.wire import calls
from millstream.wire.lookups import metadata_for

__all__ = ["AsyncClient", "connect"]

#: What a client opens, and closes with itself.
_Child: TypeAlias = AsyncProducer | AsyncStream | AsyncQueue | AsyncSubscription

#: Memory for messages published but not confirmed, per topic.
_PUBLISH_BUFFER_BYTES = 32 * 1024 * 1024
#: Beyond so many topics, those that nobody has published to for some time are let go.
_PUBLISHERS_MAX = 1000
_UNUSED_S = 10.0
#: How soon a program that publishes all the time comes with its next messages; a confirmation may take twice as long.
_STAY_AWAKE_US = 300


def connect(
    address: str = DEFAULT_ADDRESS,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    client_id: str | None = None,
    key: str | None = None,
    tls: bool | ssl.SSLContext | None = None,
    ca: str | None = None,
    timeout_s: float = 30.0,
    stay_awake: bool = True,
) -> Opening[AsyncClient]:
    """Connect to a broker: `async with connect(...) as client`, or `client = await connect(...)`.

    `key` is an API key; without it, the environment variable MILLSTREAM_KEY is used.  `tls` encrypts the connection, as
    does an address that begins with `tls://`.  `ca` names a file of certificate authorities to trust instead of those
    of this machine.

    `timeout_s` is how long any request may take, reconnecting included, before it raises RequestTimeout or
    ConnectionLost.

    With `stay_awake`, a program that publishes without a pause stays awake while it waits for confirmations that take
    less than 0.6 ms.  It gets one and a half times to twice as many messages through, and keeps a processor busy
    meanwhile.
    """
    target = Target.of(
        address,
        namespace=namespace,
        client_id=client_id,
        key=key,
        timeout_s=timeout_s,
        tls=tls,
        ca=ca,
        stay_awake=stay_awake,
    )

    async def open_client() -> AsyncClient:
        client = AsyncClient(target)
        await client.open()
        return client

    return Opening(open_client)


class AsyncClient(AsyncAdmin, AsyncPubSub, AsyncWork):
    """A connection to a broker, for the tasks of one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link = AsyncLink(target)
        #: Keeps the loop awake for confirmations that are about to come.
        self._vigil = Vigil(asyncio.get_running_loop(), _STAY_AWAKE_US if target.stay_awake else 0)
        self._prepare_pubsub()
        self._prepare_work()
        self._topics: dict[str, Topic] = {}
        self._link.listen(self._topics.clear)  # after a restart of the broker, what it keeps in memory is another topic
        self._publishers: dict[tuple[str, str | None], AsyncProducer] = {}
        #: When there are so many of them, look which are not used any more.
        self._publishers_limit = _PUBLISHERS_MAX
        #: Those that are being opened, each once for all who wait for it.
        self._opening: dict[tuple[str, str | None], Ongoing[AsyncProducer]] = {}
        #: Those whose topic is not what it was, while they are being closed.
        self._leaving: set[asyncio.Task[None]] = set()
        self._children: weakref.WeakSet[_Child] = weakref.WeakSet()
        self._closed = False

    # --- life ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._link.open()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(MillstreamError):  # the exception that ended the block says more
            await self.close()

    async def close(self) -> None:
        """Stop the workers, close queues, streams and producers (producers flush), then close the connection.

        If a close was cancelled, call it again to close what the first one did not get to.  The producer that the first
        one was flushing has given up what was not confirmed.
        """
        await self._stop_workers()
        self._closed = True
        for opening in self._opening.values():
            opening.cancel()
        failure: Exception | None = None
        for child in [*self._children, *self._publishers.values()]:
            try:
                await child.close()
            except Exception as error:  # also of a callback of the user's: the others have messages to send
                failure = failure or error
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self._requester.close()
        self._link.close()
        if failure is not None:
            raise failure

    def _adopt(self, child: _Child) -> None:
        """Before it connects, if it can be: who closes the client closes it, however far it has come."""
        self._check_open()
        self._link.check_loop()
        self._children.add(child)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("the client is closed")

    # --- requests ------------------------------------------------------------------------------------------------

    async def _call(self, call: calls.Call, kind: type[T]) -> T:
        answer: T = await self._link.call(call, kind, repeatable=is_repeatable(call))
        if isinstance(call, calls.AlterTopic | calls.DeleteTopic):
            await self._forget(call.name)
        return answer

    async def _forget(self, topic: str) -> None:
        """A topic is no longer what it was."""
        self._topics.pop(topic, None)
        for key in [key for key in self._publishers if key[0] == topic]:
            publisher = self._publishers.pop(key, None)
            if publisher is not None:
                await _close_quietly(publisher)

    def _drop(self, key: tuple[str, str | None], publisher: AsyncProducer) -> None:
        """The broker does not know its topic any more, or not all partitions: what comes next is for another one."""
        self._topics.pop(key[0], None)
        if self._publishers.get(key) is publisher:
            del self._publishers[key]
            leaving = asyncio.get_running_loop().create_task(_close_quietly(publisher))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def call(self, call: calls.Call, kind: Any) -> Any:
        """Make any call of the control protocol, for what has no method of its own."""
        return await self._call(call, kind)

    async def _topic(
        self,
        name: str,
        entries: Sequence[AnyEntry] = (),
        partitions: Sequence[int | None] = (),
        *,
        refresh: bool = False,
    ) -> Topic:
        """What is known about a topic; looked up when it is not, and created for these messages if the broker may."""
        topic = self._topics.get(name) if isinstance(name, str) else None
        if topic is None or refresh or time.monotonic() - topic.loaded_s > METADATA_AGE_S:
            check_topic(name)
            call = metadata_for(name, entries, partitions)
            found: list[calls.TopicMetadata] = await self._call(call, list[calls.TopicMetadata])
            topic = remember_topic(self._topics, name, found, time.monotonic())
        return topic

    async def _look_up(self, name: str) -> Topic:
        return await self._topic(name, refresh=True)

    async def _new_identity(self) -> int:
        answer = await self._call(calls.NewProducer(), calls.ProducerIdentity)
        return answer.producer_id << 16 | answer.epoch

    # --- publish -------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        value: Value = None,
        *,
        key: Key = None,
        headers: Headers | None = None,
        json: Any = None,
        partition: int | None = None,
        priority: Priority | None = None,
        delay: Duration | None = None,
        deliver_at: float | datetime | None = None,
        ttl: Duration | None = None,
        timestamp: float | datetime | None = None,
        dedup_id: str | None = None,
        max_retries: int | None = None,
        lease: Duration | None = None,
        fsync: Literal["group", "interval", "always", "never"] | None = None,
    ) -> Receipt:
        """Publish one message and wait until it is stored as safely as the topic (or `fsync`) says.

        Messages that many tasks publish at the same time travel together, and none suffers from another.  A message is
        never stored twice; after RequestTimeout or ConnectionLost it may or may not be stored.

        A `datetime` without a time zone is local time, here as everywhere in the SDK.
        """
        headers = traced(headers)
        plain = key is json is headers is None and priority is delay is deliver_at is ttl is timestamp is None
        plain = plain and partition is None and dedup_id is None and max_retries is None and lease is None
        if plain and type(value) is bytes and type(topic) is str:
            publisher = self._publishers.get((topic, fsync))
            future = None if publisher is None else publisher.submit_quickly(value, None, alone=True)
            if future is not None:
                return await future
        entry = make_entry(
            value,
            key,
            headers,
            json=json,
            partition=partition,
            priority=priority,
            delay=delay,
            deliver_at=deliver_at,
            ttl=ttl,
            timestamp=timestamp,
            dedup_id=dedup_id,
            max_retries=max_retries,
            lease=lease,
        )
        return await (await self._submit(topic, entry, partition, fsync, alone=True))

    async def publish_many(self, topic: str, messages: Iterable[Value | Outgoing | Message]) -> list[Receipt]:
        """Publish values (or `Outgoing`, for keys and the rest) together; return receipts in the order given.

        If the broker refuses some of them, this raises its error.  The error's `confirmed` has the receipts of the
        messages that are stored nevertheless, by their place in `messages`.
        """
        _check_text(topic)
        entries = as_entries(messages)
        futures: list[asyncio.Future[Receipt]] = []
        failure: BaseException | None = None
        try:
            if entries and (topic, None) not in self._publishers:
                await self._open_publisher(topic, None, *zip(*entries, strict=True))
            if (publisher := self._publishers.get((topic, None))) is not None:
                publisher.check_sizes(entries)  # of all of them before the first is sent
            for entry, partition in entries:
                publisher = self._publishers.get((topic, None))
                quick = publisher and publisher.submit_quickly(entry, partition, alone=False)
                futures.append(quick or await self._submit(topic, entry, partition, None, alone=False))
        except MillstreamError as error:
            failure = error
        outcomes = await _outcomes(futures)
        receipts = {at: outcome for at, outcome in enumerate(outcomes) if isinstance(outcome, Receipt)}
        if len(receipts) == len(entries):
            return list(receipts.values())
        failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), failure)
        assert failure is not None
        if isinstance(failure, MillstreamError):
            shared, failure = failure, copy.copy(failure)  # others may have had messages in the same batch
            failure.confirmed = receipts
            raise failure from shared
        raise failure

    async def _submit(
        self, topic: str, entry: AnyEntry, partition: int | None, fsync: str | None, *, alone: bool
    ) -> asyncio.Future[Receipt]:
        _check_text(topic)
        while True:
            publisher = self._publishers.get((topic, fsync))
            if publisher is None or publisher.closing:
                publisher = await self._open_publisher(topic, fsync, (entry,), (partition,))
            try:
                return await publisher.submit(entry, partition, alone=alone)
            except InvalidArgument:
                if not publisher.closing:
                    raise  # else its topic was changed, or the client is closed

    async def _open_publisher(
        self, topic: str, fsync: str | None, entries: Sequence[AnyEntry], partitions: Sequence[int | None]
    ) -> AsyncProducer:
        fsync_number(fsync)
        key = (topic, fsync)
        while True:
            self._check_open()
            if (known := self._publishers.get(key)) is not None:
                return known
            opening = self._opening.get(key)
            if opening is None:
                ours = Ongoing(lambda: self._begin_publisher(topic, fsync, entries, partitions))
                self._opening[key] = ours
                return await ours.result()
            try:
                return await opening.result()
            except RequestError:
                pass  # for what somebody else wanted to publish; what we have may be taken

    async def _begin_publisher(
        self, topic: str, fsync: str | None, entries: Sequence[AnyEntry], partitions: Sequence[int | None]
    ) -> AsyncProducer:
        try:
            if len(self._publishers) >= self._publishers_limit:
                await self._close_unused()
            settings = ProducerSettings(
                linger_ms=0,
                batch_bytes=256 * 1024,
                batch_messages=10_000,
                acks="leader",
                compression=None,
                buffer_bytes=_PUBLISH_BUFFER_BYTES,
                window=8,
                delivery_timeout_s=self._target.timeout_s,
                send_timeout_s=self._target.timeout_s,
                partition=None,
                fsync=fsync,
            )
            publisher: AsyncProducer
            publisher = self._publishers[topic, fsync] = AsyncProducer(
                self._link,
                await self._topic(topic, entries, partitions),
                settings,
                await self._new_identity(),
                request_timeout_s=self._target.timeout_s,
                new_identity=self._new_identity,
                look_up=self._look_up,
                on_gone=lambda: self._drop((topic, fsync), publisher),
                owns_link=False,
                flow=self._flow,
                vigil=self._vigil,
            )
            return publisher
        finally:
            del self._opening[topic, fsync]

    async def _close_unused(self) -> None:
        """Let go of publishers, for a program that publishes to ever new topics."""
        unused = [key for key, publisher in self._publishers.items() if publisher.unused_s >= _UNUSED_S]
        closing = [self._publishers.pop(key) for key in unused]
        self._publishers_limit = max(_PUBLISHERS_MAX, 2 * len(self._publishers))
        for publisher in closing:
            await _close_quietly(publisher)

    # --- producers and streams -----------------------------------------------------------------------------------

    def producer(
        self,
        topic: str,
        *,
        linger_ms: float = 5,
        batch_bytes: int = 524_288,
        batch_messages: int = 10_000,
        acks: Literal["none", "leader", "all"] = "leader",
        compression: Literal["lz4", "zstd"] | None = None,
        buffer_bytes: int = 32 * 1024 * 1024,
        window: int = 16,
        delivery_timeout_s: float = 120.0,
        send_timeout_s: float | None = None,
        partition: int | None = None,
        fsync: Literal["group", "interval", "always", "never"] | None = None,
        on_error: Callable[[BatchFailure], None] | None = None,
    ) -> Opening[AsyncProducer]:
        """Return a producer that batches in the background, for `async with` or `await`; see `AsyncProducer`."""
        refuse_asynchronous("on_error", on_error)
        settings = ProducerSettings(
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            batch_messages=batch_messages,
            acks=acks,
            compression=compression,
            buffer_bytes=buffer_bytes,
            window=window,
            delivery_timeout_s=delivery_timeout_s,
            send_timeout_s=self._target.timeout_s if send_timeout_s is None else send_timeout_s,
            partition=partition,
            fsync=fsync,
        )

        async def open_producer() -> AsyncProducer:
            self._check_open()
            known = await self._topic(topic)
            identity = await self._new_identity() if acks != "none" else 0
            link = AsyncLink(self._target)
            await link.open()
            try:
                self._check_open()  # again: nobody would close what it makes now
                producer = AsyncProducer(
                    link,
                    known,
                    settings,
                    identity,
                    request_timeout_s=self._target.timeout_s,
                    new_identity=self._new_identity,
                    look_up=self._look_up,
                    on_error=on_error,
                )
            except BaseException:
                link.close()
                raise
            self._adopt(producer)
            return producer

        return Opening(open_producer)

    def stream(
        self,
        topics: str | Iterable[str],
        *,
        group: str | None = None,
        start: StartAt = "earliest",
        partitions: Iterable[int] | None = None,
        commit: Literal["auto", "manual"] = "auto",
        commit_interval_s: float = 5.0,
        strategy: Literal["range", "round_robin", "sticky"] = "sticky",
        protocol: Literal["cooperative", "eager"] = "cooperative",
        instance_id: str | None = None,
        session_ms: int = 30_000,
        rebalance_ms: int = 120_000,
        max_bytes: int = 2 * 1024 * 1024,
        timeout_s: float | None = None,
        on_assigned: Callable[[list[TopicPartition]], object] | None = None,
        on_revoked: Callable[[list[TopicPartition], bool], object] | None = None,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> OpeningStream:
        """Read topics, with `async for`, `async with` or `await`; see `AsyncStream`.

        The callbacks may be coroutine functions.
        """
        settings = StreamSettings(
            topics=(topics,) if isinstance(topics, str | bytes) else tuple(as_list("topics", topics)),
            group=group,
            start=start if not isinstance(start, Mapping) else dict(start),
            partitions=None if partitions is None else tuple(as_list("partitions", partitions)),
            commit=commit,
            commit_interval_s=commit_interval_s,
            strategy=strategy,
            protocol=protocol,
            instance_id=instance_id,
            session_ms=session_ms,
            rebalance_ms=rebalance_ms,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_damage=on_damage,
        )

        async def open_stream() -> AsyncStream:
            stream = AsyncStream(self._target, settings, self._call)
            stream.reply_with(self._replier)
            self._adopt(stream)
            await stream.open()
            return stream

        return OpeningStream(open_stream)


def _check_text(topic: Any) -> None:
    if not isinstance(topic, str):  # a list, say, which nothing could be looked up by
        check_topic(topic)


async def _close_quietly(publisher: AsyncProducer) -> None:
    with contextlib.suppress(MillstreamError):  # those who published were told
        await publisher.close()


async def _outcomes(futures: Sequence[asyncio.Future[Receipt]]) -> list[Receipt | BaseException]:
    """What became of all of them, as `asyncio.gather` would say it.

    They end by the batch: waiting for the first of each that has not ended costs next to nothing for the others.
    """
    try:
        for future in futures:
            if not future.done():
                await asyncio.wait((future,))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return [
        asyncio.CancelledError() if future.cancelled() else future.exception() or future.result() for future in futures
    ]

"""The synchronous client: publishing one by one, and the way to producers, streams and administration."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from millstream.addresses import DEFAULT_ADDRESS
from millstream.client.address import Target
from millstream.client.arguments import as_list
from millstream.client.asking import T
from millstream.client.blocking.admin import Admin
from millstream.client.blocking.knock import Flag
from millstream.client.blocking.link import Link
from millstream.client.blocking.producer import Producer
from millstream.client.blocking.publisher import Publisher
from millstream.client.blocking.pubsub import PubSub
from millstream.client.blocking.queue import Queue
from millstream.client.blocking.stream import Stream
from millstream.client.blocking.subscription import Subscription
from millstream.client.blocking.work import Work
from millstream.client.forks import belongs_to_one_process
from millstream.client.functions import refuse_asynchronous
from millstream.client.messages import (
    BatchFailure,
    Message,
    Outgoing,
    Receipt,
    TopicPartition,
    receipt,
    receipts,
)
from millstream.client.metadata import METADATA_AGE_S, Topic, remember_topic
from millstream.client.publishing import as_entries, fsync_number, plan_batches
from millstream.client.settings import ProducerSettings, StartAt, StreamSettings
from millstream.client.spans import traced
from millstream.client.values import Headers, Key, Value, make_entry
from millstream.durations import Duration
from millstream.entries import AnyEntry, Priority
from millstream.errors import ConnectionLost, MillstreamError
from millstream.names import DEFAULT_NAMESPACE, check_topic
from millstream.wire import calls
from millstream.wire.lookups import metadata_for

__all__ = ["Client", "connect"]

_log = logging.getLogger("millstream.client")


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
) -> Client:
    """Connect to a broker.  Raises ConnectionLost if nobody answers there.

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
    return Client(target)


class Client(Admin, PubSub, Work):
    """A connection to a broker, safe to share between threads."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link = Link(target)
        self._link.open()
        self._topics: dict[str, Topic] = {}
        self._publisher = Publisher(self._link, self._topics, target.timeout_s)
        self._open_pubsub()
        self._prepare_work()
        self._children: weakref.WeakSet[Producer | Stream | Queue | Subscription] = weakref.WeakSet()
        self._children_lock = threading.RLock()  # the background thread looks at them, and a signal's handler may
        self._closing = False
        self._closed = Flag()
        self._keeper: threading.Thread | None = None
        self._keep()
        me = weakref.ref(self)

        def connected() -> None:
            client = me()
            if client is not None:
                client._publisher.connected()
                with contextlib.suppress(RuntimeError):  # no more threads, or the program ends
                    client._keep()

        self._link.on_open = connected
        belongs_to_one_process(self)

    def _keep(self) -> None:
        """Have a thread keep connections alive.  In a child it begins when it is needed: most never use the client."""
        with self._children_lock:
            if self._keeper is None:
                keeper = threading.Thread(
                    target=_keep_alive, args=(weakref.ref(self), self._closed), name="millstream-keepalive", daemon=True
                )
                keeper.start()
                self._keeper = keeper

    def _forked(self) -> None:
        """The thread is the parent's, and the lock may be held by another one that is not here."""
        self._keeper = None
        self._children_lock = threading.RLock()

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(MillstreamError):  # the exception that ended the block says more
            self.close()

    def _adopt(self, child: Producer | Stream | Queue | Subscription) -> None:
        """Before it connects, if it can be: who closes the client closes it, however far it has come."""
        with self._children_lock:
            self._check_open()
            self._keep()
            self._children.add(child)

    def _check_open(self) -> None:
        if self._closing:
            raise ConnectionLost("the client is closed")

    def _family(self) -> list[Producer | Stream | Queue | Subscription]:
        with self._children_lock:
            return list(self._children)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._closed.set()

    def close(self) -> None:
        """Stop the workers, close queues, streams and producers (producers flush), then close the connection."""
        self._stop_workers()
        with self._children_lock:
            self._closing = True
        failure: Exception | None = None
        for child in self._family():
            try:
                child.close()
            except Exception as error:  # also of a callback of the user's: the others have messages to send
                failure = failure or error
        self._closed.set()
        self._link.close()
        if failure is not None:
            raise failure

    def keep_alive(self, now_s: float) -> None:
        """Keep idle connections alive, which the broker would close.  The background thread calls this."""
        self._link.keep_alive(now_s)
        for child in self._family():
            if not isinstance(child, Producer):
                child.keep_alive(now_s)

    @property
    def heartbeat_s(self) -> float:
        connection = self._link.current
        return connection.transport.welcome.heartbeat_ms / 3000 if connection is not None else 10.0

    # --- requests ------------------------------------------------------------------------------------------------

    def _call(self, call: calls.Call, kind: type[T]) -> T:
        answer: T = self._link.call(call, kind)
        if isinstance(call, calls.AlterTopic | calls.DeleteTopic):
            self._topics.pop(call.name, None)
        return answer

    def call(self, call: calls.Call, kind: Any) -> Any:
        """Make any call of the control protocol, for what has no method of its own."""
        return self._call(call, kind)

    def _topic(
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
            found: list[calls.TopicMetadata] = self._call(call, list[calls.TopicMetadata])
            topic = remember_topic(self._topics, name, found, time.monotonic())
        return topic

    def _as_stored(self, known: Topic) -> Topic:
        """A topic that something was stored in, for receipts: with the connection its partitions may have changed."""
        now = self._topics.get(known.name)
        if now is None:
            with contextlib.suppress(MillstreamError):  # what is stored is stored
                found = self._call(calls.Metadata(topics=[known.name]), list[calls.TopicMetadata])
                now = remember_topic(self._topics, known.name, found, time.monotonic())
        return known if now is None or len(now.uids) < len(known.uids) else now

    def _new_identity(self) -> int:
        return self._publisher.new_identity()

    # --- publish -------------------------------------------------------------------------------------------------

    def publish(
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

        Errors that can be retried are retried, and a message is never stored twice.  After RequestTimeout or
        ConnectionLost it may or may not be stored.

        A `datetime` without a time zone is local time, here as everywhere in the SDK.
        """
        entry: AnyEntry
        headers = traced(headers)
        plain = key is json is headers is None and priority is delay is deliver_at is ttl is timestamp is None
        if (
            plain
            and partition is None
            and dedup_id is None
            and max_retries is None
            and lease is None
            and type(value) is bytes
        ):
            entry = value
        else:
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
        entries, partitions = (entry,), (partition,)
        known = self._topic(topic, entries, partitions)
        if partition is not None and partition >= len(known.uids):
            known = self._topic(topic, entries, partitions, refresh=True)  # it may have been added since
        known.check_size(entry)
        chosen = known.choose(entry, partition)
        result = self._publisher.publish(known, chosen, entries, 0 if fsync is None else fsync_number(fsync))
        return receipt(known.place(chosen), self._as_stored(known).uid(chosen), result)

    def publish_many(self, topic: str, messages: Iterable[Value | Outgoing | Message]) -> list[Receipt]:
        """Publish values (or `Outgoing`, for keys and the rest) in batches; return receipts in the order given.

        If the broker refuses a batch, this raises the error of that batch and does not send the batches behind it.  The
        error's `confirmed` has the receipts of the messages that are stored nevertheless, by their place in `messages`.
        """
        entries = as_entries(messages)
        wanted = [entry for entry, _ in entries], [partition for _, partition in entries]
        known = self._topic(topic, *wanted)
        if any(partition is not None and partition >= len(known.uids) for _, partition in entries):
            known = self._topic(topic, *wanted, refresh=True)  # it may have been added since
        confirmed: dict[int, Receipt] = {}
        for partition, indexes, batch in plan_batches(known, entries):
            try:
                result = self._publisher.publish(known, partition, batch, 0)
            except MillstreamError as error:
                error.confirmed = confirmed
                raise
            uid = self._as_stored(known).uid(partition)
            made = receipts(known.place(partition), uid, result, len(indexes))
            confirmed.update(zip(indexes, made, strict=True))
        return [confirmed[at] for at in range(len(confirmed))]

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
    ) -> Producer:
        """Return a producer that batches in the background; see `Producer`."""
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
        self._check_open()
        known = self._topic(topic)
        identity = self._new_identity() if acks != "none" else 0
        producer = Producer(
            self._target,
            known,
            settings,
            identity,
            new_identity=self._new_identity,
            look_up=lambda name: self._topic(name, refresh=True),
            on_error=on_error,
        )
        try:
            self._adopt(producer)
        except ConnectionLost:
            producer.close()
            raise
        return producer

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
    ) -> Stream:
        """Read topics; see `Stream`.

        With a group, the broker keeps the progress, and the group's members share the partitions; `start` matters only
        where the group has no (usable) progress.  Without a group, all partitions (or `partitions`) are read.  Topics
        and partitions that are made later are read from their first message, unless a group starts at an offset or a
        time.
        """
        refuse_asynchronous("on_assigned", on_assigned)
        refuse_asynchronous("on_revoked", on_revoked)
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
        stream = Stream(self._target, settings, self._call)
        stream.reply_with(self._replier)
        self._adopt(stream)
        stream.open()
        return stream


def _keep_alive(client_ref: weakref.ref[Client], closed: Flag) -> None:
    """Runs in the background as long as the client lives."""
    wait_s = 1.0
    while not closed.wait(wait_s):
        client = client_ref()
        if client is None:
            return
        try:
            client.keep_alive(time.monotonic())
        except Exception:  # no memory, say; without this thread the broker would take the client for dead
            _log.exception("the connection could not be kept alive; trying again")
        wait_s = min(1.0, client.heartbeat_s / 2)
        del client

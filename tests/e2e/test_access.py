"""Who may do what, over the native protocol: each call with each role, keys that come and go, scopes, limits."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millstream
from millstream.access.rights import PERMISSIONS_OF
from millstream.broker.access.permissions import PERMISSIONS, names_of
from millstream.errors import (
    ConnectionLost,
    Forbidden,
    InvalidName,
    KeyNotFound,
    MillstreamError,
    QuotaExceeded,
    Throttled,
    TopicNotFound,
    Unauthorized,
)
from millstream.records import encode_batch
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire import access_calls, calls
from millstream.wire.queue_calls import ListQueues, QueueSummary
from tests.e2e.access_world import ROLES, guarded, key_for, new_key, sample
from tests.native import NativeClient
from tests.still import limits_stand_still
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with guarded() as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(broker: BrokerForTests) -> millstream.Client:
    return broker.connect(key=key_for(broker, "admin"))


# --- the table ---------------------------------------------------------------------------------------------------


def test_every_call_has_a_rule() -> None:
    missing = [call.__name__ for call in calls.Call.__args__ if call not in PERMISSIONS]  # type: ignore[attr-defined]
    assert not missing, f"say in broker/access/permissions.py who may make these calls: {missing}"


@pytest.fixture(scope="module")
def clients(broker: BrokerForTests) -> dict[str, millstream.Client]:
    return {role: broker.connect(key=key_for(broker, role)) for role in ROLES}


@pytest.mark.parametrize("call", calls.Call.__args__, ids=lambda call: call.__struct_config__.tag)  # type: ignore[attr-defined]
def test_a_call_is_made_for_those_roles_that_have_its_permission(
    clients: dict[str, millstream.Client], call: type[msgspec.Struct]
) -> None:
    asked = msgspec.convert({"op": call.__struct_config__.tag, **sample(call)}, calls.Call)
    rule = PERMISSIONS[call]
    for role in ROLES:
        allowed = rule.permission == "open" or rule.permission in PERMISSIONS_OF[role]
        try:
            clients[role].call(asked, Any)
            outcome = True
        except Forbidden:
            outcome = False
        except MillstreamError:
            outcome = True  # it got as far as its meaning
        assert outcome == allowed, f"{role} {'may' if outcome else 'may not'} {call.__struct_config__.tag}"


# --- keys --------------------------------------------------------------------------------------------------------


def test_without_a_key_and_with_a_wrong_one_nobody_gets_in(broker: BrokerForTests) -> None:
    with pytest.raises(Unauthorized, match="there was none"):
        broker.connect(key="")
    for wrong in ("hello", "ms_0123456789ab_" + "0" * 64, key_for(broker, "admin")[:-1] + "z"):
        with pytest.raises(Unauthorized, match="not known"):
            broker.connect(key=wrong)

    async def connect_async() -> None:
        async with millstream.aio.connect(broker.address, key="nonsense"):
            pass

    with pytest.raises(Unauthorized):
        asyncio.run(connect_async())


def test_the_key_may_come_from_the_environment(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_KEY", key_for(broker, "read"))
    assert broker.connect().broker()["node_id"]


def test_a_key_that_is_revoked_ends_its_connections_and_opens_no_new_ones(
    broker: BrokerForTests, admin: millstream.Client
) -> None:
    made = admin.keys.create("consume", "produce", name="worker")
    client = broker.connect(key=made.key, timeout_s=5)
    client.publish("revoked", b"before")
    ended = threading.Event()

    def wait_for_messages() -> None:
        with pytest.raises(MillstreamError):
            list(client.stream("revoked", start="latest"))
        ended.set()

    waiting = threading.Thread(target=wait_for_messages, daemon=True)
    waiting.start()
    admin.keys.revoke(made.info.id)
    assert ended.wait(10), "who waits for messages is told as well"
    with pytest.raises(Unauthorized):
        client.publish("revoked", b"after")
    with pytest.raises(Unauthorized):
        broker.connect(key=made.key)
    assert made.info.id not in [key.id for key in admin.keys.list()]
    with pytest.raises(KeyNotFound):
        admin.keys.revoke(made.info.id)


def test_a_key_that_is_revoked_gives_back_what_a_client_holds_that_does_not_read() -> None:
    with guarded() as broker:
        admin = broker.connect(key=key_for(broker, "admin"))
        made = new_key(broker, "read", "consume")
        admin.publish("jobs", b"one")
        admin.publish_many("bulk", [bytes(1024 * 1024 - 100)] * 4)
        with NativeClient(broker.address, hello=False) as client:
            client.hello(namespace="default", client_id="deaf", token=made.key)
            consumer = client.open_queue("jobs", lease_ms=3_600_000)
            assert len(client.lease(consumer)) == 1
            for _ in range(20):
                client.send_fetch("bulk", 0, max_bytes=4 * 1024 * 1024)
            [session] = [one for one in broker.broker._sessions if one.client_id == "deaf"]
            eventually(lambda: session.end.__self__._paused)  # type: ignore[union-attr]
            admin.keys.revoke(made.info.id)
            assert admin.queues.describe("jobs").ready == 1
            broker.clock.advance("5s")
            eventually(lambda: broker.broker.metrics.connections == 1)


def test_a_rotated_key_is_good_in_both_forms_until_the_grace_period_ends() -> None:
    with guarded() as broker:
        admin = broker.connect(key=key_for(broker, "admin"))
        old = admin.keys.create("read")
        early = broker.connect(key=old.key)
        new = admin.keys.rotate(old.info.id, grace="1h")
        assert new.info.id == old.info.id
        assert new.info.old_until_ms
        late = broker.connect(key=new.key)
        assert broker.connect(key=old.key).broker()
        broker.clock.advance("61m")
        with pytest.raises(Unauthorized):
            broker.connect(key=old.key)
        with pytest.raises(Unauthorized):
            _until_refused(early)
        assert late.broker()
        newest = admin.keys.rotate(old.info.id, grace="0s")
        with pytest.raises(Unauthorized):
            broker.connect(key=new.key)
        assert broker.connect(key=newest.key).broker()


def test_a_rotation_does_not_bring_back_a_key_that_is_being_revoked(broker: BrokerForTests) -> None:
    made = new_key(broker, "read")
    access = broker.broker.access

    async def at_once() -> list[object]:
        revoking = asyncio.ensure_future(access.revoke(made.info.id))
        await asyncio.sleep(0)
        rotating = access.rotate(access_calls.RotateKey(id=made.info.id))
        return await asyncio.gather(revoking, rotating, return_exceptions=True)

    outcomes = broker.run(at_once())
    assert isinstance(outcomes, list)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], KeyNotFound)


def test_a_key_expires(admin: millstream.Client) -> None:
    with guarded() as broker:
        now_ms = broker.clock.now_us() // 1000
        made = new_key(broker, "read", expires_ms=now_ms + 60_000)
        client = broker.connect(key=made.key)
        assert client.broker()
        broker.clock.advance("61s")
        with pytest.raises(Unauthorized):
            _until_refused(client)


def _until_refused(client: millstream.Client) -> None:
    """The broker looks twice a second; a connection that is ended first looks lost, then the key is refused."""
    for _ in range(200):
        client.broker()
        time.sleep(0.01)


def test_keys_and_quotas_survive_a_restart(tmp_path: Path) -> None:
    settings = guarded().settings
    with BrokerForTests(tmp_path, settings=settings) as broker:
        admin = broker.connect(key=(key := key_for(broker, "admin")))
        gone = admin.keys.create("admin")
        admin.keys.revoke(gone.info.id)
        admin.set_quota("default", topics=3)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key.rpartition("_")[2].encode() not in stored, "the secret is kept nowhere"
    with BrokerForTests(tmp_path, settings=settings) as broker:
        admin = broker.connect(key=key)
        assert len(admin.keys.list()) == 1
        assert admin.quota().topics == 3
        with pytest.raises(Unauthorized):
            broker.connect(key=gone.key)


# --- scopes ------------------------------------------------------------------------------------------------------


def test_a_scope_bounds_publishing_reading_leasing_and_subscribing(
    broker: BrokerForTests, admin: millstream.Client
) -> None:
    for topic in ("orders.eu", "invoices"):
        admin.create_topic(topic)
        admin.publish(topic, b"1")
    client = broker.connect(key=key_for(broker, "produce", "consume", scopes=["default:orders.#"]))
    client.publish("orders.eu", b"2")
    assert [message.value for message in client.stream("orders.eu", timeout_s=0.5)] == [b"1", b"2"]
    with client.queue("orders.eu") as queue:
        message = queue.next(timeout_s=5)
        assert message is not None
        assert message.value == b"1"
    client.subscribe("orders.#").close()
    refused: list[Any] = [
        lambda: client.publish("invoices", b"2"),
        lambda: list(client.stream("invoices", timeout_s=0.5)),
        lambda: list(client.stream("*", group="g", timeout_s=0.5)),
        lambda: client.queue("invoices").__enter__(),
        lambda: client.queue("#").__enter__(),
        lambda: client.subscribe("#").__enter__(),
        lambda: client.topic("invoices"),
        lambda: client.dead_letters.list(),
    ]
    for attempt in refused:
        with pytest.raises(Forbidden):
            attempt()
    assert client.dead_letters.list(topic="orders.eu") == []


def test_what_a_key_may_know_of_one_group_takes_no_look_at_the_others(
    broker: BrokerForTests, admin: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create_topic("bills.eu")
    broker.run(
        broker.broker.groups.commit(
            "default",
            calls.CommitOffsets(group="g", offsets=[calls.OffsetEntry(topic="bills.eu", partition=0, offset=0)]),
        )
    )
    monkeypatch.setattr(broker.broker.groups, "summaries", lambda _namespace: pytest.fail("it looked at all of them"))
    key = key_for(broker, "read", scopes=["default:bills.#"])
    assert broker.connect(key=key).committed("g")
    other = broker.connect(key=key_for(broker, "read", scopes=["default:invoices"]))
    with pytest.raises(Forbidden):
        other.committed("g")


def test_lists_show_what_a_key_may_see(broker: BrokerForTests, admin: millstream.Client) -> None:
    admin.create_namespace("hidden")
    for topic in ("seen.a", "unseen.a"):
        admin.create_topic(topic)
        with admin.queue(topic, group="work"):
            pass
    client = broker.connect(key=key_for(broker, "consume", scopes=["seen.#"]))
    assert [topic.name for topic in client.topics()] == ["seen.a"]
    assert client.namespaces() == ["default"]
    assert {queue.topic for queue in client.call(ListQueues(), list[QueueSummary])} == {"seen.a"}
    assert "hidden" in admin.namespaces()


def test_a_namespace_that_is_not_in_the_scope_cannot_be_entered(
    broker: BrokerForTests, admin: millstream.Client
) -> None:
    key = key_for(broker, "admin", scopes=["team-a:#"])
    with pytest.raises(Forbidden, match="namespace 'default'"):
        broker.connect(key=key)
    team = broker.connect(key=key, namespace="team-a")
    team.create_namespace("team-a")
    team.create_topic("theirs")
    with pytest.raises(Forbidden):
        team.create_namespace("team-b")
    for broker_wide in (
        lambda: team.keys.create("admin"),
        lambda: team.set_mode("maintenance"),
        lambda: team.set_quota("team-a", topics=1),
        lambda: team.audit(),
    ):
        with pytest.raises(Forbidden, match="the whole broker"):
            broker_wide()
    assert team.quota("team-a").topics_used == 1
    with pytest.raises(Forbidden):
        team.quota("default")


def test_a_message_id_does_not_lead_around_a_scope(broker: BrokerForTests, admin: millstream.Client) -> None:
    admin.create_topic("vault")
    receipt = admin.publish("vault", b"secret")
    later = admin.publish("vault", b"secret", delay="1h")
    client = broker.connect(key=key_for(broker, "consume", "produce", scopes=["elsewhere"]))
    with pytest.raises(Forbidden, match="vault"):
        client.call(msgspec.convert({"op": "queue.message", "id": receipt.id}, calls.Call), Any)
    with pytest.raises(Forbidden, match="vault"):
        client.call(msgspec.convert({"op": "schedule.move", "id": later.id, "deliver_at_ms": 1}, calls.Call), Any)


def test_a_replier_needs_no_right_to_publish(broker: BrokerForTests, admin: millstream.Client) -> None:
    admin.create_topic("questions")
    worker = broker.connect(key=key_for(broker, "consume", scopes=["questions"]))

    def answer() -> None:
        with worker.queue("questions", group="answers") as queue:
            message = queue.next(timeout_s=10)
            assert message is not None
            message.reply(b"42")
            message.ack()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert admin.request("questions", b"?", timeout=10).value == b"42"
    thread.join(10)


# --- the audit log -----------------------------------------------------------------------------------------------


def test_what_administrators_do_is_written_down_and_secrets_are_not() -> None:
    with guarded() as broker:
        admin = broker.connect(key=(secret := key_for(broker, "admin")), client_id="alice")
        reader = broker.connect(key=key_for(broker, "read"))
        admin.create_topic("orders")
        made = admin.keys.create("read", name="bob")
        with pytest.raises(Forbidden):
            reader.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            admin.delete_topic("nothing")
        admin.topics()  # looking is not noted
        told = [(entry.call, entry.names, entry.outcome) for entry in admin.audit().entries]
        assert told == [
            ("topic.delete", ["nothing"], "TOPIC_NOT_FOUND"),
            ("topic.delete", ["orders"], "FORBIDDEN"),
            ("key.create", ["bob", "read"], "done"),
            ("topic.create", ["orders"], "done"),
        ]
        first = admin.audit(1)
        assert admin.audit(1, after=first.after).entries[0].outcome == "FORBIDDEN"
        assert [entry.outcome for entry in admin.audit(call="key.create").entries] == ["done"]
        entry = admin.audit(call="topic.create").entries[0]
        assert (entry.key, entry.client_id, entry.door) == (secret.split("_")[1], "alice", "native")
        assert admin.audit(until_ms=entry.time_ms).entries == []
        stored = b"".join(message.value or b"" for message in admin.stream("_audit", timeout_s=0.5))
        for text in (secret, made.key):
            assert text.rpartition("_")[2].encode() not in stored
        for attempt in (
            lambda: admin.publish("_audit", b"forged"),
            lambda: admin.delete_topic("_audit"),
            lambda: admin.alter_topic("_audit", {"retention_ms": 1}),
            lambda: admin.create_topic("x", config={"dead_letter_topic": "_audit"}),
        ):
            with pytest.raises(Forbidden, match="written by the broker alone"):
                attempt()
        with pytest.raises(Forbidden):
            list(reader.stream("_audit", timeout_s=0.5))
        assert "_audit" not in [topic.name for topic in reader.topics()]


def test_nobody_writes_to_the_audit_log_also_where_none_is_kept() -> None:
    with BrokerForTests() as broker, broker.connect() as client:
        with pytest.raises(Forbidden, match="written by the broker alone"):
            client.publish("_audit", b"forged")
        with pytest.raises(Forbidden, match="written by the broker alone"):
            client.publish("_audit", b"forged", delay="1h")
        client.publish("_audit.own", b"another topic")


def test_what_is_no_entry_of_the_audit_log_is_passed_over() -> None:
    """An earlier version let anybody write there while access was off."""
    with BrokerForTests() as broker, broker.connect() as client:
        client.create_topic("_audit", if_missing=True)
        partition = broker.broker.topics.partition_of(broker.broker.topics.registry.get("default", "_audit"), 0)
        batch = encode_batch([b"forged", b"{}"], base_timestamp_us=1)
        broker.run(partition.append_durably(batch))
        assert client.audit().entries == []


def test_an_audit_entry_names_things_and_no_contents() -> None:
    call = calls.CreateTopic(name="orders", config={"secret": "x"})
    assert names_of(call) == ["orders"]
    hook = msgspec.convert({"op": "webhook.create", "topic": "t", "url": "http://u:p@h", "secret": "s"}, calls.Call)
    assert names_of(hook) == ["t", "default"]


def client_publishes(client: millstream.Client, times: int, value: bytes = b"x") -> None:
    for _ in range(times):
        client.publish("a", value)


# --- quotas ------------------------------------------------------------------------------------------------------


@pytest.fixture
def metered() -> Iterator[BrokerForTests]:
    with BrokerForTests() as broker:
        yield broker


def test_a_namespace_gets_no_more_topics_than_its_quota(metered: BrokerForTests) -> None:
    client = metered.connect()
    client.set_quota("default", topics=2)
    client.create_topic("a")
    client.publish("b", b"made by use")
    for attempt in (lambda: client.create_topic("c"), lambda: client.publish("c", b"")):
        with pytest.raises(QuotaExceeded, match="2 topics"):
            attempt()
    client.create_topic("a", if_missing=True)
    info = client.quota()
    assert (info.topics, info.topics_used, info.refused) == (2, 2, 2)
    client.set_quota("default")
    client.create_topic("c")


def test_a_namespace_publishes_no_faster_than_its_quota(metered: BrokerForTests) -> None:
    client = metered.connect()
    client.create_topic("a")
    client.set_quota("default", publish_messages_per_s=2)
    client_publishes(client, 4)  # the SDK waits and sends again what came too early
    refused = client.quota().refused
    assert refused > 0
    assert client.broker()["metrics"]["millstream_quota_refusals"] == refused
    client_publishes(metered.connect(namespace="other"), 20)
    assert client.quota().refused == refused, "another namespace is not held up"


def test_a_namespace_stores_no_more_than_its_quota(metered: BrokerForTests) -> None:
    client = metered.connect()
    client.create_topic("a")
    client.set_quota("default", storage_bytes=20_000)
    with pytest.raises(QuotaExceeded, match="storage_bytes"):
        client_publishes(client, 30, b"x" * 1000)
    assert 0 < client.quota().storage_bytes_used <= 20_000
    client.delete_topic("a", force=True)
    client.create_topic("a")
    metered.clock.advance("11s")
    metered.run(metered.broker.quotas.measure())
    client.publish("a", b"x")


def test_what_is_stored_is_counted_once_by_those_who_measure_at_the_same_time(metered: BrokerForTests) -> None:
    """As when quotas are set for several namespaces at once."""
    client = metered.connect()
    for number in range(5):
        client.publish(f"t{number}", bytes(2_000))
    quotas = metered.broker.quotas
    limit = client.quota().storage_bytes_used * 2

    async def begin() -> None:
        quotas.replay({"quota/default": {"storage_bytes": limit}})  # as at a start, with nothing measured
        await asyncio.gather(*(quotas.measure() for _ in range(3)))

    metered.run(begin())
    client.publish("t0", bytes(2_000))


def test_a_namespace_has_no_more_connections_than_its_quota(metered: BrokerForTests) -> None:
    client = metered.connect()
    client.set_quota("default", connections=2)
    second = metered.connect()
    with pytest.raises(QuotaExceeded, match="2 connections"):
        metered.connect()
    second.close()
    for _ in range(100):
        if client.quota().connections_used == 1:
            break
        time.sleep(0.01)
    metered.connect()


# --- limits ------------------------------------------------------------------------------------------------------


def test_many_wrong_keys_from_one_address_are_slowed_down_and_right_ones_are_not() -> None:
    with guarded(limits={"wrong_keys_per_minute": 3}) as broker:
        for _ in range(3):
            with pytest.raises(Unauthorized):
                broker.connect(key="wrong")
        with pytest.raises(Throttled, match="too many wrong keys"):
            broker.connect(key="wrong")
        broker.connect(key=key_for(broker, "read"))
        broker.clock.advance("30s")
        with pytest.raises(Unauthorized):
            broker.connect(key="wrong")


def test_connections_come_no_faster_than_the_limit() -> None:
    with guarded(limits={"connections_per_s_per_address": 2}) as broker:
        key = key_for(broker, "read")
        with limits_stand_still(broker):
            broker.connect(key=key)
            broker.connect(key=key)
            with pytest.raises((Throttled, ConnectionLost), match="too many connections"):
                broker.connect(key=key)
        broker.clock.advance("1s")
        broker.connect(key=key)


# --- names and secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "..", "a/../../b", "/etc/passwd", "a\x00b", "a\\..\\b", "%2e%2e%2f", "a/b"])
def test_names_do_not_escape_the_data_directory(broker: BrokerForTests, admin: millstream.Client, name: str) -> None:
    for attempt in (
        lambda: admin.create_topic(name),
        lambda: admin.create_namespace(name),
        lambda: admin.call(calls.Metadata(topics=[name], create=True), Any),
        lambda: admin.call(calls.JoinGroup(group=name, topics=["x"]), Any),
        lambda: admin.set_quota(name, topics=1),
        lambda: broker.connect(key=key_for(broker, "admin"), namespace=name),
    ):
        with pytest.raises(InvalidName):
            attempt()


def test_no_secret_reaches_the_log(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with guarded() as broker:
        admin = broker.connect(key=(secret := key_for(broker, "admin")))
        made = admin.keys.create("produce")
        rotated = admin.keys.rotate(made.info.id, grace="0s")
        for wrong in (made.key, rotated.key[:-1] + ("1" if rotated.key.endswith("0") else "0")):
            with pytest.raises(Unauthorized):
                broker.connect(key=wrong)
        admin.keys.revoke(made.info.id)
        keys = (secret, made.key, rotated.key)
        assert not any(key.rpartition("_")[2] in repr(admin._target) for key in keys)
    captured = capsys.readouterr()
    said = captured.out + captured.err + caplog.text
    assert "key created" in said, "the log is being looked at"
    for key in keys:
        assert key.rpartition("_")[2] not in said


def test_the_first_key_is_not_asked_for_while_access_is_off(metered: BrokerForTests) -> None:
    """Keys are made before they are needed."""
    client = metered.connect(key="whatever")
    made = client.keys.create("admin")
    assert metered.connect(key=made.key).keys.list()[0].id == made.info.id
    answer: access_calls.AuditPage = client.audit()
    assert answer.entries == []


def test_others_on_the_machine_cannot_look_into_the_data_directory(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with BrokerProcess(tmp_path / "data") as broker, millstream.connect(broker.address) as client:
            client.publish("orders", b"secret")
            broker.stop()
    finally:
        os.umask(before)
    open_to_others = [path for path in (tmp_path / "data", *(tmp_path / "data").rglob("*")) if path.stat().st_mode & 7]
    assert open_to_others == []

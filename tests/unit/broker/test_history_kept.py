"""The broker's memory of its own numbers, in virtual time: through restarts, crashes, set clocks and bad disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream import aio
from millstream.broker.history.tiers import Series
from millstream.records import encode_batch
from millstream.testing import BrokerForTests, virtual_broker, virtual_time
from millstream.testing.storage import Fault
from millstream.testing.virtual import VirtualBroker
from millstream.wire.stats_calls import History

DAY_S = 86_400


async def published(client: aio.Client, points: int = 2_000) -> History:
    return await client.history("published_rate", points=points)


async def publish_for(broker: VirtualBroker, client: aio.Client, minutes: int) -> None:
    """Ten messages every five seconds."""
    for _ in range(minutes * 12):
        for _ in range(10):
            await client.publish("orders", b"x")
        await broker.clock.advance("5s")


@virtual_time
async def test_rates_are_measured_every_five_seconds() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 2)
        history = await published(client)
        assert (history.unit, history.step_ms) == ("messages/s", 5_000)
        assert 23 <= len(history.points) <= 24
        assert all(1.5 < point.avg < 2.5 for point in history.points[1:])
        of_topic = await client.history("published_rate", topic="orders")
        assert [point.avg for point in of_topic.points][1:]


@virtual_time
async def test_history_goes_on_after_a_restart() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 3)
        before = await published(client)
        await broker.restart()
        after = await published(client)
        assert after.points[: len(before.points)] == before.points
        await publish_for(broker, client, 1)
        later = await published(client)
        assert len(later.points) >= len(before.points) + 10
        minutes = await client.history("published_rate", topic="orders", points=5)
        assert max(point.max for point in minutes.points) > 1


@virtual_time
async def test_restarts_in_a_quarter_of_an_hour_take_nothing_from_its_slot() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        for _ in range(4):
            await publish_for(broker, client, 3)
            await broker.restart()
        await published(client)  # waits until what was kept is read
        tiers = broker._machine.broker.stats.history.tiers  # type: ignore[union-attr]
        seconds, _, quarters = (
            [tier.slot(n)[Series("published_rate")] for n in tier.numbers()] for tier in tiers.tiers
        )
        assert len(seconds) > 140
        assert [point.weight for point in quarters] == [len(seconds)]


@virtual_time
async def test_a_crash_takes_no_more_than_the_last_minute() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 5)
        before = await published(client)
        await broker.crash(power=False)
        after = await published(client)
        assert len(after.points) >= len(before.points) - 13
        assert after.points == before.points[: len(after.points)]


@virtual_time
async def test_a_power_cut_leaves_a_history_that_can_be_read() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        for _ in range(3):
            await publish_for(broker, client, 2)
            await broker.crash()
            history = await published(client)
            assert all(0 <= point.min <= point.avg <= point.max < 100 for point in history.points)


@virtual_time
async def test_a_clock_that_is_set_does_no_harm() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 2)
        for jump in (30 * DAY_S, -60 * DAY_S, 30 * DAY_S):
            broker.clock.jump(jump)
            await publish_for(broker, client, 2)
            history = await published(client)
            recent = [point for point in history.points if point.time_ms > history.until_ms - 100_000]
            assert len(recent) >= 18
            assert all(point.max < 10 for point in recent), "rates go by a clock that nobody sets"


@virtual_time
async def test_a_topic_that_is_deleted_leaves_no_plot_behind() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 1)
        await client.delete_topic("orders")
        await broker.clock.advance("10s")
        await client.create_topic("orders")
        history = await client.history("depth", topic="orders")
        assert history.points == []


@pytest.mark.parametrize("kind", ["create", "write"])
@virtual_time
async def test_a_disk_that_was_full_for_a_while_costs_the_history_nothing(kind: str) -> None:
    async with virtual_broker() as broker:
        storage = broker._machine.storage
        storage.inject(Fault.NO_SPACE, times=10**6, when=lambda it: it.kind == kind and it.path.startswith("history/"))
        client = await broker.connect()
        await publish_for(broker, client, 3)
        storage.heal()
        await publish_for(broker, client, 2)
        before = await published(client)
        assert len(before.points) > 50
        await broker.restart()
        after = await published(client)
        assert after.points[: len(before.points)] == before.points


@virtual_time
async def test_a_slot_that_cannot_be_read_costs_no_other() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await publish_for(broker, client, 2)
        before = await published(client)
        assert broker._machine.broker is not None
        for partition in broker._machine.broker.stats.history._logs.values():
            await partition.append_durably(encode_batch([b"of another version"], base_timestamp_us=1))
        await publish_for(broker, client, 2)
        for _ in range(2):
            await broker.restart()
            after = await published(client)
            assert after.points[: len(before.points)] == before.points
            assert len(after.points) > 1.5 * len(before.points)


def test_a_disk_that_fails_costs_the_history_its_past_and_nobody_anything_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "history").write_text("this is no directory")
    with BrokerForTests(data) as broker:
        client = broker.connect()
        for _ in range(3):
            client.publish("orders", b"x")
            broker.clock.advance("90s")
        assert client.history("published_rate").points
        assert client.broker()["mode"] == "normal"
    with BrokerForTests(data) as broker:
        assert broker.connect().history("published_rate").points == []


def test_it_does_not_write_while_the_disk_is_needed_for_more(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path / "data") as broker:
        client = broker.connect()
        client.set_mode("maintenance")
        broker.clock.advance("5m")
        assert not (tmp_path / "data" / "history").exists()
        client.set_mode("normal")
        broker.clock.advance("2m")
        assert (tmp_path / "data" / "history").exists()


def test_what_is_on_disk_is_bounded_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.history.history._SEGMENT_BYTES", 8_192)
    with BrokerForTests(tmp_path / "data") as broker:
        history = broker.broker.stats.history
        values = {Series("depth", "default", f"topic-{number}"): float(number) for number in range(5)}

        async def measure_for_an_hour() -> int:
            for partition in history._logs.values():
                await partition.sync()  # what is being synced is not removed
            for _ in range(720):
                broker.clock.skipped_us += 5_000_000
                history.note(broker.clock.now_us() // 1000, values)
            ring = tmp_path / "data" / "history" / "seconds"
            return sum(path.stat().st_size for path in ring.glob("*.log"))

        one = broker.run(measure_for_an_hour())
        for _ in range(2):
            later = broker.run(measure_for_an_hour())
        assert isinstance(one, int)
        assert isinstance(later, int)
        # Of the newest segment the unused room counts as well.
        assert 10_000 < one <= later < one + 4 * 8_192


def test_a_clock_that_is_set_ahead_for_a_moment_takes_nothing_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.history.history._SEGMENT_BYTES", 8_192)
    with BrokerForTests(tmp_path / "data") as broker:
        history, clock = broker.broker.stats.history, broker.clock
        values = {Series("depth", "default", f"topic-{number}"): float(number) for number in range(5)}

        async def measure(minutes: int) -> set[str]:
            for _ in range(12 * minutes):
                clock.skipped_us += 5_000_000
                history.note(clock.now_us() // 1000, values)
            for partition in history._logs.values():
                await partition.sync()
            return {path.name for path in (tmp_path / "data" / "history" / "seconds").glob("*.log")}

        before = broker.run(measure(45))
        assert isinstance(before, set)
        assert len(before) > 1
        with monkeypatch.context() as ahead:
            now_us = clock.now_us
            ahead.setattr(clock, "now_us", lambda: now_us() + 30 * DAY_S * 1_000_000)
            assert before <= broker.run(measure(2))  # type: ignore[operator]

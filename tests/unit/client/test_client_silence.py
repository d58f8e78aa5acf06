"""A broker that vanishes without a word: its client notices by the heartbeats that do not come, and connects again."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_broker import FakeBroker

import millstream
from millstream import aio
from millstream.client.silence import Silence
from millstream.errors import ConnectionLost
from tests.waiting import eventually


def test_three_heartbeats_may_be_missing() -> None:
    silence = Silence(heartbeat_ms=1000, now_s=0.0)
    assert not any(silence.look(at / 4) for at in range(13))
    assert silence.look(3.25)


def test_whatever_is_heard_ends_the_silence() -> None:
    silence = Silence(heartbeat_ms=1000, now_s=0.0)
    for at in range(100):
        silence.heard = at % 10 == 0
        assert not silence.look(at / 4)


def test_time_during_which_nobody_listened_does_not_count() -> None:
    """A laptop that slept for an hour has not heard anything, and that is not the broker's fault."""
    silence = Silence(heartbeat_ms=1000, now_s=0.0)
    assert not silence.look(3600.0)
    assert not silence.look(3600.3)


def test_an_idle_connection_of_a_vanished_broker_is_replaced() -> None:
    with FakeBroker(heartbeat_ms=100) as fake, millstream.connect(fake.address, timeout_s=2) as client:
        client.publish("t", b"a")
        lost = client._link.current
        assert lost is not None
        time.sleep(0.5)
        assert lost.usable, "a broker that says nothing but heartbeats is there"
        fake.vanish()
        eventually(lambda: not lost.usable)
        client.publish("t", b"b")
        assert fake.values("t") == [b"a", b"b"]


def test_a_request_to_a_vanished_broker_is_made_again_in_time() -> None:
    with FakeBroker(heartbeat_ms=100) as fake, millstream.connect(fake.address, timeout_s=20) as client:
        client.publish("t", b"a")
        fake.vanish()
        begun_s = time.monotonic()
        client.publish("t", b"b")
        assert time.monotonic() - begun_s < 10
        assert fake.values("t") == [b"a", b"b"], "stored once, although it was sent twice"


def test_an_asynchronous_client_notices_as_well() -> None:
    async def main(fake: FakeBroker) -> None:
        async with asyncio.timeout(15), aio.connect(fake.address, timeout_s=20) as client:
            await client.publish("t", b"a")
            connection = client._link.current
            await asyncio.sleep(0.5)
            assert connection is client._link.current, "a broker that says nothing but heartbeats is there"
            fake.vanish()
            await client.publish("t", b"b")
            assert connection is not None
            with pytest.raises(ConnectionLost, match="silent"):
                raise connection.lost or AssertionError("it is open")

    with FakeBroker(heartbeat_ms=100) as fake:
        asyncio.run(main(fake))
        assert fake.values("t") == [b"a", b"b"]

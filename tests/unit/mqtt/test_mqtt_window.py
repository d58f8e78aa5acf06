"""The handshakes of QoS 1 and 2, step by step."""

from __future__ import annotations

import tracemalloc

import pytest

from millstream.mqtt.aliases import IncomingAliases, OutgoingAliases
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.window import PACKET_ID_MAX, PUBLISHED, RELEASED, Incoming, Outgoing


def outgoing(*qos: int, limit: int = 100) -> Outgoing[str]:
    window: Outgoing[str] = Outgoing(limit)
    for at, each in enumerate(qos, 1):
        assert window.send(each, f"m{at}") == at
    return window


def test_mqtt_2_2_1_4_a_packet_id_is_not_zero_and_not_in_use() -> None:
    window: Outgoing[str] = Outgoing(3)
    assert window.send(1, "stays") == 1
    seen = set()
    for _ in range(70_000):
        packet_id = window.send(1, "goes")
        assert packet_id is not None
        seen.add(packet_id)
        assert window.puback(packet_id) == "goes"
    assert seen == set(range(2, 65_536)), "every other id had its turn, and none beyond"


def test_all_packet_ids_can_be_in_use() -> None:
    window: Outgoing[int] = Outgoing()
    assert [window.send(1, at) for at in range(65_535)] == list(range(1, 65_536))
    assert window.send(1, -1) is None
    window.limit = 100_000
    assert window.send(1, -1) is None
    window.puback(700)
    assert window.send(1, -1) == 700


def test_mqtt_3_3_4_9_no_more_than_the_receive_maximum_is_on_its_way() -> None:
    window = outgoing(1, 2, limit=2)
    assert window.room == 0
    assert window.send(1, "more") is None
    window.pubrec(2, ok=True)
    assert window.send(1, "more") is None, "QoS 2 counts until PUBCOMP"
    window.pubcomp(2)
    assert window.room == 1
    assert window.send(1, "more") == 3


def test_mqtt_3_3_4_9_a_pubrec_that_refuses_makes_room() -> None:
    window = outgoing(2, limit=1)
    assert window.pubrec(1, ok=False) == "m1"
    assert window.pubcomp(1) is None
    assert window.send(2, "m2") == 2


def test_mqtt_4_3_2_3_a_message_of_qos_1_is_on_its_way_until_puback() -> None:
    window = outgoing(1)
    assert window.pubrec(1, ok=True) is None
    assert window.pubcomp(1) is None
    assert window.resume() == [(1, PUBLISHED, 1, "m1")]
    assert window.puback(1) == "m1"
    assert window.puback(1) is None
    assert window.resume() == []


def test_mqtt_4_3_3_6_what_was_released_is_not_published_again() -> None:
    window = outgoing(2)
    assert window.puback(1) is None
    assert window.pubcomp(1) is None, "a PUBCOMP before the PUBREC ends nothing"
    assert window.pubrec(1, ok=True) == "m1"
    assert window.pubrec(1, ok=True) == "m1", "a repeated PUBREC is answered again"
    assert window.resume() == [(1, RELEASED, 2, "m1")]
    assert window.pubcomp(1) == "m1"
    assert not len(window)


def test_mqtt_4_4_0_1_everything_on_its_way_is_sent_again_under_its_id() -> None:
    window = outgoing(1, 2, 2, 1)
    window.pubrec(2, ok=True)
    assert window.resume() == [
        (1, PUBLISHED, 1, "m1"),
        (2, RELEASED, 2, "m2"),
        (3, PUBLISHED, 2, "m3"),
        (4, PUBLISHED, 1, "m4"),
    ]
    assert window.send(1, "m5") == 5


def test_mqtt_4_6_0_1_publishes_are_sent_again_in_their_order_whatever_their_ids() -> None:
    window = outgoing(1, 1, 1)
    window._last_id = 65_534
    window.send(1, "m4")
    window.puback(1)
    window.send(1, "m5")
    assert [(fact.packet_id, fact.ref) for fact in window.resume()] == [(2, "m2"), (3, "m3"), (65_535, "m4"), (1, "m5")]


def test_mqtt_4_6_0_4_pubrels_are_sent_again_in_the_order_of_their_pubrecs() -> None:
    window = outgoing(2, 1, 2, 2)
    for packet_id in (4, 1, 3):
        window.pubrec(packet_id, ok=True)
    assert [fact.packet_id for fact in window.resume()] == [4, 2, 1, 3]


def test_mqtt_4_9_0_2_what_is_sent_again_keeps_to_a_receive_maximum_that_has_become_smaller() -> None:
    window = outgoing(1, 1, 2, 1)
    window.pubrec(3, ok=True)
    window.limit = 2
    # The PUBREL must go out, or the client could never make room.
    assert [fact.packet_id for fact in window.resume()] == [1, 3]
    assert window.resume_more() == []
    assert window.send(1, "m5") is None
    window.puback(1)
    assert [fact.ref for fact in window.resume_more()] == ["m2"]
    window.pubcomp(3)
    assert window.send(1, "m5") is None, "what is older goes first"
    assert [fact.ref for fact in window.resume_more()] == ["m4"]
    assert window.send(1, "m5") is None
    window.puback(2)
    assert window.send(1, "m5") == 5


def test_what_was_held_back_goes_before_anything_new_even_when_there_is_plenty_of_room() -> None:
    window = outgoing(1, 1, 1, 1)
    window.limit = 3
    assert len(window.resume()) == 3
    for packet_id in (1, 2, 3):
        window.puback(packet_id)
    assert window.room == 0
    assert window.send(1, "m5") is None
    assert [fact.ref for fact in window.resume_more()] == ["m4"]
    assert window.room == 2
    assert window.send(1, "m5") == 5


def test_mqtt_4_3_3_6_what_a_client_confirms_unasked_is_not_published_later() -> None:
    window = outgoing(1, 2)
    window.limit = 1
    assert [fact.packet_id for fact in window.resume()] == [1]
    assert window.pubrec(2, ok=True) == "m2"
    window.puback(1)
    window.limit = 5
    assert window.resume_more() == []


def test_what_waits_has_its_id_and_goes_when_there_is_room() -> None:
    window = outgoing(1, limit=1)
    assert [window.wait(qos, f"w{qos}") for qos in (1, 2)] == [2, 3]
    assert (len(window), window.waiting, window.room) == (3, 2, 0)
    assert not window.go(2)
    assert window.puback(1) is not None
    assert window.go(2)
    assert not window.go(2), "it has gone"
    assert not window.go(3)
    assert (window.puback(2), window.room, window.waiting) == ("w1", 1, 1)
    window.forget(3)
    assert (len(window), window.waiting, window.send(1, "next")) == (0, 0, 4)


def test_what_waits_cannot_be_confirmed() -> None:
    window = outgoing()
    assert [window.wait(qos, "waits") for qos in (1, 2)] == [1, 2]
    assert window.puback(1) is None
    assert window.pubrec(2, ok=True) is None
    assert window.pubrec(2, ok=False) is None
    assert window.pubcomp(2) is None
    assert window.waiting == len(window) == 2


def test_what_has_waited_is_sent_to_the_next_connection_in_its_order_as_far_as_there_is_room() -> None:
    window = outgoing(1, limit=1)
    for number in range(3):
        window.wait(1, f"w{number}")
    window.limit = 2
    assert [fact.packet_id for fact in window.resume()] == [1, 2]
    assert (window.waiting, window.go(3)) == (2, False)
    assert window.wait(1, "later") == 5
    for packet_id in (1, 2, 3):
        window.puback(packet_id)
    assert [fact.packet_id for fact in window.resume_more()] == [4]
    assert window.go(5)


def test_no_more_waits_than_there_are_packet_ids() -> None:
    window = outgoing(limit=10)
    assert all(window.wait(1, "x") for _ in range(PACKET_ID_MAX))
    assert window.wait(1, "x") is None
    assert window.send(1, "x") is None


def test_a_message_that_is_gone_frees_its_id_in_any_state() -> None:
    window = outgoing(1, 2)
    window.pubrec(2, ok=True)
    assert window.forget(1) == "m1"
    assert window.forget(2) == "m2"
    assert window.forget(3) is None
    assert not len(window)
    assert window.facts() == []


def test_a_restored_window_goes_on_where_the_old_one_was() -> None:
    window = outgoing(2, 1, 2, 2)
    window.pubrec(3, ok=True)
    window.pubrec(1, ok=True)
    again: Outgoing[str] = Outgoing(100)
    again.restore([list(fact) for fact in window.facts()])
    assert again.resume() == window.resume()
    again.restore([[4, RELEASED, 2, "m4"]])  # a single fact, recorded after the snapshot
    assert [(fact.packet_id, fact.state) for fact in again.resume()] == [
        (3, RELEASED),
        (2, PUBLISHED),
        (1, RELEASED),
        (4, RELEASED),
    ]
    assert again.send(1, "m5") == 5


def test_packet_ids_go_on_after_those_that_were_restored() -> None:
    window: Outgoing[str] = Outgoing(100)
    window.restore([[40, PUBLISHED, 1, "m"], [41, PUBLISHED, 1, "m"]])
    assert window.send(1, "m") == 42


def test_a_publish_that_is_replayed_under_a_used_id_is_the_newer_one() -> None:
    window = outgoing(2, 1)
    window.pubrec(1, ok=True)
    window.restore([[1, PUBLISHED, 2, "newer"]])
    assert window.resume() == [(2, PUBLISHED, 1, "m2"), (1, PUBLISHED, 2, "newer")]


def test_mqtt_4_3_3_10_a_publish_of_qos_2_that_is_repeated_is_not_taken_twice() -> None:
    window = Incoming(10)
    assert window.receive(7)
    assert not window.receive(7)
    assert 7 in window
    assert len(window) == 1


def test_mqtt_4_3_3_12_after_the_release_the_id_is_another_message() -> None:
    window = Incoming(10)
    window.receive(7)
    assert window.release(7)
    assert not window.release(7)
    assert window.receive(7)


def test_mqtt_3_3_4_7_a_client_that_sends_more_than_our_receive_maximum_is_refused() -> None:
    window = Incoming(2)
    window.receive(1)
    window.receive(2)
    assert not window.receive(2), "a repetition is not more"
    with pytest.raises(MqttViolation, match="2 messages") as caught:
        window.receive(3)
    assert caught.value.reason is Reason.RECEIVE_MAXIMUM_EXCEEDED
    assert 3 not in window
    window.release(1)
    assert window.receive(3)


def test_a_new_connection_may_send_as_much_as_the_one_before() -> None:
    window = Incoming(2)
    window.restore([1, 2])
    window.resume(2)
    assert window.receive(3)
    assert window.receive(4)
    with pytest.raises(MqttViolation):
        window.receive(5)
    window.resume(2)
    with pytest.raises(MqttViolation):
        window.receive(5)  # reconnecting again and again does not help
    assert window.facts() == [1, 2, 3, 4]


def test_a_session_with_nothing_on_its_way_costs_less_than_a_kilobyte() -> None:
    """With aliases, and after a burst that filled everything."""
    count = 200
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [(Outgoing[int](100), Incoming(100), IncomingAliases(16), OutgoingAliases(16)) for _ in range(count)]
        for out, into, _, _ in kept:
            for number in range(1, 101):
                packet_id = out.send(2, number)
                assert packet_id is not None
                into.receive(number)
                out.pubrec(packet_id, ok=True)
            out.resume()
            for number in range(1, 101):
                out.pubcomp(number)
                into.release(number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 1000

"""Topic aliases, both ways."""

from __future__ import annotations

import msgspec
import pytest

from millstream.mqtt.aliases import IncomingAliases, OutgoingAliases
from millstream.mqtt.packets import NO_PROPERTIES, Properties, Publish
from millstream.mqtt.properties import add_topic_alias, encode_properties
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.writer import encode_publish
from tests.mqtt_bytes import read


def test_mqtt_3_3_2_12_every_alias_up_to_our_maximum_is_taken() -> None:
    aliases = IncomingAliases(16)
    for alias in range(1, 17):
        assert aliases.resolve(f"topic/{alias}", alias) == f"topic/{alias}"
    for alias in range(1, 17):
        assert aliases.resolve("", alias) == f"topic/{alias}"


def test_a_name_with_a_known_alias_gives_it_a_new_meaning() -> None:
    aliases = IncomingAliases(1)
    aliases.resolve("a", 1)
    assert aliases.resolve("b", 1) == "b"
    assert aliases.resolve("", 1) == "b"
    assert aliases.resolve("c", None) == "c"
    assert aliases.resolve("", 1) == "b"


@pytest.mark.parametrize(("maximum", "alias"), [(16, 0), (16, 17), (0, 1)])
def test_mqtt_3_3_2_9_an_alias_of_zero_or_beyond_our_maximum_is_refused(maximum: int, alias: int) -> None:
    with pytest.raises(MqttViolation) as caught:
        IncomingAliases(maximum).resolve("a", alias)
    assert caught.value.reason is Reason.TOPIC_ALIAS_INVALID


@pytest.mark.parametrize("alias", [None, 1])
def test_no_name_and_no_known_alias_is_a_protocol_error(alias: int | None) -> None:
    with pytest.raises(MqttViolation) as caught:
        IncomingAliases(16).resolve("", alias)
    assert caught.value.reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_3_2_11_no_alias_is_beyond_what_the_client_takes() -> None:
    aliases = OutgoingAliases(2)
    assert aliases.alias_for("a") == ("a", 1)
    assert aliases.alias_for("b") == ("b", 2)
    assert aliases.alias_for("c") == ("c", None)
    assert aliases.alias_for("a") == ("", 1)
    assert aliases.alias_for("b") == ("", 2)


def test_a_client_that_takes_no_aliases_gets_none() -> None:
    aliases = OutgoingAliases(0)
    assert aliases.alias_for("a") == aliases.alias_for("a") == ("a", None)


def test_the_client_understands_what_we_send() -> None:
    ours, theirs = OutgoingAliases(3), IncomingAliases(3)
    for topic in "abcdabcdea":
        assert theirs.resolve(*ours.alias_for(topic)) == topic


@pytest.mark.parametrize("length", [0, 1, 116, 117, 118, 119, 120, 121, 16_370, 16_374, 16_375, 16_376, 16_377, 40_000])
def test_an_alias_behind_properties_that_are_encoded_is_one_of_them(length: int) -> None:
    told = Properties(message_expiry_s=7, user=(("k", "v" * length),)) if length else NO_PROPERTIES
    data = add_topic_alias(encode_properties(told), 513)
    found = read(encode_publish(b"a", b"payload", version=5, properties=data))
    assert isinstance(found, Publish)
    assert found.properties == msgspec.structs.replace(told, topic_alias=513)
    assert found.payload == b"payload"

"""Names of MQTT: which are valid, what they match, and what they are called elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import (
    LEVELS_MAX,
    QueueAddress,
    Share,
    check_topic_filter,
    check_topic_name,
    filter_matches,
    from_topic,
    parse_queue,
    parse_share,
    to_pattern,
    to_topic,
)


def refusal(check: Callable[..., object], *arguments: object) -> Reason:
    with pytest.raises(MqttViolation) as caught:
        check(*arguments)
    assert str(caught.value), "a sentence says what is wrong"
    return caught.value.reason


@pytest.mark.parametrize("name", ["sport/#", "sport/+", "#", "a+", "sport/tennis#"])
def test_mqtt_4_7_0_1_a_topic_name_has_no_wildcards(name: str) -> None:
    assert refusal(check_topic_name, name) is Reason.TOPIC_NAME_INVALID


@pytest.mark.parametrize("topic_filter", ["#", "sport/#", "sport/tennis/player1/#", "/#", "+/#"])
def test_mqtt_4_7_1_1_a_number_sign_is_the_whole_last_level(topic_filter: str) -> None:
    assert check_topic_filter(topic_filter) == topic_filter


@pytest.mark.parametrize("topic_filter", ["sport/tennis#", "sport/tennis/#/ranking", "##", "#/", "a/##", "/a#", "#/#"])
def test_mqtt_4_7_1_1_a_number_sign_elsewhere_is_refused(topic_filter: str) -> None:
    assert refusal(check_topic_filter, topic_filter) is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("topic_filter", ["+", "+/tennis/#", "sport/+/player1", "/+", "+/+", "sport/+"])
def test_mqtt_4_7_1_2_a_plus_sign_is_a_whole_level(topic_filter: str) -> None:
    assert check_topic_filter(topic_filter) == topic_filter


@pytest.mark.parametrize("topic_filter", ["sport+", "++", "a/b+/c", "+a", "a/+b"])
def test_mqtt_4_7_1_2_a_plus_sign_within_a_level_is_refused(topic_filter: str) -> None:
    assert refusal(check_topic_filter, topic_filter) is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("topic", ["$SYS/uptime", "$SYS", "$"])
@pytest.mark.parametrize("topic_filter", ["#", "+/uptime", "+", "+/#"])
def test_mqtt_4_7_2_1_wildcards_do_not_match_dollar_topics(topic_filter: str, topic: str) -> None:
    assert not filter_matches(topic_filter, topic)


@pytest.mark.parametrize("topic_filter", ["$SYS/#", "$SYS/+", "$SYS/uptime"])
def test_mqtt_4_7_2_1_dollar_topics_are_matched_by_name(topic_filter: str) -> None:
    assert filter_matches(topic_filter, "$SYS/uptime")


def test_mqtt_4_7_3_1_names_and_filters_have_a_character() -> None:
    assert refusal(check_topic_name, "") is Reason.TOPIC_NAME_INVALID
    assert refusal(check_topic_filter, "") is Reason.TOPIC_FILTER_INVALID
    assert check_topic_name("/") == "/"
    assert check_topic_filter("/") == "/"


def test_mqtt_4_7_3_2_names_and_filters_have_no_null_character() -> None:
    assert refusal(check_topic_name, "a\0b") is Reason.TOPIC_NAME_INVALID
    assert refusal(check_topic_filter, "a/\0") is Reason.TOPIC_FILTER_INVALID


def test_mqtt_4_7_3_3_names_and_filters_have_65535_bytes_at_most() -> None:
    assert check_topic_name("x" * 65_535)
    assert refusal(check_topic_name, "x" * 65_536) is Reason.TOPIC_NAME_INVALID
    assert refusal(check_topic_filter, "ü" * 32_768) is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize(
    ("topic_filter", "topic"), [("ACCOUNTS", "Accounts"), ("/finance", "finance"), ("a/", "a"), ("Å", "A\u030a")]
)
def test_mqtt_4_7_3_4_nothing_is_normalised(topic_filter: str, topic: str) -> None:
    assert not filter_matches(topic_filter, topic)
    assert filter_matches(topic, topic)


@pytest.mark.parametrize(
    ("topic_filter", "matching", "others"),
    [
        ("sport/tennis/player1/#", ["sport/tennis/player1", "sport/tennis/player1/score/x"], ["sport/tennis"]),
        ("sport/#", ["sport", "sport/", "sport/a"], ["sports", "Sport"]),
        ("sport/+", ["sport/", "sport/a"], ["sport", "sport/a/b"]),
        ("+/+", ["/finance", "a/b"], ["finance", "a/b/c"]),
        ("/+", ["/finance"], ["finance", "/a/b"]),
        ("+", ["finance", "ä b.c"], ["/finance"]),
        ("#", ["a", "/", "a//b"], []),
        ("a//+", ["a//", "a//b"], ["a/b", "a/"]),
    ],
)
def test_filters_match_what_the_standard_shows(topic_filter: str, matching: list[str], others: list[str]) -> None:
    assert all(filter_matches(topic_filter, topic) for topic in matching)
    assert not any(filter_matches(topic_filter, topic) for topic in others)


def test_a_name_has_a_limited_number_of_levels() -> None:
    at_most = "/" * (LEVELS_MAX - 1)
    assert check_topic_name(at_most) == check_topic_filter(at_most) == at_most
    assert refusal(check_topic_name, at_most + "/") is Reason.TOPIC_NAME_INVALID
    assert refusal(check_topic_filter, at_most + "/") is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("name", ["a/b", "sensors/7/temperature", "A_-9", "_inbox/x", "x" * 255])
def test_an_mqtt_topic_is_a_topic_and_back(name: str) -> None:
    topic = to_topic(name)
    assert topic == name.replace("/", ".")
    assert from_topic(topic) == name


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "a b", "a.b", "ä", "$SYS/x", "a/+", "#", "x" * 256, "a\n", "a/b\n"]
)
def test_what_is_no_topic_of_the_broker_maps_to_none(name: str) -> None:
    assert to_topic(name) is None


@pytest.mark.parametrize(
    ("topic_filter", "pattern"),
    [("a/b", "a.b"), ("a/+/c", "a.*.c"), ("#", "#"), ("a/#", "a.#"), ("+/#", "*.#"), ("+", "*")],
)
def test_a_filter_is_a_pattern(topic_filter: str, pattern: str) -> None:
    assert to_pattern(topic_filter) == pattern


@pytest.mark.parametrize("topic_filter", ["/#", "a//+", "a b/#", "a.b", "$SYS/#", "a*", "x/" * 127 + "##", "x" * 256])
def test_a_filter_that_finds_no_topic_is_no_pattern(topic_filter: str) -> None:
    assert to_pattern(topic_filter) is None


def test_a_shared_filter_names_its_group_and_its_filter() -> None:
    assert parse_share("$share/workers/jobs/+/#") == Share("workers", "jobs/+/#")
    assert parse_share("$share/g//") == Share("g", "/")
    assert parse_share("$share/g/$queue/a/b") == Share("g", "$queue/a/b")
    assert parse_share("jobs/#") is None
    assert parse_share("$shared/g/x") is None


def test_mqtt_4_8_2_1_a_share_has_a_name() -> None:
    assert refusal(parse_share, "$share//jobs") is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("topic_filter", ["$share/g+/x", "$share/#/x", "$share/+/x", "$share/g", "$share/g/"])
def test_mqtt_4_8_2_2_the_name_has_no_wildcards_and_a_filter_follows(topic_filter: str) -> None:
    assert refusal(parse_share, topic_filter) is Reason.TOPIC_FILTER_INVALID


def test_the_filter_of_a_share_must_be_valid_too() -> None:
    assert refusal(parse_share, "$share/g/a#") is Reason.TOPIC_FILTER_INVALID


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("$queue/jobs", QueueAddress("jobs")),
        ("$queue/a/b", QueueAddress("a.b")),
        ("$queue/a/b/$ack", QueueAddress("a.b", "ack")),
        ("$queue/a/$nack", QueueAddress("a", "nack")),
        ("$queue/a/b/$reject", QueueAddress("a.b", "reject")),
        ("$queue/dlq/a/b", QueueAddress("a.b", dead_letters=True)),
        ("$queue/dlq/a/$ack", QueueAddress("a", "ack", dead_letters=True)),
        ("$queue/dlq", QueueAddress("dlq")),
        ("$queue/dlq/$ack", QueueAddress("dlq", "ack")),
        ("$admin/queue/create", QueueAddress("", "create")),
        ("$admin/queue/a/b/config", QueueAddress("a.b", "config")),
        ("$admin/queue/create/stats", QueueAddress("create", "stats")),
    ],
)
def test_queue_topics_say_which_queue_and_what_to_do(name: str, address: QueueAddress) -> None:
    assert parse_queue(name) == address
    assert address.is_admin == name.startswith("$admin")


@pytest.mark.parametrize("name", ["a/b", "queue/a", "$queue", "$queues/a", "$SYS/x", "$admin/topics"])
def test_other_topics_are_no_queues(name: str) -> None:
    assert parse_queue(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "$queue/",
        "$queue//a",
        "$queue/a b",
        "$queue/a/$ak",
        "$queue/$ack",
        "$queue/a/$ack/b",
        "$queue/+",
        "$queue/a/#",
        "$queue/dlq/",
        "$admin/queue/",
        "$admin/queue/config",
        "$admin/queue/a/drop",
        "$admin/queue/+/stats",
    ],
)
def test_a_queue_topic_that_says_nothing_is_refused(name: str) -> None:
    assert refusal(parse_queue, name) is Reason.TOPIC_NAME_INVALID
    assert refusal(parse_queue, name, Reason.TOPIC_FILTER_INVALID) is Reason.TOPIC_FILTER_INVALID

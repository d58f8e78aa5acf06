"""Names: what MQTT calls a topic and what everybody else calls it, filters, shared subscriptions and queues.

`a/b` of MQTT is the topic `a.b`.  A name with empty levels, dots, spaces or other letters is a fine MQTT topic, but no
topic of the broker.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.names import NAME_BYTES_MAX

__all__ = [
    "LEVELS_MAX",
    "SYSTEM_PREFIX",
    "QueueAction",
    "QueueAddress",
    "Share",
    "check_topic_filter",
    "check_topic_name",
    "filter_matches",
    "from_topic",
    "is_special",
    "parse_queue",
    "parse_share",
    "to_pattern",
    "to_topic",
]

#: Every level of a filter is a step in memory, and a name of nothing but slashes would be 65,536 of them.
LEVELS_MAX: Final = 200
_BYTES_MAX: Final = 65_535
_CHARACTER_BYTES_MAX: Final = 4

#: Names that need not be looked at again: messages have few topics, compared with how many they are.
_REMEMBERED: Final = 4096
_LEVEL: Final = r"[A-Za-z0-9_-]+"
_MAPPABLE_TOPIC: Final = re.compile(rf"{_LEVEL}(?:/{_LEVEL})*")
_MAPPABLE_FILTER: Final = re.compile(rf"(?:{_LEVEL}|\+)(?:/(?:{_LEVEL}|\+))*(?:/#)?|#")
_TO_PATTERN: Final = str.maketrans("/+", ".*")

_SHARE: Final = "$share/"
_QUEUE: Final = "$queue/"
_ADMIN: Final = "$admin/queue/"
#: The broker's own figures.
SYSTEM_PREFIX: Final = "$SYS/"
_SPECIAL: Final = (SYSTEM_PREFIX, _SHARE, _QUEUE, "$admin/")


def check_topic_name(name: str) -> str:
    """The name itself, or MqttViolation with a sentence that says what is wrong."""
    return _checked_name(name) if len(name) <= NAME_BYTES_MAX else _check_name(name)


def _check_name(name: str) -> str:
    if "+" in name or "#" in name:
        raise MqttViolation(
            Reason.TOPIC_NAME_INVALID, f"topic name {_shown(name)} has a wildcard; only filters may have one"
        )
    return _check_text(name, "topic name", Reason.TOPIC_NAME_INVALID)


#: What is longer would only fill the memory.
_checked_name: Final = lru_cache(maxsize=_REMEMBERED)(_check_name)


def check_topic_filter(topic_filter: str) -> str:
    """The filter itself, or MqttViolation with a sentence that says what is wrong."""
    _check_text(topic_filter, "topic filter", Reason.TOPIC_FILTER_INVALID)
    if "#" in topic_filter and ("#" in topic_filter[:-1] or topic_filter[-2:] not in ("#", "/#")):
        raise _invalid_filter(f"topic filter {_shown(topic_filter)} is not valid: '#' is the whole last level")
    if "+" in topic_filter and any("+" in level and level != "+" for level in topic_filter.split("/")):
        raise _invalid_filter(f"topic filter {_shown(topic_filter)} is not valid: '+' is a whole level")
    return topic_filter


def to_topic(mqtt_topic: str) -> str | None:
    """The topic that an MQTT topic name stands for; None if there can be none."""
    return _to_topic(mqtt_topic) if len(mqtt_topic) <= NAME_BYTES_MAX else None


@lru_cache(maxsize=_REMEMBERED)
def _to_topic(mqtt_topic: str) -> str | None:
    return mqtt_topic.replace("/", ".") if _MAPPABLE_TOPIC.fullmatch(mqtt_topic) else None


@lru_cache(maxsize=_REMEMBERED)
def from_topic(name: str) -> str:
    """What a topic is called in MQTT."""
    return name.replace(".", "/")


def to_pattern(topic_filter: str) -> str | None:
    """The pattern that finds the same topics as a filter; None if no topic can match the filter."""
    if len(topic_filter) > NAME_BYTES_MAX or not _MAPPABLE_FILTER.fullmatch(topic_filter):
        return None
    return topic_filter.translate(_TO_PATTERN)


def is_special(name: str) -> bool:
    """Whether a name or filter has a meaning of its own; others that begin with `$` are like any, but for wildcards."""
    return name.startswith(_SPECIAL)


def filter_matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter matches a topic name; the one place that says what matching means."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False
    for depth, want in enumerate(wanted):
        if want == "#":
            return True
        if depth == len(levels) or want not in ("+", levels[depth]):
            return False
    return len(wanted) == len(levels)


class Share(NamedTuple):
    """`$share/{group}/{filter}`: each message goes to one of those who subscribed so."""

    group: str
    filter: str


def parse_share(topic_filter: str) -> Share | None:
    """None for a filter that is nobody's share; MqttViolation for one that wants to be and is not valid."""
    if not topic_filter.startswith(_SHARE):
        return None
    group, slash, shared = topic_filter[len(_SHARE) :].partition("/")
    if not group or "+" in group or "#" in group:
        raise _invalid_filter(f"shared filter {_shown(topic_filter)} needs a name without wildcards behind '$share/'")
    if not slash or not shared:
        raise _invalid_filter(f"shared filter {_shown(topic_filter)} needs a topic filter behind the name of the share")
    return Share(group, check_topic_filter(shared))


#: Empty for the messages themselves: whoever publishes there enqueues, whoever subscribes leases.
QueueAction: TypeAlias = Literal["", "ack", "nack", "reject", "create", "config", "stats"]

_SETTLING: Final[dict[str, QueueAction]] = {"$ack": "ack", "$nack": "nack", "$reject": "reject"}
_ADMINISTERING: Final[dict[str, QueueAction]] = {"config": "config", "stats": "stats"}


class QueueAddress(NamedTuple):
    """What a topic under `$queue/` or `$admin/queue/` speaks of."""

    #: The queue's topic, `a.b`; empty with `create`, which says it in the payload.
    topic: str
    action: QueueAction = ""
    #: The dead letters of that queue, not the queue itself.
    dead_letters: bool = False

    @property
    def is_admin(self) -> bool:
        return self.action in ("create", "config", "stats")


def parse_queue(name: str, reason: Reason = Reason.TOPIC_NAME_INVALID) -> QueueAddress | None:
    """None for a name or filter outside `$queue/` and `$admin/queue/`; MqttViolation for one inside that says nothing.

    `reason` is what a violation says: that of a filter when somebody subscribes.
    """
    if name.startswith(_QUEUE):
        levels = name[len(_QUEUE) :].split("/")
        action = _SETTLING.get(levels[-1], "")
        if action:
            levels.pop()
        # `$queue/dlq` alone is a queue that is called so.
        dead_letters = len(levels) > 1 and levels[0] == "dlq"
        topic = to_topic("/".join(levels[1:] if dead_letters else levels))
        if topic is None:
            raise MqttViolation(
                reason,
                f"{_shown(name)} names no queue: use '$queue/' and levels of letters, digits, '-' and '_', "
                "and nothing but '/$ack', '/$nack' or '/$reject' behind them",
            )
        return QueueAddress(topic, action, dead_letters)
    if name.startswith(_ADMIN):
        path, _, last = name[len(_ADMIN) :].rpartition("/")
        if not path and last == "create":
            return QueueAddress("", "create")
        topic = to_topic(path)
        if topic is None or last not in _ADMINISTERING:
            raise MqttViolation(
                reason,
                f"{_shown(name)} is nothing to administer: use '$admin/queue/create', "
                "'$admin/queue/NAME/config' or '$admin/queue/NAME/stats'",
            )
        return QueueAddress(topic, _ADMINISTERING[last])
    return None


def _check_text(text: str, what: str, reason: Reason) -> str:
    if not text:
        raise MqttViolation(reason, f"a {what} has at least one character")
    if "\0" in text:
        raise MqttViolation(reason, f"{what} {_shown(text)} has the character U+0000")
    if len(text) * _CHARACTER_BYTES_MAX > _BYTES_MAX and len(text.encode()) > _BYTES_MAX:
        raise MqttViolation(reason, f"{what} {_shown(text)} has more than {_BYTES_MAX} bytes")
    if text.count("/") >= LEVELS_MAX:
        raise MqttViolation(reason, f"{what} {_shown(text)} has more than {LEVELS_MAX} levels")
    return text


def _invalid_filter(text: str) -> MqttViolation:
    return MqttViolation(Reason.TOPIC_FILTER_INVALID, text)


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}... ({len(name)} characters)"

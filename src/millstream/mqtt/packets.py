"""The packets of MQTT as values: what a client says and what it is told, the same for 3.1.1 and 5.

Properties exist in version 5 only; a packet of 3.1.1 has `NO_PROPERTIES`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

__all__ = [
    "NO_PROPERTIES",
    "V4",
    "V5",
    "Auth",
    "Connack",
    "Connect",
    "Disconnect",
    "Filter",
    "Packet",
    "Pingreq",
    "Pingresp",
    "Properties",
    "Puback",
    "Pubcomp",
    "Publish",
    "Pubrec",
    "Pubrel",
    "Suback",
    "Subscribe",
    "Unsuback",
    "Unsubscribe",
    "Will",
]

#: Protocol levels, as CONNECT names them.
V4: Final = 4
V5: Final = 5


class Properties(msgspec.Struct, frozen=True, gc=False):
    """What version 5 adds to a packet; None where nothing was said."""

    payload_format: int | None = None
    message_expiry_s: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    subscription_ids: tuple[int, ...] = ()
    session_expiry_s: int | None = None
    assigned_client_id: str | None = None
    server_keep_alive_s: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem_information: int | None = None
    will_delay_s: int | None = None
    request_response_information: int | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: int | None = None
    user: tuple[tuple[str, str], ...] = ()
    maximum_packet_bytes: int | None = None
    wildcards_available: int | None = None
    subscription_ids_available: int | None = None
    shared_available: int | None = None


#: The one object that packets without properties share.
NO_PROPERTIES: Final = Properties()


class Will(msgspec.Struct, frozen=True):
    """What is published when a client is lost."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = NO_PROPERTIES


class Connect(msgspec.Struct, frozen=True):
    version: int
    client_id: str = ""
    #: `clean session` in 3.1.1.
    clean_start: bool = True
    keep_alive_s: int = 0
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = NO_PROPERTIES


class Connack(msgspec.Struct, frozen=True):
    reason: int = 0
    session_present: bool = False
    properties: Properties = NO_PROPERTIES


class Publish(msgspec.Struct, frozen=True):
    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    #: 0 with QoS 0.
    packet_id: int = 0
    properties: Properties = NO_PROPERTIES


class _Answer(msgspec.Struct, frozen=True):
    packet_id: int
    reason: int = 0
    properties: Properties = NO_PROPERTIES


class Puback(_Answer, frozen=True):
    pass


class Pubrec(_Answer, frozen=True):
    pass


class Pubrel(_Answer, frozen=True):
    pass


class Pubcomp(_Answer, frozen=True):
    pass


class Filter(msgspec.Struct, frozen=True):
    """One line of a SUBSCRIBE; everything but the QoS is of version 5."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


class Subscribe(msgspec.Struct, frozen=True):
    packet_id: int
    filters: tuple[Filter, ...]
    properties: Properties = NO_PROPERTIES


class Suback(msgspec.Struct, frozen=True):
    packet_id: int
    reasons: tuple[int, ...]
    properties: Properties = NO_PROPERTIES


class Unsubscribe(msgspec.Struct, frozen=True):
    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NO_PROPERTIES


class Unsuback(msgspec.Struct, frozen=True):
    packet_id: int
    #: None of them travels in 3.1.1.
    reasons: tuple[int, ...] = ()
    properties: Properties = NO_PROPERTIES


class Pingreq(msgspec.Struct, frozen=True):
    pass


class Pingresp(msgspec.Struct, frozen=True):
    pass


class Disconnect(msgspec.Struct, frozen=True):
    reason: int = 0
    properties: Properties = NO_PROPERTIES


class Auth(msgspec.Struct, frozen=True):
    reason: int = 0
    properties: Properties = NO_PROPERTIES


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)

"""The control calls about keys, quotas and the audit log."""

from __future__ import annotations

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "AuditEntry",
    "AuditPage",
    "CreateKey",
    "KeyInfo",
    "ListAudit",
    "ListKeys",
    "NewKey",
    "QuotaInfo",
    "RevokeKey",
    "RotateKey",
    "SetQuota",
    "ShowQuota",
]


# --- keys --------------------------------------------------------------------------------------------------------


class CreateKey(CallForm, tag="key.create"):
    """Makes an API key.  Answers with NewKey: its text is shown this once and kept nowhere."""

    #: admin, consume, produce or read; at least one.
    roles: list[str]
    #: Where it holds: `NAMESPACE:TOPIC` with patterns, such as `default:orders.#`; none = everywhere.
    scopes: list[str] = []
    #: For people.
    name: str = ""
    #: 0 = until it is revoked.
    expires_ms: int = 0


class KeyInfo(AnswerForm):
    id: str
    name: str
    roles: list[str]
    scopes: list[str]
    created_ms: int
    expires_ms: int
    rotated_ms: int
    #: Until when the secret from before the last rotation is valid; 0 = it is not.
    old_until_ms: int
    #: When the key was last used since the broker started; 0 = not used.
    last_used_ms: int


class NewKey(AnswerForm):
    #: The text to give to its holder: `ms_<id>_<secret>`.
    key: str
    info: KeyInfo


class ListKeys(CallForm, tag="key.list"):
    """Answers with a list of KeyInfo, the oldest first."""


class RotateKey(CallForm, tag="key.rotate"):
    """Gives a key another secret; the one before is good for `grace_ms` more.  Answers with NewKey."""

    id: str
    grace_ms: int = 24 * 3_600_000


class RevokeKey(CallForm, tag="key.revoke"):
    """Ends a key; whoever is connected with it is disconnected."""

    id: str


# --- quotas ------------------------------------------------------------------------------------------------------


class SetQuota(CallForm, tag="namespace.quota.set"):
    """Limits what a namespace may have and do; 0 = no limit.  Answers with QuotaInfo."""

    namespace: str
    topics: int = 0
    partitions: int = 0
    storage_bytes: int = 0
    publish_messages_per_s: int = 0
    publish_bytes_per_s: int = 0
    connections: int = 0


class ShowQuota(CallForm, tag="namespace.quota"):
    """Answers with QuotaInfo."""

    namespace: str


class QuotaInfo(AnswerForm):
    """The limits of a namespace, 0 where there is none, and how much of them is used."""

    namespace: str
    topics: int = 0
    partitions: int = 0
    storage_bytes: int = 0
    publish_messages_per_s: int = 0
    publish_bytes_per_s: int = 0
    connections: int = 0
    topics_used: int = 0
    partitions_used: int = 0
    storage_bytes_used: int = 0
    connections_used: int = 0
    #: Requests refused because of the quota, since it was set or the broker started.
    refused: int = 0


# --- audit -------------------------------------------------------------------------------------------------------


class ListAudit(CallForm, tag="audit.list"):
    """Answers with AuditPage, the newest first.  Empty fields match everything."""

    key: str = ""
    call: str = ""
    from_ms: int = 0
    until_ms: int = 0
    limit: int = 100
    #: Where an answer before this one ended.
    after: str = ""


class AuditEntry(AnswerForm):
    """Something that an administrator did or tried."""

    time_ms: int
    #: The id of the key; empty while access is off.
    key: str
    client_id: str
    address: str
    #: native, http, …
    door: str
    call: str
    namespace: str
    #: The topics, groups and ids that were named.
    names: list[str]
    #: `done`, the code of the error, or `GIVEN_UP` if the client went away in the middle.
    outcome: str


class AuditPage(AnswerForm):
    entries: list[AuditEntry]
    #: Pass it to the next call; empty = that was all.
    after: str = ""

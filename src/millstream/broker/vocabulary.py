"""Everything that stands in state logs and journals, by name.

What is not here was written by a newer version.  It is not passed over: whoever reads a fact without one of its fields
writes it down again without it.  So logs with such facts are not opened, and stay as they are.

A name that is added here cannot be read by earlier versions: see `log/format.py`.  A name that is not written any more
stays, for directories that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from millstream.errors import NewerData

__all__ = ["DOCUMENTS", "FACTS", "check_document", "check_fact"]

#: Of each state log: the first part of a key, or anything (""), and the fields of its documents.
DOCUMENTS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    directory: {kind: frozenset(fields.split()) for kind, fields in kinds.items()}
    for directory, kinds in {
        "state/topics": {
            "namespace": "created_ms",
            "topic": "config partition_uids created_ms deleting",
            "producer-ids": "until",
        },
        "state/groups": {
            "group": "name strategy protocol generation draining paused created_at_ms rebalanced_at_ms emptied_at_ms "
            "begun former members",
            "offset": "offset metadata committed_at_ms",
        },
        "state/queues": {"queue": "policy made_us", "pattern": "policy made_us"},
        "state/replays": {
            "order": "namespace call ends uids",
            "progress": "id status reason target rate total replayed failed relapsed created_ms finished_ms failures",
        },
        "state/schedules": {
            "": "namespace name topic cron timezone created_ms producer_id done_ms key value headers priority paused "
            "catch_up last_ms published reached_ms",
        },
        "state/webhooks": {
            "": "id namespace topic group url created_ms secrets headers concurrency rate timeout_ms retry_delays_ms "
            "reject_client_errors payload paused reason",
        },
        "state/access": {
            "key": "id name roles scopes created_ms expires_ms rotated_ms secrets",
            "quota": "topics partitions storage_bytes publish_messages_per_s publish_bytes_per_s connections",
        },
        "state/stages": {
            "query": "number namespace query used_ms published published_ms messages lost offsets publishing producer "
            "sequences",
        },
        "state/pipelines": {"pipeline": "namespace report reported_ms runs wished stop_wished noted_ms"},
    }.items()
}

#: Of journals: the first part of an entity's name, and the kinds of its facts.
FACTS: Final[Mapping[str, frozenset[bytes]]] = {
    entity: frozenset(kinds.encode().split())
    for entity, kinds in {
        "queue": "start settled returned totals cut",
        "burials": "owed written cut",
        "lanes": "seen surveyed",
        "transfers": "producer intent done next",
        "schedules": "moved agenda fired cancelled expired lost",
        "session": "is sub unsub kept queue unqueue at since gone sent lent held rec done got rel will left",
    }.items()
}


#: Where the first item is in a list that is long, by its first byte.
_FIRST: Final = {0xDC: 3, 0xDD: 5}


def check_document(directory: str, key: str, document: Any) -> None:
    """Raise NewerData unless all that a document of a state log says is understood."""
    kinds = DOCUMENTS.get(directory)
    if kinds is None:
        return
    fields = kinds.get(key.partition("/")[0], kinds.get(""))
    if fields is None:
        raise _newer(directory, f"a fact about {key!r}")
    if unknown := document.keys() - fields:
        raise _newer(directory, f"{_listed(unknown)} of {key!r}")


def check_fact(directory: str, entity: str, fact: bytes) -> None:
    """Raise NewerData unless the kind of a fact is one that its entity understands; the fact as msgpack has it.

    Of an entity that nobody knows nobody reads the facts, and they are kept.
    """
    kinds = FACTS.get(entity.partition("/")[0])
    if kinds is None:
        return
    # The first item of a list, a short text: the rest is not unpacked, as there may be a million facts.
    at = _FIRST.get(fact[0], 1)
    kind = fact[at + 1 : at + 1 + (fact[at] & 0x1F)] if len(fact) > at else b""
    if kind not in kinds:
        raise _newer(directory, f"a fact {kind.decode('ascii', 'replace')!r} about {entity!r}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names)))


def _newer(directory: str, what: str) -> NewerData:
    return NewerData(
        f"{directory} has {what}, which this version of Millstream does not know: "
        "use the version that wrote it or a newer one"
    )

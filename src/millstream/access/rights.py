"""What the holder of a key may do, and where.

A role is a set of permissions, a scope is where they hold: a pattern of namespaces and a pattern of topics.  What is
asked for is again a name or a pattern, so that somebody who subscribes to `orders.#` needs a scope that covers all of
it.  Topics whose name begins with `_` are the broker's own: they need the role admin, and nobody but the broker writes
to the audit log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from millstream.errors import Forbidden, InvalidArgument, MillstreamError
from millstream.names import (
    AUDIT_TOPIC,
    DEFAULT_NAMESPACE,
    INBOX_PREFIX,
    NAME_BYTES_MAX,
    check_namespace,
    check_pattern,
    is_system,
)

__all__ = [
    "ANYWHERE",
    "EVERYTHING",
    "EVERY_NAMESPACE",
    "EVERY_TOPIC",
    "PERMISSIONS_OF",
    "Access",
    "Permission",
    "Scope",
    "covers",
    "parse_scope",
]

#: `any`: whatever role a key has.
Permission: TypeAlias = Literal["any", "read", "produce", "consume", "admin"]

#: Who may take messages away may look at them as well; who may only publish sees nothing.
PERMISSIONS_OF: Final[dict[str, frozenset[str]]] = {
    "admin": frozenset(("any", "read", "produce", "consume", "admin")),
    "consume": frozenset(("any", "read", "consume")),
    "produce": frozenset(("any", "produce")),
    "read": frozenset(("any", "read")),
}

EVERY_NAMESPACE: Final = "*"
EVERY_TOPIC: Final = "#"
#: In place of a topic: wherever in the namespace the permission holds.
ANYWHERE: Final = ""

#: Answers that are remembered for one key; beyond it they are worked out again.
_REMEMBERED_MAX: Final = 10_000


class Scope(NamedTuple):
    """Where a key holds: `team-*` or `*` for namespaces, `orders.#` for topics."""

    namespace: str = EVERY_NAMESPACE
    topic: str = EVERY_TOPIC

    def __str__(self) -> str:
        return f"{self.namespace}:{self.topic}"

    def holds(self, namespace: str, topic: str) -> bool:
        mine = self.namespace
        if mine != namespace and not (mine.endswith("*") and namespace.startswith(mine[:-1])):
            return False
        return topic == ANYWHERE or covers(self.topic, topic)


def parse_scope(text: str) -> Scope:
    """`orders.#` in the namespace `default`, `team-a:orders.#`, `*:#`.  Raises InvalidName or InvalidArgument."""
    namespace, colon, topic = text.partition(":")
    if not colon:
        namespace, topic = DEFAULT_NAMESPACE, text
    if not topic or not namespace:
        raise InvalidArgument(f"scope {text[:80]!r} is not NAMESPACE:TOPIC, such as 'default:orders.#' or 'team-*:#'")
    if namespace != EVERY_NAMESPACE:
        check_namespace(namespace[:-1] if namespace.endswith("*") else namespace)
    check_pattern(topic)
    return Scope(namespace, topic)


def covers(pattern: str, wanted: str) -> bool:
    """Whether everything that `wanted` (a name or a pattern) can stand for matches `pattern`."""
    mine, other = pattern.split("."), wanted.split(".")
    for at, level in enumerate(mine):
        if level == "#":
            return True
        if at == len(other):
            return False
        if other[at] == "#" or (level != "*" and level != other[at]):
            return False
    return len(mine) == len(other)


class Access:
    """The rights of one secret; shared by everybody who came with it, so that revoking it is felt by all at once."""

    __slots__ = ("_known", "_permissions", "_roles", "_scopes", "key_id", "refusal")

    def __init__(self, key_id: str, roles: Iterable[str], scopes: Iterable[Scope]) -> None:
        self.key_id = key_id
        self._roles = tuple(roles)
        self._permissions = frozenset().union(*(PERMISSIONS_OF[role] for role in self._roles))
        self._scopes = tuple(scopes) or (Scope(),)
        self._known: dict[tuple[str, str, str], bool] = {}
        #: Why these rights are no longer any.
        self.refusal: MillstreamError | None = None

    def __repr__(self) -> str:
        return f"Access({self.key_id!r}, {'+'.join(self._roles) or 'nothing'})"

    def may(self, permission: str, namespace: str, topic: str = ANYWHERE) -> bool:
        """Whether this is allowed on a topic, on all topics of a pattern, or `ANYWHERE` in a namespace."""
        asked = (permission, namespace, topic)
        known = self._known.get(asked)
        if known is None:
            known = self._decide(permission, namespace, topic)
            if len(topic) <= NAME_BYTES_MAX:  # what is longer is no name, and would only fill the memory
                if len(self._known) >= _REMEMBERED_MAX:
                    self._known.clear()
                self._known[asked] = known
        return known

    def require(self, permission: str, namespace: str, topic: str = ANYWHERE) -> None:
        """Raises Forbidden, or what has ended these rights."""
        if self._known.get((permission, namespace, topic)):  # once per batch, so without another call
            return
        if not self.may(permission, namespace, topic):
            raise self.refusal or Forbidden(self._missing(permission, namespace, topic))

    def require_role(self, permission: str) -> None:
        """The permission in some namespace, wherever that is."""
        if permission not in self._permissions:
            raise self.refusal or Forbidden(self._missing(permission, EVERY_NAMESPACE, ANYWHERE))

    def sees(self, namespace: str, topic: str) -> bool:
        """Whether a topic shows up in lists."""
        return self.may("any", namespace, topic)

    def revoke(self, why: MillstreamError) -> None:
        self.refusal = why
        self._scopes, self._permissions = (), frozenset()
        self._known.clear()

    def _decide(self, permission: str, namespace: str, topic: str) -> bool:
        permissions = self._permissions
        if topic.startswith(INBOX_PREFIX):
            # An address that cannot be guessed, given by whoever waits there: workers reply although they only consume.
            topic = ANYWHERE
            permission = "consume" if permission == "produce" and permission not in permissions else permission
        elif is_system(topic):
            if "admin" not in permissions:
                return False
            if (namespace, topic) == (DEFAULT_NAMESPACE, AUDIT_TOPIC) and permission in ("produce", "admin"):
                return False
        return permission in permissions and any(scope.holds(namespace, topic) for scope in self._scopes)

    def _missing(self, permission: str, namespace: str, topic: str) -> str:
        if (namespace, topic) == (DEFAULT_NAMESPACE, AUDIT_TOPIC):
            if permission in ("produce", "admin"):
                alone = "is the audit log, written by the broker alone: no key allows it; use another topic"
                return f"topic {topic!r} {alone}"
            return f"topic {topic!r} is the audit log, read only with the role 'admin'"
        if namespace == EVERY_NAMESPACE:
            where = "the whole broker"
        elif topic == ANYWHERE:
            where = f"anything in namespace {namespace!r}"
        else:
            where = f"{topic[:255]!r} in namespace {namespace!r}"
        what = "a role" if permission == "any" else f"{permission!r}"
        who = f"key {self.key_id!r}" if self.key_id else "who has no key"
        return f"{who} lacks {what} on {where}"


class _Everything(Access):
    """Access is off: nobody looks.  But an audit log that is kept later must have nothing in it that is none."""

    __slots__ = ()

    def may(self, permission: str, namespace: str, topic: str = ANYWHERE) -> bool:
        return permission != "produce" or (namespace, topic) != (DEFAULT_NAMESPACE, AUDIT_TOPIC)


#: What everybody may while access is off.  Compared by identity where every nanosecond counts.
EVERYTHING: Final[Access] = _Everything("", ("admin",), ())

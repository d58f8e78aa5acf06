"""The one place where it is decided who may do what: keys come in, rights go out, calls are let through or not.

A key's rights are one object per secret, shared by everybody who came with that secret, so that a key that is revoked,
rotated away or expired is felt at once by requests that are under way, and its connections are ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog

from millstream.access.keys import Key, Secret, draw_id, draw_secret, key_text, parse_key
from millstream.access.rates import Buckets
from millstream.access.rights import ANYWHERE, EVERY_TOPIC, EVERYTHING, Access
from millstream.broker.access.audit import Audit
from millstream.broker.access.permissions import PERMISSIONS, UNKNOWN, Need, Rule
from millstream.broker.metrics import Metrics
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.config import Settings
from millstream.dead_letters import DEAD_LETTER_SUFFIX
from millstream.errors import (
    InternalError,
    InvalidArgument,
    KeyNotFound,
    MillstreamError,
    QuotaExceeded,
    ScheduleNotFound,
    Throttled,
    Unauthorized,
)
from millstream.ids import parse_message_id, schedule_uid
from millstream.wire import access_calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.groups import Groups
    from millstream.broker.schedules.schedules import Schedules

__all__ = ["AccessControl"]

_log = structlog.get_logger("millstream.access")

Handler = Callable[["Session", Any], Awaitable[object]]

KEYS_MAX: Final = 10_000
_GRACE_MS_MAX: Final = 30 * 24 * 3_600_000
_KEY: Final = "key/"


class _Host(Protocol):
    settings: Settings
    metrics: Metrics
    topics: Topics
    groups: Groups
    schedules: Schedules

    def end_access(self, access: Access, why: MillstreamError, /) -> None: ...


class AccessControl:
    """Keys, and what they allow."""

    def __init__(self, host: _Host, log: StateLog, audit: Audit, *, clock: Clock, rng: random.Random) -> None:
        self._host = host
        self._log = log
        self._audit = audit
        self._clock = clock
        self._rng = rng
        self.is_on = host.settings.needs_keys
        limits = host.settings.limits
        burst = limits.burst
        self._by_address = Buckets(limits.requests_per_s_per_address, burst or limits.requests_per_s_per_address)
        self._by_key = Buckets(limits.requests_per_s_per_key, burst or limits.requests_per_s_per_key)
        self._logins = Buckets(limits.connections_per_s_per_address, limits.connections_per_s_per_address)
        self._wrong = Buckets(limits.wrong_keys_per_minute / 60, limits.wrong_keys_per_minute)
        self._keys: dict[str, Key] = {}
        #: By key and hash of the secret.
        self._rights: dict[tuple[str, str], Access] = {}
        self._used_ms: dict[str, int] = {}
        #: One change at a time: a rotation must not bring back a key that is being revoked.
        self._changing = asyncio.Lock()
        #: What those may who come without a key.
        self.anonymous = self._anonymous()

    def _anonymous(self) -> Access:
        if self.is_on:
            nobody = Access("", (), ())
            nobody.revoke(Unauthorized("this broker asks for a key, and there was none"))
            return nobody
        # With an audit log there is something that even an administrator may not do: write to it.
        return Access("", ("admin",), ()) if self._audit.is_on else EVERYTHING

    def handlers(self) -> dict[type, Handler]:
        return {
            access_calls.CreateKey: lambda _, call: self.create(call),
            access_calls.ListKeys: self._list,
            access_calls.RotateKey: lambda _, call: self.rotate(call),
            access_calls.RevokeKey: lambda _, call: self.revoke(call.id),
        }

    def replay(self, documents: Mapping[str, Any]) -> None:
        for name, document in documents.items():
            if name.startswith(_KEY):
                key = msgspec.convert(document, Key)
                self._keys[key.id] = key

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    # --- who is it -----------------------------------------------------------------------------------------------

    def authenticate(self, text: str | None, address: str) -> Access:
        """The rights of whoever comes with this key, or with none.  Raises Unauthorized, or Throttled."""
        if not self.is_on:
            return self.anonymous
        if not text:
            raise Unauthorized("this broker asks for a key, and there was none")
        access = self._rights_of(text)
        if access is not None:
            return access
        # Nobody guesses 256 bits; this is for the load, so those who share the address and have a key are let in.
        self._host.metrics.keys_refused += 1
        wait_ms = self._wrong.admit(host_of(address), self._clock.monotonic_ms())
        if wait_ms:
            raise _wait("too many wrong keys from this address", wait_ms)
        raise Unauthorized("this key is not known, has expired or was revoked")

    def _rights_of(self, text: str) -> Access | None:
        parts = parse_key(text)
        key = self._keys.get(parts[0]) if parts is not None else None
        if parts is None or key is None:
            return None
        now_ms = self._now_ms()
        for secret in key.valid_secrets(now_ms):
            if secret.matches(parts[1]):
                self._used_ms[key.id] = now_ms
                place = (key.id, secret.sha256)
                access = self._rights.get(place)
                if access is None:
                    access = self._rights[place] = Access(key.id, key.roles, key.parsed_scopes())
                return access
        return None

    def is_valid(self, key_id: str) -> bool:
        """Whether somebody who came with a key, or with none, would be let in with it now."""
        if not self.is_on:
            return True
        key = self._keys.get(key_id)
        return key is not None and any(key.valid_secrets(self._now_ms()))

    # --- how often -----------------------------------------------------------------------------------------------

    def admit_request(self, address: str) -> None:
        """Called first for each request at a door without connections of its own.  Raises Throttled."""
        if self._by_address.is_on:
            self._take(self._by_address, host_of(address), "requests from this address")

    def admit_key(self, access: Access) -> None:
        """Called when it is known whose request it is.  Raises Throttled."""
        if self._by_key.is_on and access.key_id:
            self._take(self._by_key, access.key_id, "requests with this key")

    def admit_connection(self, address: str) -> None:
        """Called for each new connection.  Raises Throttled."""
        if self._logins.is_on:
            self._take(self._logins, host_of(address), "connections from this address")

    def _take(self, buckets: Buckets, who: str, what: str) -> None:
        wait_ms = buckets.admit(who, self._clock.monotonic_ms())
        if wait_ms:
            self._host.metrics.requests_limited += 1
            raise _wait(f"too many {what}", wait_ms)

    # --- may it --------------------------------------------------------------------------------------------------

    async def perform(self, session: Session, call: object, handler: Handler) -> object:
        """Make a call for somebody whose rights are limited, and write it down if that is due."""
        rule = PERMISSIONS.get(type(call), UNKNOWN)
        try:
            self._check(session, call, rule)
        except MillstreamError as refusal:
            self._host.metrics.requests_forbidden += 1
            if rule.audited:
                await self._audit.refused(session, call, refusal)
            raise
        if not rule.audited:
            answer = await handler(session, call)
            if rule.permission == "read" and (ended := session.access.refusal) is not None:
                raise ended  # while it waited: what has come since is not for its eyes
            return self._shown(session, rule, answer)
        try:
            answer = await handler(session, call)
        except BaseException as problem:
            # Also when its client went away in the middle: part of it may have been done.
            await self._audit.record(session, call, _outcome_of(problem))
            raise
        await self._audit.record(session, call, "done")
        return self._shown(session, rule, answer)

    def _check(self, session: Session, call: object, rule: Rule) -> None:
        access = session.access
        if access.refusal is not None and rule.permission != "open":
            raise access.refusal
        for need in rule.needs(call):
            places = self._places(session.namespace, need)
            for namespace, topic in places:
                letters = need.kind == "message" and topic.endswith(DEAD_LETTER_SUFFIX)
                # The dead letters of a topic belong to whoever has the topic.
                if letters and access.may(need.permission, namespace, topic.removesuffix(DEAD_LETTER_SUFFIX)):
                    continue
                access.require(need.permission, namespace, topic)

    def _places(self, namespace: str, need: Need) -> list[tuple[str, str]]:
        """What a need is about.  What cannot be found needs the permission somewhere: its handler says so better."""
        if need.kind == "namespace":
            return [(need.name, EVERY_TOPIC)]
        if need.kind == "within":
            return [(need.name, ANYWHERE)]
        if need.kind == "topic":
            return [(namespace, need.name)]
        if need.kind == "message":
            topics = self._topics_of_message(namespace, need.name)
        elif need.kind == "group":
            topics = self._host.groups.topics_of(namespace, need.name)
        else:
            topics = self._topics_of_repeating(namespace, need.name)
        return [(namespace, topic) for topic in topics or [ANYWHERE]]

    def _topics_of_message(self, namespace: str, message: str) -> list[str]:
        try:
            uid = parse_message_id(message).partition_uid
        except InvalidArgument:
            return []
        place_of = self._host.topics.registry.place_of
        found = place_of(uid) or place_of(schedule_uid(uid))
        return [found[0].name] if found is not None and found[0].namespace == namespace else []

    def _topics_of_repeating(self, namespace: str, name: str) -> list[str]:
        try:
            return [self._host.schedules.recurring.show(namespace, name).topic]
        except ScheduleNotFound:
            return []

    @staticmethod
    def _shown(session: Session, rule: Rule, answer: object) -> object:
        if rule.shown is None:
            return answer
        return rule.shown(answer, lambda topic: session.access.sees(session.namespace, topic))

    # --- keys ----------------------------------------------------------------------------------------------------

    async def create(self, call: access_calls.CreateKey) -> access_calls.NewKey:
        now_ms = self._now_ms()
        if call.expires_ms and call.expires_ms <= now_ms:
            raise InvalidArgument("expires_ms must lie in the future, or be 0 for a key that does not expire")
        key_id = draw_id(self._rng.getrandbits)
        secret = draw_secret(self._rng.getrandbits)
        key = Key(
            id=key_id,
            name=call.name,
            roles=sorted(set(call.roles)),
            scopes=list(dict.fromkeys(call.scopes)),
            created_ms=now_ms,
            expires_ms=call.expires_ms,
            secrets=[Secret.of(secret)],
        )
        async with self._changing:
            if len(self._keys) >= KEYS_MAX:
                raise QuotaExceeded(f"the broker knows {KEYS_MAX} keys; revoke some")
            await self._record({_KEY + key_id: key})
            self._keys[key_id] = key
        _log.info("key created", key=key_id, name=key.name, roles=key.roles, scopes=key.scopes)
        return access_calls.NewKey(key=key_text(key_id, secret), info=self._info(key))

    async def _list(self, _: Session, __: access_calls.ListKeys) -> list[access_calls.KeyInfo]:
        return [self._info(key) for key in sorted(self._keys.values(), key=lambda key: (key.created_ms, key.id))]

    async def rotate(self, call: access_calls.RotateKey) -> access_calls.NewKey:
        if not 0 <= call.grace_ms <= _GRACE_MS_MAX:
            raise InvalidArgument(f"grace_ms must be between 0 and {_GRACE_MS_MAX}, not {call.grace_ms}")
        now_ms = self._now_ms()
        secret = draw_secret(self._rng.getrandbits)
        async with self._changing:
            key = self._get(call.id)
            old = [msgspec.structs.replace(key.secrets[0], until_ms=now_ms + call.grace_ms)] if call.grace_ms else []
            rotated = msgspec.structs.replace(key, secrets=[Secret.of(secret), *old], rotated_ms=now_ms)
            await self._record({_KEY + key.id: rotated})
            self._keys[key.id] = rotated
        _log.info("key rotated", key=key.id, grace_ms=call.grace_ms)
        await self.expire()
        return access_calls.NewKey(key=key_text(key.id, secret), info=self._info(rotated))

    async def revoke(self, key_id: str) -> None:
        async with self._changing:
            self._get(key_id)
            await self._record({_KEY + key_id: None})
            del self._keys[key_id]
        self._used_ms.pop(key_id, None)
        _log.info("key revoked", key=key_id)
        await self.expire()

    async def expire(self) -> None:
        """End rights whose secret is no longer valid.  Called about once a second, and after every change."""
        now_ms = self._now_ms()
        for (key_id, sha256), access in list(self._rights.items()):
            key = self._keys.get(key_id)
            if key is None or all(secret.sha256 != sha256 for secret in key.valid_secrets(now_ms)):
                del self._rights[key_id, sha256]
                why = Unauthorized(f"key {key_id!r} was revoked, was rotated or has expired")
                access.revoke(why)
                self._host.end_access(access, why)

    def _get(self, key_id: str) -> Key:
        key = self._keys.get(key_id)
        if key is None:
            raise KeyNotFound(f"there is no key {key_id[:80]!r}")
        return key

    def _info(self, key: Key) -> access_calls.KeyInfo:
        now_ms = self._now_ms()
        old = [secret.until_ms for secret in key.secrets[1:] if secret.until_ms > now_ms]
        return access_calls.KeyInfo(
            id=key.id,
            name=key.name,
            roles=key.roles,
            scopes=key.scopes,
            created_ms=key.created_ms,
            expires_ms=key.expires_ms,
            rotated_ms=key.rotated_ms,
            old_until_ms=max(old, default=0),
            last_used_ms=self._used_ms.get(key.id, 0),
        )

    async def _record(self, facts: Mapping[str, Any]) -> None:
        await self._log.record(facts, now_us=self._clock.now_us())

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000


def _outcome_of(problem: BaseException) -> str:
    if isinstance(problem, MillstreamError):
        return problem.code
    return "GIVEN_UP" if isinstance(problem, asyncio.CancelledError) else InternalError.code


def host_of(address: str) -> str:
    """An address without its port."""
    return address.rpartition(":")[0]


def _wait(what: str, wait_ms: int) -> Throttled:
    error = Throttled(f"{what}; wait {wait_ms} ms")
    error.retry_after_ms = wait_ms
    return error

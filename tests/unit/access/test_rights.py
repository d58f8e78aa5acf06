"""Roles and scopes: what a key allows, on names and on patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.rights import ANYWHERE, EVERYTHING, Access, Scope, covers, parse_scope
from millstream.errors import Forbidden, InvalidArgument, InvalidName, Unauthorized
from millstream.names import compile_pattern

level = st.sampled_from(["a", "b"])
topics = st.lists(level, min_size=1, max_size=4).map(".".join)
patterns = st.one_of(
    st.just("#"),
    st.tuples(st.lists(st.one_of(level, st.just("*")), min_size=1, max_size=4), st.booleans()).map(
        lambda drawn: ".".join(drawn[0]) + (".#" if drawn[1] else "")
    ),
)


@given(mine=patterns, wanted=patterns, topic=topics)
def test_a_pattern_that_covers_another_matches_whatever_that_matches(mine: str, wanted: str, topic: str) -> None:
    if covers(mine, wanted) and compile_pattern(wanted).fullmatch(topic):
        assert compile_pattern(mine).fullmatch(topic)


@given(mine=patterns, topic=topics)
def test_a_name_is_covered_exactly_when_it_matches(mine: str, topic: str) -> None:
    assert covers(mine, topic) == bool(compile_pattern(mine).fullmatch(topic))


@given(pattern=patterns)
def test_everything_covers_every_pattern_and_every_pattern_itself(pattern: str) -> None:
    assert covers("#", pattern)
    assert covers(pattern, pattern)


@pytest.mark.parametrize(
    ("scope", "namespace", "topic", "holds"),
    [
        ("orders.#", "default", "orders.eu", True),
        ("orders.#", "default", "orders", True),
        ("orders.#", "default", "orders.#", True),
        ("orders.#", "default", "#", False),
        ("orders.*", "default", "orders.#", False),
        ("orders.#", "team-a", "orders", False),
        ("team-*:orders", "team-a", "orders", True),
        ("team-*:orders", "default", "orders", False),
        ("team-*:#", "*", "#", False),
        ("*:#", "*", "#", True),
        ("team-a:orders", "team-a", ANYWHERE, True),
        ("team-a:orders", "team-b", ANYWHERE, False),
    ],
)
def test_a_scope_holds_where_it_says(scope: str, namespace: str, topic: str, holds: bool) -> None:
    access = Access("k", ["consume"], [parse_scope(scope)])
    assert access.may("consume", namespace, topic) is holds
    assert access.may("consume", namespace, topic) is holds  # remembered


@pytest.mark.parametrize(
    "text", ["", ":", "default:", ":orders", "Default:orders", "default:a..b", "default:#.a", "a*b:#"]
)
def test_what_is_not_a_scope_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        parse_scope(text)


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("admin", {"any", "read", "produce", "consume", "admin"}),
        ("consume", {"any", "read", "consume"}),
        ("produce", {"any", "produce"}),
        ("read", {"any", "read"}),
    ],
)
def test_a_role_is_a_set_of_permissions(role: str, allowed: set[str]) -> None:
    access = Access("k", [role], [])
    for permission in ("any", "read", "produce", "consume", "admin"):
        assert access.may(permission, "default", "orders") is (permission in allowed)


def test_two_roles_add_up_and_none_is_nothing() -> None:
    both = Access("k", ["produce", "read"], [])
    assert both.may("produce", "default", "x")
    assert both.may("read", "default", "x")
    assert not both.may("consume", "default", "x")
    assert not Access("k", [], []).may("any", "default")


def test_the_brokers_own_topics_are_for_administrators_and_the_audit_log_is_written_by_nobody() -> None:
    everybody = Access("k", ["produce", "consume"], [])
    admin = Access("k", ["admin"], [])
    assert not everybody.may("read", "default", "_audit")
    assert admin.may("read", "default", "_audit")
    for permission in ("produce", "admin"):
        assert not admin.may(permission, "default", "_audit")
    for whoever in (admin, everybody, EVERYTHING):
        with pytest.raises(Forbidden, match=r"written by the broker alone: no key allows it"):
            whoever.require("produce", "default", "_audit")
    with pytest.raises(Forbidden, match="read only with the role 'admin'"):
        everybody.require("read", "default", "_audit")
    assert not compile_pattern("#").fullmatch("_audit")
    assert not compile_pattern("*.x").fullmatch("_audit.x")


def test_workers_may_reply_to_an_inbox_outside_their_scope() -> None:
    worker = Access("k", ["consume"], [Scope("default", "orders")])
    assert worker.may("produce", "default", "_inbox.0123456789abcdef")
    assert not worker.may("produce", "default", "orders")
    assert not worker.may("produce", "team-a", "_inbox.0123456789abcdef")
    assert not Access("k", ["read"], []).may("produce", "default", "_inbox.0123456789abcdef")


def test_the_refusal_says_what_is_missing_on_what() -> None:
    access = Access("abc", ["read"], [Scope("default", "orders")])
    with pytest.raises(Forbidden, match="key 'abc' lacks 'produce' on 'orders' in namespace 'default'"):
        access.require("produce", "default", "orders")
    with pytest.raises(Forbidden, match="lacks 'admin' on the whole broker"):
        access.require("admin", "*", "#")


def test_revoking_is_felt_by_whoever_holds_the_rights_already() -> None:
    access = Access("abc", ["admin"], [])
    assert access.may("admin", "default", "orders")
    access.revoke(Unauthorized("gone"))
    assert not access.may("admin", "default", "orders")
    with pytest.raises(Unauthorized, match="gone"):
        access.require("read", "default", "orders")


def test_what_is_remembered_has_an_end() -> None:
    access = Access("abc", ["read"], [Scope("default", "t.#")])
    for number in range(25_000):
        assert access.may("read", "default", f"t.{number}")
    assert len(access._known) <= 10_000


def test_everything_is_everything() -> None:
    assert EVERYTHING.may("admin", "*", "#")
    assert EVERYTHING.may("admin", "default", "_audit")
    assert not EVERYTHING.may("produce", "default", "_audit"), "which is the broker's own, whoever may do what"

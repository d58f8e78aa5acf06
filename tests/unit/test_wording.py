"""What people are told about a value that does not fit: our words, the field's name, and never the parser's quotes."""

from __future__ import annotations

import traceback
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument, MillstreamError, ProtocolViolation, UnknownMember
from millstream.wire.messages import decode_json
from millstream.wording import in_words


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    colour: Literal["red", "blue"] | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    limit: int = 1
    share: float = 1
    mode: Literal["fast", "slow"] = "fast"
    inner: list[Inner] = []
    limits: dict[str, int] = {}
    either: int | str | None = None
    flag: bool = False
    data: bytes = b""
    few: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    names: Annotated[list[str], msgspec.Meta(min_length=1)] = []


class Tagged(msgspec.Struct, tag="tagged"):
    pass


HALF = "it has half of a character, an escape such as \\ud800 without the one that belongs to it"


def told(text: str | bytes, kind: Any = Outer) -> str:
    with pytest.raises((msgspec.DecodeError, ValueError, RecursionError)) as caught:
        msgspec.json.decode(text, type=kind)
    return in_words(caught.value, kind=kind, data=text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"limit": "x"}', "'limit' must be a whole number, not a text"),
        ('{"share": []}', "'share' must be a number, not a list"),
        ('{"either": {}}', "'either' must be a whole number or a text or null, not an object"),
        ('{"flag": 1}', "'flag' must be true or false, not a whole number"),
        ('{"inner": [{"number": null}]}', "'inner[0].number' must be a whole number, not null"),
        ('{"inner": [{}]}', "'inner[0].number' is missing"),
        ('{"limits": {"a": "x"}}', "a value in 'limits' must be a whole number, not a text"),
        ('{"limt": 1}', "'limt' is not known here; did you mean 'limit'?"),
        ('{"zzz": 1}', "'zzz' is not known here"),
        ('{"inner": [{"number": 1, "color": 2}]}', "'inner[0].color' is not known here; did you mean 'colour'?"),
        ('{"mode": "idle"}', "'mode' cannot be 'idle'; it is one of fast, slow"),
        ('{"inner": [{"number": 1, "colour": "x"}]}', "'inner[0].colour' cannot be 'x'; it is one of red, blue"),
        ('{"few": 0}', "'few' must be at least 1"),
        ('{"few": 9}', "'few' must be at most 5"),
        ('{"names": []}', "'names' must have a length of at least 1"),
        ('{"data": "%"}', "'data' must be base64"),
        ('{"limit": 1e400}', "'limit' is a number out of range"),
        ("[]", "it must be an object, not a list"),
        ("", "it is empty or ends in the middle, and JSON is expected"),
        ("hello", "it is not JSON: invalid character at byte 0"),
        (r'{"mode": "\ud800"}', HALF),
        (r'"\ud83d"', HALF),
        (r'{"mode": "\uD83Dx"}', HALF),
        (r'{"mode": "\ud83d\ude00', "it is empty or ends in the middle, and JSON is expected"),
    ],
)
def test_the_field_is_named_and_what_would_be_right(text: str, sentence: str) -> None:
    assert told(text) == sentence


def test_a_kind_of_document_that_is_no_text_is_said_in_words() -> None:
    assert told('{"type": 5}', Tagged) == "'type' must be a text"


def test_deep_nesting_and_other_alphabets_are_said_in_words() -> None:
    assert told("[" * 100_000, Any) == "it is nested too deeply"
    assert in_words(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) == "it is not text in UTF-8"


def test_what_was_given_is_shown_where_everything_is_text() -> None:
    asked = {"limit": "many"}
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(asked, Outer, strict=False)
    assert in_words(caught.value, kind=Outer, given=asked) == "'limit' must be a whole number, not 'many'"


def test_a_field_of_megabytes_is_not_compared_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", lambda *_: pytest.fail("that takes seconds, and all others wait"))
    assert told('{"' + "x" * 5_000_000 + '": 1}').endswith("…' is not known here")


@given(st.text(), st.text())
def test_whatever_the_parser_says_becomes_a_sentence(said: str, path: str) -> None:
    for problem in (msgspec.ValidationError(said), msgspec.ValidationError(f"{said} - at `$.{path}`")):
        assert in_words(problem, kind=Outer)


@pytest.mark.parametrize("kind", [MillstreamError, UnknownMember])
def test_a_name_within_an_error_turns_nothing_around_and_commands_no_terminal(kind: type[MillstreamError]) -> None:
    """Names are quoted in some sentences and stand by themselves in others."""
    error = kind("member \u202eann\x1b[2J is not in the group")
    sentence = "member \\u202eann\\x1b[2J is not in the group"
    assert str(error) == error.message == sentence
    assert traceback.format_exception_only(error) == [f"{kind.__module__}.{kind.__qualname__}: {sentence}\n"]
    assert str(kind(str(error))) == sentence, "and once is enough"
    assert error.args == ("member \u202eann\x1b[2J is not in the group",), "programs get it as it was said"


def test_a_request_of_the_native_protocol_is_refused_in_our_words() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^the request does not fit: 'limit' must be a whole number, not a text$"
    ):
        decode_json(b'{"limit": "x"}', Outer)
    with pytest.raises(ProtocolViolation, match=r"^the request is not JSON: it is empty or ends in the middle"):
        decode_json(b"", Outer)

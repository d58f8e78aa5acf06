"""A client of an earlier version is understood by a broker of today, and finds in its answers what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.wire import calls
from millstream.wire.frames import FrameReader
from millstream.wire.leases import decode_lease, decode_settle, encode_lease, encode_settle
from millstream.wire.messages import (
    Hello,
    decode_fetch,
    decode_json,
    decode_publish,
    encode_fetch,
    encode_publish_head,
)
from tests.compat.wire import forms
from tests.compat.write import WRITTEN, listen, read_said
from tests.unit.test_protocol_document import written

VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir())
every_version = pytest.mark.parametrize("version", VERSIONS)


@every_version
def test_the_frames_of_the_protocol_are_the_same_bytes(version: str) -> None:
    """The document's samples change with the code; those of earlier versions do not."""
    samples = {name: bytes.fromhex(sample) for name, sample in read_said(WRITTEN / version)["samples"].items()}
    now = written()
    assert {name: now.get(name) for name in samples} == samples


def _publish(payload: memoryview, correlation: int | None) -> bytes:
    request = decode_publish(payload)
    head = encode_publish_head(
        request.topic.encode(),
        request.partition,
        acks=request.acks,
        fsync=request.fsync,
        batch_size=len(request.batch),
        correlation=correlation or 0,
    )
    return head + bytes(request.batch)


_AGAIN: dict[str, Callable[[memoryview, int | None], bytes]] = {
    "PUBLISH": _publish,
    "FETCH": lambda payload, correlation: encode_fetch(decode_fetch(payload), correlation or 0),
    "LEASE": lambda payload, correlation: encode_lease(decode_lease(payload), correlation or 0),
    "SETTLE": lambda payload, correlation: encode_settle(decode_settle(payload), correlation or 0),
}


@every_version
def test_packed_requests_of_earlier_clients_are_read_without_a_loss(version: str) -> None:
    frames = read_said(WRITTEN / version)["frames"]
    for name, again in _AGAIN.items():
        assert frames[name]
        for sent in map(bytes.fromhex, frames[name]):
            ((_, correlation, payload),) = FrameReader(shared=bytearray(1 << 16)).feed(sent)
            assert again(memoryview(bytes(payload)), correlation) == sent


@every_version
def test_calls_of_earlier_clients_are_read_without_a_loss(version: str) -> None:
    for name, documents in read_said(WRITTEN / version)["calls"].items():
        kind = Hello if name == "HELLO" else calls.Call
        for document in documents:
            understood = decode_json(memoryview(msgspec.json.encode(document)), kind)
            for field, value in document.items():
                if field != "op":
                    assert hasattr(understood, field), f"{name}.{field} is not read any more"
                    found = msgspec.json.decode(msgspec.json.encode(getattr(understood, field)))
                    _within(value, found, f"{name}.{field}")


@every_version
def test_calls_mean_what_they_meant_to_earlier_clients(version: str) -> None:
    """They send what is not the default; so no field may go, none may be wanted that was not, and defaults stay."""
    now = forms()
    for call, fields in read_said(WRITTEN / version)["forms"].items():
        assert call in now, f"{call} is not answered any more"
        for field, default in fields.items():
            assert field in now[call], f"{call}.{field} is not read any more"
            if default:  # otherwise they all say it
                assert now[call][field] == default, f"{call}.{field} means something else when it is left out"
        added = {field: default for field, default in now[call].items() if field not in fields}
        assert all(added.values()), f"{call} wants {min(added, default='')}, which earlier clients do not send"


def _within(said: Any, found: Any, at: str) -> None:
    if isinstance(said, dict):
        for name, part in said.items():
            assert name in found, f"{at}.{name} is not read any more"
            _within(part, found[name], f"{at}.{name}")
    elif isinstance(said, list):
        assert len(said) == len(found), at
        for part, other in zip(said, found, strict=True):
            _within(part, other, at)
    else:
        assert said == found, at


def test_answers_have_every_field_that_earlier_clients_were_given(tmp_path: Path) -> None:
    """Fields may be added.  One that is taken away, or becomes something else, is missing in programs that are out."""
    answers = listen(tmp_path / "data")["answers"]
    for version in VERSIONS:
        for call, fields in read_said(WRITTEN / version)["answers"].items():
            for path, kinds in fields.items():
                assert set(answers[call].get(path, ())) >= set(kinds), f"{version}: {call} answered with {path}"

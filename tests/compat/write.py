"""`python -m tests.compat.write VERSION` leaves what a broker of this code stores in `tests/compat/written/VERSION`."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from tests.compat.seen import look
from tests.compat.wire import Tap, forms, transcript
from tests.compat.world import NOW_US, fill, set_clock
from tests.unit.test_protocol_document import SAMPLES

__all__ = ["WAYS", "WRITTEN", "listen", "opened", "read_said", "read_seen", "unpack"]

WRITTEN = Path(__file__).parent / "written"
#: How the broker ended.
WAYS = ("clean", "killed")
_SEEN = "seen.json.zst"
_SAID = "said.json.zst"
#: When a directory is looked at, after the broker was started that wrote it: later than it ended, and before anything
#: in it is due.
_SOON_US = 300_000_000


def opened(data: Path, settings: Settings | None = None) -> BrokerForTests:
    """A broker on a directory that was written at `NOW_US`, soon afterwards by its clock."""
    return set_clock(BrokerForTests(data, mqtt=True, settings=settings), NOW_US + _SOON_US)


def unpack(archive: Path, data: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(_unpacked(archive))) as tar:
        tar.extractall(data, filter="data")
    return data


def read_seen(folder: Path) -> dict[str, Any]:
    """What the broker that wrote it saw when it was started again, by the way it had ended; and what it was `told`."""
    seen: dict[str, Any] = msgspec.json.decode(_unpacked(folder / _SEEN))
    return seen


def read_said(folder: Path) -> dict[str, Any]:
    """What its clients said to it, and the samples in its document of the protocol; see `wire.transcript`."""
    said: dict[str, Any] = msgspec.json.decode(_unpacked(folder / _SAID))
    return said


def _store(file: Path, document: Any) -> None:
    file.write_bytes(zstandard.ZstdCompressor(level=19).compress(msgspec.json.encode(document, order="sorted")))


def _unpacked(file: Path) -> bytes:
    content: bytes = zstandard.ZstdDecompressor().decompress(file.read_bytes())
    return content


def _pack(data: Path, archive: Path) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(data.rglob("*")):
            if path.name != "lock":
                tar.add(path, path.relative_to(data), recursive=False, filter=_anonymous)
    archive.write_bytes(zstandard.ZstdCompressor(level=19).compress(plain.getvalue()))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write(folder: Path) -> None:
    """Both ways of ending, and what is seen in each by the code that wrote them."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = {way: Path(temporary, way) for way in WAYS}
        with set_clock(BrokerForTests(data["clean"], mqtt=True)) as broker:
            found["told"] = fill(broker)
            broker.clock.advance("2m")  # figures of the last minutes are written, and whatever else waits for a moment
            shutil.copytree(data["clean"], data["killed"])
        for way in WAYS:
            _pack(data[way], folder / f"{way}.tar.zst")
            with opened(data[way]) as broker:
                found[way] = look(broker)
        said = listen(Path(temporary, "tapped"))
    _store(folder / _SEEN, found)
    samples = {name: sample.hex() for name, sample in SAMPLES.items()}
    _store(folder / _SAID, {**said, "forms": forms(), "samples": samples})


def listen(data: Path) -> dict[str, Any]:
    """What clients and a new broker say to each other when everything is put there and looked at."""
    with set_clock(BrokerForTests(data, mqtt=True)) as broker:
        tap = Tap(broker.address)
        broker.address = tap.address
        fill(broker)
        look(broker)
        said = transcript(tap)
    tap.close()
    return said


if __name__ == "__main__":
    write(WRITTEN / sys.argv[1])

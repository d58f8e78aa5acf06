"""Backups as files: nothing that is wrong with one is believed, and nothing half restored can be used."""

from __future__ import annotations

import io
import tarfile
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard

from millstream.errors import DataDamaged, InvalidArgument, MillstreamError, NewerData
from millstream.log.archive import read_archive, restore_archive, write_archive
from millstream.log.holding import LOST_AND_FOUND, RESTORING, files_below, open_held
from millstream.log.index import IndexHeader
from millstream.log.storage import DiskStorage
from tests.log_workload import FIRST_INDEX, FIRST_LOG, append, open_log, plain

FILES = {"node_id": b"17\n", "topics/default/orders/0/0.log": b"some messages" * 50, "topics/default/a/0/0.log": b""}


def packed(files: dict[str, bytes] = FILES) -> bytes:
    target = io.BytesIO()
    sizes = {path: len(data) for path, data in files.items()}
    write_archive(target, sizes, lambda p: io.BytesIO(files[p]), node_id="17", created_ms=1000, running=False)
    return target.getvalue()


def rewritten(change: object) -> bytes:
    """The archive with its members changed by a function from (name, data) pairs to such pairs."""
    unpacked = io.BytesIO(zstandard.ZstdDecompressor().stream_reader(packed()).read())
    with tarfile.open(fileobj=unpacked) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, data in change(members):  # type: ignore[operator]
            if isinstance(data, tarfile.TarInfo):
                out.addfile(data)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return zstandard.ZstdCompressor().compress(target.getvalue())


def test_everything_comes_back(tmp_path: Path) -> None:
    heading = restore_archive(io.BytesIO(packed()), tmp_path / "new")
    assert (heading.node_id, heading.files, heading.created_ms) == ("17", 3, 1000)
    assert {path: (tmp_path / "new" / path).read_bytes() for path in files_below(str(tmp_path / "new"))} == FILES
    assert not (tmp_path / "new" / RESTORING).exists()


def test_no_cut_and_no_flipped_byte_is_believed(tmp_path: Path) -> None:
    whole = packed()
    damaged = [whole[:at] for at in range(0, len(whole), 2)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(0, len(whole), 2)]
    refused = 0
    for data in damaged:
        found: dict[str, bytes] = {}
        try:
            read_archive(io.BytesIO(data), lambda path, chunks, into=found: into.update({path: b"".join(chunks)}))
        except MillstreamError:
            refused += 1
        else:  # behind the list of files there is nothing left to damage
            assert found == FILES
    assert refused > 0.9 * len(damaged)


def test_a_restore_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    for size in (0, 20, len(packed()) // 2):
        with pytest.raises(MillstreamError):
            restore_archive(io.BytesIO(packed()[:size]), tmp_path / "new")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "topics/../../evil", "topics//evil", ".", RESTORING, f"{LOST_AND_FOUND}/evil"]
)
def test_names_do_not_lead_outside(tmp_path: Path, name: str) -> None:
    evil = rewritten(lambda members: [*members[:-1], (name, b"evil"), members[-1]])
    with pytest.raises(MillstreamError):
        restore_archive(io.BytesIO(evil), tmp_path / "a" / "new")
    assert not list(tmp_path.rglob("*evil*"))
    assert not (tmp_path / "a" / "new").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    link = tarfile.TarInfo("topics/out")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
    evil = rewritten(lambda members: [members[0], ("", link), *members[1:]])
    with pytest.raises(DataDamaged, match="not a plain file"):
        restore_archive(io.BytesIO(evil), tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [m[0], *m[2:]], "missing"),
        (lambda m: [*m[:-1], ("surplus", b"x"), m[-1]], "does not belong"),
        (lambda m: [*m[:-1], m[1], m[-1]], "twice"),
        (lambda m: [*m, ("after", b"")], "follows the end"),
        (lambda m: [m[0], (m[1][0], b"18\n"), *m[2:]], "is damaged"),
        (lambda m: m[:-1], "cut short"),
    ],
)
def test_what_the_list_does_not_say_is_refused(change: object, reason: str) -> None:
    with pytest.raises(DataDamaged, match=reason):
        read_archive(io.BytesIO(rewritten(change)), lambda _, chunks: list(chunks) and None)


@pytest.mark.parametrize("end", [20, 60])
def test_a_backup_that_ends_before_its_heading_is_cut_short_and_not_another_file(end: int) -> None:
    """Nothing comes out of the packer until it has a whole block: `empty file`, said the answer, of 3 000 bytes."""
    with pytest.raises(DataDamaged, match="damaged or cut short"):
        read_archive(io.BytesIO(packed()[:end]), lambda _path, chunks: [*chunks] and None)


def test_a_flipped_bit_in_the_first_block_is_damage_and_not_another_file() -> None:
    data = bytearray(packed())
    data[len(data) // 2] ^= 1
    with pytest.raises(DataDamaged, match="damaged or cut short"):
        read_archive(io.BytesIO(data), lambda _path, chunks: [*chunks] and None)


def test_a_newer_format_and_other_files_are_named(tmp_path: Path) -> None:
    newer = rewritten(lambda m: [(m[0][0], msgspec.json.encode({"format": 2})), *m[1:]])
    with pytest.raises(NewerData, match="format 2"):
        restore_archive(io.BytesIO(newer), tmp_path / "new")
    strange = rewritten(lambda m: [(m[0][0], msgspec.json.encode({"format": "x"})), *m[1:]])
    with pytest.raises(InvalidArgument, match="not a backup"):
        restore_archive(io.BytesIO(strange), tmp_path / "new")
    with pytest.raises(InvalidArgument, match="not a backup"):
        restore_archive(io.BytesIO(b"PK something else"), tmp_path / "new")


@pytest.mark.parametrize("heading", [b"[]", b"1", b'{"format": 1}', b"{"])
def test_a_heading_that_is_none_is_refused(heading: bytes) -> None:
    other = rewritten(lambda m: [(m[0][0], heading), *m[1:]])
    with pytest.raises(InvalidArgument, match="not a backup"):
        read_archive(io.BytesIO(other), lambda _, chunks: list(chunks) and None)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(InvalidArgument, match="not empty"):
        restore_archive(io.BytesIO(packed()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def write_files(root: Path, files: dict[str, bytes] = FILES) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def test_only_what_belongs_to_a_broker_is_taken_along(tmp_path: Path) -> None:
    """Earlier backups and the file with the first key went along."""
    write_files(tmp_path)
    write_files(tmp_path, {"first-key": b"secret", "old.backup": b"x", "elsewhere/0.log": b"x", "lock": b"17"})
    assert list(files_below(str(tmp_path))) == sorted(FILES)


@pytest.mark.parametrize("place", ["", "topics/"])
def test_what_a_file_system_keeps_for_itself_is_not_looked_into(tmp_path: Path, place: str) -> None:
    write_files(tmp_path)
    write_files(tmp_path, {f"{place}{LOST_AND_FOUND}/#17": b"a piece of something"})
    assert list(files_below(str(tmp_path))) == sorted(FILES)


@pytest.mark.parametrize("link", ["topics", "topics/default/orders", "topics/default/orders/0/0.log"])
def test_what_is_on_another_disk_is_taken_along(tmp_path: Path, link: str) -> None:
    write_files(tmp_path / "data")
    (tmp_path / "data" / link).rename(tmp_path / "other-disk")
    (tmp_path / "data" / link).symlink_to(tmp_path / "other-disk")
    assert files_below(str(tmp_path / "data")) == {path: len(data) for path, data in sorted(FILES.items())}


def test_a_disk_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "topics" / "team").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(FileNotFoundError) as missing:
        files_below(str(tmp_path))
    assert missing.value.filename == str(tmp_path / "topics" / "team")


@pytest.mark.parametrize("target", ["topics", "topics/default/orders", "topics/default/orders/round"])
def test_links_that_lead_back_are_named(tmp_path: Path, target: str) -> None:
    write_files(tmp_path)
    (tmp_path / "topics/default/orders/round").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match=r"(?i)link") as refused:
        files_below(str(tmp_path))
    assert "topics/default/orders/round" in refused.value.filename


def test_a_new_disk_is_empty_enough_to_restore_to(tmp_path: Path) -> None:
    (tmp_path / LOST_AND_FOUND).mkdir()
    with pytest.raises(DataDamaged):
        restore_archive(io.BytesIO(packed()[:-30]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOST_AND_FOUND], "it is the file system's"
    restore_archive(io.BytesIO(packed()), tmp_path)
    assert list(files_below(str(tmp_path))) == sorted(FILES)


def test_a_disk_on_which_something_was_found_is_left_alone(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{LOST_AND_FOUND}/#17": b"perhaps precious"})
    with pytest.raises(InvalidArgument, match="not empty"):
        restore_archive(io.BytesIO(packed()), tmp_path)


def _head(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def _heading() -> bytes:
    """The first member: a block that names it, and one with what it says."""
    whole: bytes = zstandard.ZstdDecompressor().stream_reader(packed()).read()
    assert whole[1024:].startswith(b"node_id")
    return whole[:1024]


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("begins", [b"", _heading()], ids=["at-once", "behind-the-heading"])
def test_what_unpacks_to_far_more_than_a_header_has_is_not_read(kind: bytes, begins: bytes) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = packer.compress(begins + _head(kind, 1 << 40))
    zeros = bytes(1 << 20)
    bomb += b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    source = io.BytesIO(bomb)
    tracemalloc.start()
    with pytest.raises(MillstreamError, match="header"):
        read_archive(source, lambda _, chunks: [None for _ in chunks] and None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_headers_within_headers_come_to_an_end() -> None:
    name = _head(tarfile.GNUTYPE_LONGNAME, 4) + b"abc\0".ljust(512, b"\0")
    with pytest.raises(MillstreamError):
        read_archive(io.BytesIO(zstandard.ZstdCompressor().compress(_heading() + name * 3000)), lambda *_: None)


def test_a_file_with_holes_is_refused_before_it_fills_the_disk() -> None:
    head = bytearray(_head(tarfile.GNUTYPE_SPARSE, 512))
    head[386:410], head[483:495] = b"00000000000\0" + b"00000001000\0", b"77777777777\0"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data = zstandard.ZstdCompressor().compress(_heading() + bytes(head) + bytes(512))
    with pytest.raises(DataDamaged, match="not a plain file"):
        read_archive(io.BytesIO(data), lambda _, chunks: next(chunks) and None)


def test_a_file_that_a_thread_cuts_while_files_begin_to_be_held_is_held_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment is cut to its batches when it is sealed, which nobody on the event loop waits for."""
    storage = DiskStorage(tmp_path)
    storage.make_directory("topics")
    file = storage.open("topics/segment", create=True)
    file.write(b"batches and room", 0)
    cutting = threading.Thread(target=file.truncate, args=(7,))

    def look(root: str) -> dict[str, int]:
        found = files_below(root)
        cutting.start()
        cutting.join(0.2)  # it must not get through now
        return found

    monkeypatch.setattr("millstream.log.holding.files_below", look)
    held = storage.holding.begin("moment")
    cutting.join()
    assert file.size() == 7
    with open_held(str(tmp_path), "topics/segment") as copy:
        assert copy.read() == b"batches and room"
    assert held.sizes["topics/segment"] == 16


def test_a_file_that_is_changed_after_the_copier_has_opened_it_is_copied_as_it_was(tmp_path: Path) -> None:
    """A note about newer messages, in a backup without them, made them damage, and the log went on behind them."""
    storage = DiskStorage(tmp_path)
    log = open_log(storage)
    append(log, plain(b"before"))
    log.sync()
    log.note_durable()
    held = storage.holding.begin("1")
    copied = open_held(str(tmp_path), FIRST_INDEX)
    append(log, plain(b"after"))
    log.sync()
    log.note_durable()
    with copied:
        header = IndexHeader.decode(copied.read(held.sizes[FIRST_INDEX]))
    assert header is not None
    assert (header.durable_bytes, header.next_offset) == (held.sizes[FIRST_LOG], 1)

"""Backups: the files of a data directory in one archive, a tar packed with zstd.

The first member says what it is, the last one which files there are, with sizes and checksums; an archive without its
last member was cut short.  Nothing is believed: names that lead outside, files that differ, are missing or surplus end
a restore, and a directory is not used before all of it was checked and is on disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, cast

import crc32c
import msgspec
import zstandard

from millstream.errors import DataDamaged, InvalidArgument, MillstreamError, NewerData, StorageFailed
from millstream.log.holding import LOST_AND_FOUND, RESTORING
from millstream.log.storage import make_data_directory
from millstream.version import VERSION

__all__ = ["ArchivedFile", "Heading", "read_archive", "restore_archive", "write_archive"]

_FORMAT: Final = 1
_HEADING: Final = "millstream-backup.json"
_LISTING: Final = "millstream-files.json"
#: Fast; messages are often packed already.
_LEVEL: Final = 3
_CHUNK_BYTES: Final = 1024 * 1024
_SYNC_THREADS: Final = 16
#: A heading or a list beyond this is not ours.
_DOCUMENT_BYTES_MAX: Final = 256 * 1024 * 1024
#: What lies between the contents of two members, with what is read ahead: names, and room to the next block.
_BETWEEN_BYTES_MAX: Final = 4 * 1024 * 1024

#: What no archive puts there.
_NOT_RESTORED: Final = (RESTORING, LOST_AND_FOUND)

#: Told how many bytes were done, for a progress bar.
Advance = Callable[[int], None]


class Heading(msgspec.Struct, kw_only=True):
    """What an archive is."""

    format: int
    software: str
    node_id: str
    #: The moment that it shows.
    created_ms: int
    #: Whether the broker ran meanwhile.
    running: bool
    files: int
    bytes: int


class ArchivedFile(msgspec.Struct):
    path: str
    size: int
    crc32c: int


def write_archive(
    target: BinaryIO,
    sizes: Mapping[str, int],
    open_file: Callable[[str], BinaryIO],
    *,
    node_id: str,
    created_ms: int,
    running: bool,
    advance: Advance = lambda _: None,
) -> Heading:
    """Write the first `sizes[path]` bytes of each file.  Raises StorageFailed."""
    heading = Heading(
        format=_FORMAT,
        software=f"millstream {VERSION}",
        node_id=node_id,
        created_ms=created_ms,
        running=running,
        files=len(sizes),
        bytes=sum(sizes.values()),
    )
    listing: list[ArchivedFile] = []
    packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    with (
        packer.stream_writer(target, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK_BYTES) as tar,
    ):
        tar.copybufsize = _CHUNK_BYTES  # type: ignore[attr-defined]
        _add_document(tar, _HEADING, heading, created_ms)
        for path, size in sizes.items():
            with open_file(path) as file:
                source = _Counted(file, path, size, advance)
                tar.addfile(_member(path, size, created_ms), source)
            listing.append(ArchivedFile(path, size, source.checksum))
        _add_document(tar, _LISTING, listing, created_ms)
    return heading


def _member(name: str, size: int, created_ms: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o640, created_ms // 1000
    return member


def _add_document(tar: tarfile.TarFile, name: str, document: object, created_ms: int) -> None:
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    tar.addfile(_member(name, len(data), created_ms), io.BytesIO(data))


class _Counted:
    """So many bytes of a file, and no fewer, with their checksum."""

    def __init__(self, file: BinaryIO, path: str, size: int, advance: Advance) -> None:
        self._file, self._path, self._left, self._advance = file, path, size, advance
        self.checksum = 0

    def read(self, size: int = -1) -> bytes:
        wanted = min(self._left, size) if size >= 0 else self._left
        data = self._file.read(wanted)
        if len(data) < wanted:
            raise StorageFailed(f"{self._path} has {self._left - len(data)} bytes fewer than it had")
        self._left -= len(data)
        self.checksum = crc32c.crc32c(data, self.checksum)
        self._advance(len(data))
        return data


# --- reading back ------------------------------------------------------------------------------------------------


def read_archive(
    source: BinaryIO,
    receive: Callable[[str, Iterator[bytes]], None],
    *,
    begin: Callable[[Heading], None] = lambda _: None,
    advance: Advance = lambda _: None,
) -> Heading:
    """Read and check all of it; `receive` gets each file as it comes.  Raises DataDamaged, InvalidArgument."""
    heading: Heading | None = None
    listing: list[ArchivedFile] | None = None
    found: dict[str, tuple[int, int]] = {}
    packed = _Beginning(source)
    try:
        unpacked = _Bounded(zstandard.ZstdDecompressor().stream_reader(cast(BinaryIO, packed), closefd=False))
        with tarfile.open(fileobj=cast(BinaryIO, unpacked), mode="r|", bufsize=_CHUNK_BYTES) as tar:
            for member in tar:
                if listing is not None:
                    raise DataDamaged("something follows the end of the backup")
                content = _content_of(tar, member)
                unpacked.expect(member.size)
                if heading is None:
                    heading = _read_heading(member, content)
                    begin(heading)
                elif member.name == _LISTING:
                    listing = msgspec.json.decode(_document(content, member), type=list[ArchivedFile])
                else:
                    path = _checked_name(member, found)
                    chunks = _Chunks(content, member.size, advance)
                    receive(path, iter(chunks))
                    found[path] = (chunks.size, chunks.checksum)
            # What the archive ends with is part of the checksum of the packer.
            while unpacked.read(_CHUNK_BYTES):
                pass
    except MillstreamError:
        raise
    except (tarfile.TarError, zstandard.ZstdError, msgspec.DecodeError, EOFError, ValueError, RecursionError) as error:
        # Nothing comes out of the packer before a whole block went in: without one, only the first bytes tell.
        if heading is None and packed.first != zstandard.FRAME_HEADER:
            raise InvalidArgument(f"this is not a backup of Millstream: {error}") from None
        other = ", or it is none of Millstream" if heading is None else ""
        raise DataDamaged(f"the backup is damaged or cut short{other}: {error}") from None
    if heading is None or listing is None:
        raise DataDamaged("the backup was cut short: its list of files is missing")
    _compare(listing, found)
    return heading


class _Beginning:
    """A source whose first bytes are remembered."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.first = b""

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        missing = len(zstandard.FRAME_HEADER) - len(self.first)
        self.first += data[:missing] if missing else b""
        return data


class _Bounded:
    """What is unpacked, as far as it may reach: a few bytes of a hostile archive unpack to a header of any length."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._done = 0
        self._limit = _BETWEEN_BYTES_MAX

    def expect(self, size: int) -> None:
        """So many bytes come now, then the next header or the end."""
        self._limit = self._done + size + _BETWEEN_BYTES_MAX

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._done += len(data)
        if self._done > self._limit:
            raise tarfile.ReadError("a header is larger than it can be")
        return data


def _content_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise DataDamaged(f"{member.name[:200]!r} is not a plain file")
    return content  # type: ignore[return-value]


def _document(content: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.size > _DOCUMENT_BYTES_MAX:
        raise DataDamaged(f"{member.name} is larger than it can be")
    return content.read()


def _read_heading(member: tarfile.TarInfo, content: BinaryIO) -> Heading:
    if member.name != _HEADING:
        raise InvalidArgument(f"this is not a backup of Millstream: it begins with {member.name[:200]!r}")
    data = _document(content, member)
    try:
        written = msgspec.json.decode(data, type=dict[str, object]).get("format")
        if isinstance(written, int) and written > _FORMAT:
            raise NewerData(
                f"this backup has the format {written}, and this version of Millstream reads {_FORMAT}: "
                "restore it with the version that made it or a newer one"
            )
        if written != _FORMAT:
            raise InvalidArgument(f"this is not a backup of Millstream: it has the format {written!r}")
        return msgspec.json.decode(data, type=Heading)
    except msgspec.DecodeError:
        raise InvalidArgument("this is not a backup of Millstream: its heading cannot be read") from None


def _checked_name(member: tarfile.TarInfo, found: Mapping[str, object]) -> str:
    parts = member.name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in member.name or parts[0] in _NOT_RESTORED:
        raise DataDamaged(f"{member.name[:200]!r} is no name of a file of a broker")
    if member.name in found:
        raise DataDamaged(f"{member.name[:200]!r} is there twice")
    return member.name


class _Chunks:
    """The content of a member, counted and summed up as it is read."""

    def __init__(self, content: BinaryIO, size: int, advance: Advance) -> None:
        self._content, self._expected, self._advance = content, size, advance
        self.size = self.checksum = 0

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._content.read(_CHUNK_BYTES):
            self.size += len(chunk)
            self.checksum = crc32c.crc32c(chunk, self.checksum)
            yield chunk
            self._advance(len(chunk))
        if self.size != self._expected:
            raise DataDamaged("the backup was cut short")


def _compare(listing: list[ArchivedFile], found: Mapping[str, tuple[int, int]]) -> None:
    wanted = {file.path: (file.size, file.crc32c) for file in listing}
    for path, numbers in wanted.items():
        if path not in found:
            raise DataDamaged(f"{path} is missing in the backup")
        if found[path] != numbers:
            raise DataDamaged(f"{path} is damaged in the backup")
    if surplus := found.keys() - wanted.keys():
        raise DataDamaged(f"{min(surplus)} does not belong to the backup")


# --- putting back ------------------------------------------------------------------------------------------------


def restore_archive(
    source: BinaryIO,
    directory: Path,
    *,
    begin: Callable[[Heading], None] = lambda _: None,
    advance: Advance = lambda _: None,
) -> Heading:
    """Make a data directory from an archive.  Until all of it was checked and is on disk no broker starts there.

    The directory must be empty, as a new disk is, or not exist.  Raises InvalidArgument, DataDamaged, StorageFailed;
    what was written by then is removed again.
    """
    if directory.exists() and not _is_empty(directory):
        raise InvalidArgument(f"{directory} is not empty: restore into a new directory")
    directories: set[Path] = set()
    written: list[Path] = []
    try:
        existed = directory.exists()
        make_data_directory(directory)
        marker = directory / RESTORING
        _write(marker, iter([b""]))
        _sync(directory)
        try:

            def receive(path: str, chunks: Iterator[bytes]) -> None:
                target = directory / path
                for parent in reversed(target.relative_to(directory).parents):
                    if directory / parent not in directories:
                        (directory / parent).mkdir(exist_ok=True, mode=0o750)
                        directories.add(directory / parent)
                _write(target, chunks)
                written.append(target)

            heading = read_archive(source, receive, begin=begin, advance=advance)
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:  # a file system syncs many at once in the time of one
                list(pool.map(_sync, written))
                list(pool.map(_sync, directories))
        except BaseException:
            _remove_below(directory)
            if not existed:
                directory.rmdir()
            raise
        marker.unlink()
        _sync(directory)
        _sync(directory.absolute().parent)
    except OSError as error:
        raise StorageFailed(f"cannot restore into {error.filename or directory}: {error.strerror or error}") from None
    return heading


def _is_empty(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    names = os.listdir(directory)
    if names != [LOST_AND_FOUND]:
        return not names
    try:
        return not os.listdir(directory / LOST_AND_FOUND)
    except PermissionError:  # most may not look into it
        return True
    except NotADirectoryError:
        return False


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    # Never through a link, never onto something that is there.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    with open(fd, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _sync(path: Path) -> None:
    """Put a file, or the names in a directory, on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_below(directory: Path) -> None:
    """Everything in a directory that was empty before; the mark that it is no data directory goes last."""
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if entry.is_dir() and entry.name != LOST_AND_FOUND:
                shutil.rmtree(entry)
            elif entry.name not in _NOT_RESTORED:
                entry.unlink()
        (directory / RESTORING).unlink()

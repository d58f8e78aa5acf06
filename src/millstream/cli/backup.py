"""`millstream backup` and `millstream restore`: a data directory in one file, and back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from millstream.cli.arguments import refuse_empty
from millstream.cli.connection import BrokerOptions, open_client
from millstream.cli.failure import UsageProblem, drop_output
from millstream.cli.output import (
    JsonOption,
    bytes_text,
    document_of,
    duration_text,
    examples,
    plural,
    print_facts,
    print_json,
    stderr,
    time_text,
)
from millstream.cli.progress import Meter
from millstream.cli.settings import ConfigFileOption, DataOption, read_settings
from millstream.errors import DataDamaged, DataDirLocked, InvalidArgument, StorageFailed
from millstream.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.log.archive import Heading

__all__ = ["BACKUP_EPILOG", "RESTORE_EPILOG", "backup", "restore"]

BACKUP_EPILOG: Final = examples(
    "# while the broker runs, or after it has stopped",
    "millstream backup orders.backup --data /var/lib/millstream",
    "# is everything in it?",
    "millstream backup orders.backup --verify",
    "# out of a container",
    "docker exec millstream millstream backup - > orders.backup",
)
RESTORE_EPILOG: Final = examples(
    "millstream restore orders.backup --data /var/lib/millstream",
    "# a look at it on another machine",
    "millstream restore orders.backup --data ./copy && millstream serve --data ./copy",
)

#: How long the broker keeps the files for us without hearing from us, and how often it does hear from us.
_HOLD_MS: Final = 120_000
_RENEW_S: Final = 10.0

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="The backup file. - is standard output, or standard input to restore and verify."
    ),
]


def backup(
    file: FileArgument,
    data: DataOption = None,
    config: ConfigFileOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Make no backup: read FILE and check all of it.")] = False,
    *,
    given: BrokerOptions,
) -> None:
    """Copy everything a broker has stored into one file, while the broker runs or after it has stopped.

    Run it where the data directory is. The backup shows one moment: it has everything that was confirmed before, and
    clients notice nothing. It holds all that the broker knows, even webhook secrets, so keep it as safe as the data.
    """
    refuse_empty(file, "FILE")
    if verify:
        _verify(file, as_json=given.as_json)
        return
    settings, _ = read_settings(config, {"storage.data": data}, None)
    root = settings.storage.data
    if not os.path.exists(f"{root}/node_id"):
        raise UsageProblem(f"{root} is not the data directory of a broker: say which with --data")
    began = time.monotonic()
    with _target(file) as target:
        heading = _from_files(root, target) or _from_broker(root, given.broker, target)
        packed = target.tell() if file != "-" else None
    document = {**document_of(heading), "file": file, "packed_bytes": packed, "took_ms": _since_ms(began)}
    _tell(
        document,
        [("backup", file), ("size", bytes_text(packed) if packed else None)],
        given.as_json,
        to_pipe=file == "-",
    )


def _from_files(root: str, target: BinaryIO) -> Heading | None:
    """The backup of a broker that does not run; None when it does."""
    from millstream.log.archive import write_archive
    from millstream.log.format import check_format
    from millstream.log.holding import RESTORING, files_below
    from millstream.log.lock import DirectoryLock
    from millstream.log.storage import DiskStorage

    if os.path.exists(f"{root}/{RESTORING}"):
        raise StorageFailed(f"{root} holds a restore that was cut short: there is nothing to back up")
    lock = DirectoryLock(Path(root))
    try:
        lock.acquire()
    except DataDirLocked:
        return None
    except OSError as error:
        raise StorageFailed(f"the data directory {root!r} cannot be locked: {error.strerror or error}") from None
    try:
        check_format(DiskStorage(Path(root)))  # what a newer version keeps elsewhere would be left out
        with _readable():
            sizes = files_below(root)
        with Meter("copying", sum(sizes.values())) as meter, _readable():
            return write_archive(
                target,
                sizes,
                lambda path: open(f"{root}/{path}", "rb"),
                node_id=_node_id(root),
                created_ms=int(time.time() * 1000),
                running=False,
                advance=meter.advance,
            )
    finally:
        lock.release()


def _from_broker(root: str, broker: str, target: BinaryIO) -> Heading:
    """The backup of a broker that runs: it keeps the files of one moment until we are done."""
    from millstream.log.archive import write_archive
    from millstream.log.holding import open_held, read_list

    with open_client(broker, DEFAULT_NAMESPACE) as client:
        hold = client.admin.hold_files(hold_ms=_HOLD_MS)
        try:
            held = read_list(root)
        except (OSError, ValueError):
            held = None
        if held is None or held.hold_id != hold.id:
            client.admin.release_files(hold.id)
            raise InvalidArgument(
                f"{root} is used by another broker than the one at {broker}, whose data is in {hold.data}: run this "
                "where that directory is, and say --data and --broker of the same one"
            )
        with Meter("copying", hold.bytes) as meter, _readable():
            heading = write_archive(
                target,
                held.sizes,
                lambda path: open_held(root, path),
                node_id=_node_id(root),
                created_ms=hold.moment_ms,
                running=True,
                advance=_Renewing(client, hold.id, meter).advance,
            )
        client.admin.release_files(hold.id)
    return heading


class _Renewing:
    """Tells the broker now and then that the copy is still being made."""

    def __init__(self, client: Client, hold_id: str, meter: Meter) -> None:
        self._client, self._hold_id, self._meter = client, hold_id, meter
        self._next_s = time.monotonic() + _RENEW_S

    def advance(self, amount: int) -> None:
        self._meter.advance(amount)
        if time.monotonic() > self._next_s:
            self._client.admin.hold_files(self._hold_id, hold_ms=_HOLD_MS)
            self._next_s = time.monotonic() + _RENEW_S


def _verify(file: str, *, as_json: bool) -> None:
    from millstream.log.archive import read_archive

    began = time.monotonic()
    with _source(file) as source, _Reading("checking") as reading:
        heading = read_archive(source, _throw_away, begin=reading.begin, advance=reading.advance)
    document = {**document_of(heading), "file": file, "took_ms": _since_ms(began)}
    _tell(document, [("backup", file), ("state", "whole: every file is as it was")], as_json)


def restore(
    file: FileArgument,
    data: Annotated[
        str, typer.Option("--data", metavar="DIR", help="The directory to create; it must be empty or not exist yet.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Create a data directory from a backup.

    Everything is checked and on disk before a broker can use it; if anything is wrong, nothing is left behind. Clients
    that continue where they were find the broker in the past: what was published after the backup is not there.
    """
    from millstream.log.archive import restore_archive

    refuse_empty(file, "FILE")
    refuse_empty(data, "--data")
    began = time.monotonic()
    directory = Path(os.path.expanduser(data))
    with _source(file) as source, _Reading("restoring") as reading:
        heading = restore_archive(source, directory, begin=reading.begin, advance=reading.advance)
    document = {**document_of(heading), "file": file, "data": str(directory), "took_ms": _since_ms(began)}
    _tell(document, [("restored", str(directory)), ("next", f"millstream serve --data {directory}")], as_json)


def _tell(
    document: dict[str, object], first: list[tuple[str, object]], as_json: bool, *, to_pipe: bool = False
) -> None:
    if to_pipe:
        stderr.print(f"[dim]{plural(int(str(document['files'])), 'file')} in the backup[/]")
    elif as_json:
        print_json(document)
    else:
        print_facts(
            [
                *first,
                ("of node", document["node_id"]),
                ("as of", time_text(int(str(document["created_ms"])))),
                (
                    "contents",
                    f"{plural(int(str(document['files'])), 'file')}, {bytes_text(int(str(document['bytes'])))}",
                ),
                ("took", duration_text(int(str(document["took_ms"])))),
            ]
        )


def _since_ms(began: float) -> int:
    return int((time.monotonic() - began) * 1000)


def _node_id(root: str) -> str:
    return Path(f"{root}/node_id").read_text(encoding="ascii").strip()


def _throw_away(_: str, chunks: Iterator[bytes]) -> None:
    for _chunk in chunks:
        pass


class _Reading:
    """A progress bar whose end is known once the heading was read."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._meter: Meter | None = None

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)

    def begin(self, heading: Heading) -> None:
        self._meter = Meter(self._what, heading.bytes).__enter__()

    def advance(self, amount: int) -> None:
        if self._meter is not None:
            self._meter.advance(amount)


@contextmanager
def _readable() -> Iterator[None]:
    """What goes wrong with a file, as one of our errors."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageFailed(f"the backup failed: {error.filename or 'a file'}: {error.strerror or error}") from None


@contextmanager
def _target(file: str) -> Iterator[BinaryIO]:
    """Where a backup is written.  A file appears under its name when it is whole, and only its owner reads it."""
    if file == "-":
        if sys.stdout.isatty():
            raise UsageProblem("a backup is not for a terminal: name a file, or send it into a pipe")
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # of other commands this is no failure: who has seen enough leaves
            drop_output()
            gone = StorageFailed("the backup was cut short: whoever reads it is gone")
            gone.remedy = "See why it ended, and make another one."  # type: ignore[misc]
            raise gone from None
        return
    if os.path.exists(file):
        raise UsageProblem(f"{file} exists already: name another file")
    from millstream.log.storage import DiskStorage

    part = f"{file}.part"
    try:
        # Never onto something that is there: it may be another backup under way, a link, or a file that others read.
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageProblem(f"{part} exists already: a backup is being made, or was cut short; remove it") from None
    except OSError as error:
        raise UsageProblem(f"cannot write {part}: {error.strerror}") from None
    try:
        with _readable(), open(fd, "wb") as target:
            yield target
            target.flush()
            os.fsync(fd)
        with _readable():
            os.rename(part, file)
            DiskStorage(Path(file).parent).sync_directory("")
    finally:
        with suppress(OSError):
            os.unlink(part)


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    """Where a backup is read from."""
    try:
        source = sys.stdin.buffer if file == "-" else open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageProblem(f"cannot read {file}: {error.strerror}") from None
    try:
        yield source
    except DataDamaged as error:
        error.remedy = "Use another backup; nothing of this one was put anywhere."  # type: ignore[misc]
        raise
    finally:
        if file != "-":
            source.close()

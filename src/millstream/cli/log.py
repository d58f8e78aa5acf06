"""`millstream log`: look into the files of a stopped broker.

Nothing is repaired or changed here: the broker does that when it starts, and `verify` says beforehand what it will
find.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from millstream.cli.bundles import Commands
from millstream.cli.failure import ExitCode, UsageProblem, is_of_the_output
from millstream.cli.output import (
    JsonLinesOption,
    JsonOption,
    bytes_text,
    examples,
    plural,
    print_json,
    print_json_line,
    print_table,
    stderr,
    stdout,
    time_text,
)
from millstream.cli.progress import Meter
from millstream.cli.rendering import json_content
from millstream.cli.terminal import terminal_safe
from millstream.errors import BatchDamaged, StorageFailed
from millstream.names import DEFAULT_NAMESPACE, check_namespace, check_topic

if TYPE_CHECKING:
    from millstream.log.verify import SegmentFinding, StoredBatch

app = Commands(no_args_is_help=True, help="Check and read the files of a stopped broker.")

DataArgument = Annotated[Path, typer.Argument(metavar="DATA_DIR", help="The broker's data directory.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", metavar="NAME", help="The topic's namespace.")]

_NEXT_STEP: Final = (
    "A broker starts with this, serves all the rest and rebuilds indexes by itself. What is damaged may be in a "
    "backup: `millstream restore FILE --data ANOTHER_DIRECTORY`."
)


@dataclass(frozen=True, slots=True)
class _PartitionFiles:
    """A directory of segments, relative to the data directory."""

    directory: str
    log_bytes: int

    @property
    def name(self) -> str:
        """As people call it: `orders/0`, `team-a:orders/0`, `state/groups`."""
        parts = self.directory.split("/")
        if parts[0] != "topics" or len(parts) != 4:
            return self.directory
        _, namespace, topic, partition = parts
        return f"{topic}/{partition}" if namespace == DEFAULT_NAMESPACE else f"{namespace}:{topic}/{partition}"


@app.command(
    epilog=examples(
        "millstream log verify /var/lib/millstream",
        "millstream log verify ./data --topic orders --partition 0",
        "# exit code 4 means that something is wrong",
        "millstream log verify ./data --json || echo damaged",
    )
)
def verify(
    data: DataArgument,
    topic: Annotated[str | None, typer.Option("--topic", "-t", metavar="NAME", help="Only this topic.")] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", metavar="N", min=0, help="Only this partition of the topic.")
    ] = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Check every checksum, offset and index; exit with 4 if anything is wrong."""
    from millstream.log.storage import DiskStorage  # here and below, so that no other command waits for the log to load
    from millstream.log.verify import verify as verify_partition

    if partition is not None and topic is None:
        raise UsageProblem("--partition needs --topic")
    findings: dict[_PartitionFiles, list[SegmentFinding]] = {}
    with _stopped(data):
        selected = _select(data, namespace, topic, partition)
        with Meter("verifying", sum(files.log_bytes for files in selected)) as meter:
            for files in selected:
                findings[files] = []
                for finding in verify_partition(DiskStorage(data), files.directory):
                    findings[files].append(finding)
                    meter.advance(finding.bytes, files.name)
    bad = [finding for segments in findings.values() for finding in segments if not finding.is_good]
    if as_json:
        print_json([_verified_document(files, segments) for files, segments in findings.items()])
    else:
        _print_findings(findings, bad)
    if bad:
        raise typer.Exit(ExitCode.STORAGE)


@app.command(
    epilog=examples(
        "millstream log dump ./data --topic orders",
        "millstream log dump ./data --topic orders --partition 2 --from 1000 --max 10",
        "# how the messages were batched and where they are on disk",
        "millstream log dump ./data --topic orders --batches",
    )
)
def dump(
    data: DataArgument,
    topic: Annotated[str, typer.Option("--topic", "-t", metavar="NAME", help="The topic to read.")],
    partition: Annotated[int, typer.Option("--partition", "-p", metavar="N", min=0, help="The partition to read.")] = 0,
    start: Annotated[int, typer.Option("--from", metavar="OFFSET", min=0, help="The offset to begin at.")] = 0,
    limit: Annotated[
        int | None, typer.Option("--max", "-m", metavar="N", min=1, help="Stop after this many messages or batches.")
    ] = None,
    batches: Annotated[bool, typer.Option("--batches", help="Describe batches instead of messages.")] = False,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    as_json: JsonLinesOption = False,
) -> None:
    """Print what is stored in a partition; damaged places are left out.

    With --json, one object per line is printed.
    """
    from millstream.log.storage import DiskStorage
    from millstream.log.verify import dump as dump_batches

    with _stopped(data):
        (files,) = _select(data, namespace, topic, partition)
        stored = dump_batches(DiskStorage(data), files.directory, start, limit)
        if batches:
            _print_batches(stored, as_json=as_json)
        else:
            _print_messages(stored, start, limit, as_json=as_json)


@contextmanager
def _stopped(data: Path) -> Iterator[None]:
    """Hold the directory's lock: what a running broker is about to write would look like damage."""
    from millstream.log.format import check_format
    from millstream.log.lock import DirectoryLock
    from millstream.log.storage import DiskStorage

    # Checked before the lock is taken, which would leave a file in whatever directory was named by mistake.
    # Messages without state are what somebody may have to save.
    if not (data / "state").is_dir() and not (data / "topics").is_dir():
        reason = "no broker has used it" if data.is_dir() else "there is no such directory"
        raise UsageProblem(f"{data} is not a data directory: {reason}")
    lock = DirectoryLock(data)
    try:
        lock.acquire()
    except OSError:
        stderr.print("[dim]the directory cannot be locked (read-only?); make sure that no broker uses it[/]")
    try:
        check_format(DiskStorage(data))
        yield
    except OSError as problem:
        if is_of_the_output(problem):
            raise
        raise StorageFailed(f"cannot read {problem.filename or data}: {problem.strerror or problem}") from None
    finally:
        lock.release()


def _select(data: Path, namespace: str, topic: str | None, partition: int | None) -> list[_PartitionFiles]:
    """The directories with segments that the options name; without any, all of them, the broker's own included."""
    from millstream.log.holding import files_below

    place = "" if topic is None else f"topics/{check_namespace(namespace)}/{check_topic(topic)}"
    if partition is not None:
        place += f"/{partition}"
    sizes: dict[str, int] = {}
    for path, size in files_below(str(data), place).items():
        if path.endswith(".log"):
            directory = path.rpartition("/")[0]
            sizes[directory] = sizes.get(directory, 0) + size
    if place and not sizes:
        raise UsageProblem(f"{data} holds nothing of {place.removeprefix('topics/')}")
    return [_PartitionFiles(directory, size) for directory, size in sorted(sizes.items())]


def _print_findings(findings: dict[_PartitionFiles, list[SegmentFinding]], bad: Sequence[SegmentFinding]) -> None:
    print_table(
        ("log", "files", "batches", "messages", "size", "state"),
        [
            (
                files.name,
                len(segments),
                sum(segment.batches for segment in segments),
                sum(segment.messages for segment in segments),
                bytes_text(sum(segment.bytes for segment in segments)),
                Text("ok", style="green") if all(s.is_good for s in segments) else Text("damaged", style="red"),
            )
            for files, segments in findings.items()
        ],
        empty="the directory holds no logs",
        numbers="files|batches|messages|size",
    )
    for finding in bad:
        stdout.print(f"\n[bold]{finding.path}[/]")
        for problem in finding.problems:
            stdout.print(f"  {problem}", soft_wrap=True)
    if bad:
        stderr.print(f"[cyan]hint:[/]  {_NEXT_STEP}", soft_wrap=True)
    if findings and not bad:
        messages = sum(segment.messages for segments in findings.values() for segment in segments)
        stderr.print(f"[dim]{plural(messages, 'message')} in {plural(len(findings), 'log')}, all good[/]")


def _verified_document(files: _PartitionFiles, segments: Sequence[SegmentFinding]) -> dict[str, Any]:
    return {
        "directory": files.directory,
        "good": all(segment.is_good for segment in segments),
        "segments": [
            {
                "path": segment.path,
                "first_offset": segment.base_offset,
                "next_offset": segment.next_offset,
                "bytes": segment.bytes,
                "batches": segment.batches,
                "messages": segment.messages,
                "sealed": segment.sealed,
                "damaged_offsets": [[damage.first_offset, damage.next_offset] for damage in segment.damaged],
                "problems": list(segment.problems),
            }
            for segment in segments
        ],
    }


def _print_batches(stored: Iterator[StoredBatch], *, as_json: bool) -> None:
    from millstream.compression import Codec

    if as_json:
        for batch in stored:
            print_json_line(_batch_document(batch))
        return
    print_table(
        ("offsets", "messages", "bytes", "codec", "appended", "producer", "sequence", "file", "at"),
        [
            (
                f"{batch.header.base_offset}-{batch.next_offset - 1}",
                batch.header.count,
                batch.header.length,
                Codec(batch.header.codec).name.lower(),
                time_text(batch.header.append_time_us // 1000),
                str(batch.header.producer_id) if batch.header.producer else None,
                batch.header.first_sequence if batch.header.producer else None,
                batch.path.rsplit("/", 1)[-1],
                batch.position,
            )
            for batch in stored
        ],
        empty="no batches from there on",
        numbers="offsets|messages|bytes|producer|sequence|at",
    )


def _batch_document(batch: StoredBatch) -> dict[str, Any]:
    from millstream.compression import Codec

    header = batch.header
    return {
        "first_offset": header.base_offset,
        "next_offset": batch.next_offset,
        "messages": header.count,
        "bytes": header.length,
        "codec": Codec(header.codec).name.lower(),
        "append_time_ms": header.append_time_us // 1000,
        "leader_epoch": header.leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "first_sequence": header.first_sequence,
        "path": batch.path,
        "position": batch.position,
    }


def _print_messages(stored: Iterator[StoredBatch], start: int, limit: int | None, *, as_json: bool) -> None:
    printed = 0
    for document in _messages(stored, start):
        if as_json:
            print_json_line(document)
        else:
            time_ms, key, value = document["timestamp_ms"], _shown(document, "key"), _shown(document, "value")
            typer.echo(f"{document['offset']}\t{time_text(time_ms)}\t{key}\t{value}")
        printed += 1
        if printed == limit:
            return
    if not printed:
        stderr.print("[dim]no messages from there on[/]")


def _messages(stored: Iterator[StoredBatch], start: int) -> Iterator[dict[str, Any]]:
    from millstream.headers import readable_headers

    for batch in stored:
        try:
            opened = batch.open()
            absent = [None] * opened.count
            rows = zip(
                opened.offsets(),
                opened.timestamps_us() or [opened.header.base_timestamp_us] * opened.count,
                opened.keys() or absent,
                opened.raw_headers() or absent,
                opened.values(),
                strict=True,
            )
        except BatchDamaged as problem:
            stderr.print(f"{batch.path} at byte {batch.position}: {problem}", soft_wrap=True)
            continue
        for offset, timestamp_us, key, headers, value in rows:
            if offset >= start:
                yield {
                    "offset": offset,
                    "timestamp_ms": timestamp_us // 1000,
                    **json_content(key, readable_headers(headers), value),
                }


def _shown(document: dict[str, Any], name: str) -> str:
    text = document.get(name)
    if (packed := document.get(f"{name}_base64")) is not None:
        text = base64.b64decode(packed).decode("utf-8", "surrogateescape")
    return "-" if text is None else terminal_safe(text)

"""Rounds of syncs, in both places where they are carried out: the same answers, whether compiled or not."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.committer import Commit, Rounds
from millstream.broker.rounds import CompiledRounds, ThreadRounds
from millstream.log.holding import Holding
from millstream.log.storage import DiskFile, DiskStorage, NotOpened


def _thread(loop: asyncio.AbstractEventLoop) -> Rounds:
    return ThreadRounds(loop)


def _compiled(loop: asyncio.AbstractEventLoop) -> Rounds:
    module = pytest.importorskip("millstream.broker._syncer", reason="needs a C compiler when it is installed")
    return CompiledRounds(loop, module.Syncer(), ThreadRounds(loop))


Place = Callable[[asyncio.AbstractEventLoop], Rounds]


def _carry_out(place: Place, *rounds: list[list[Any]]) -> list[Commit]:
    """Rounds one after the other, each with the files of partitions that nobody knows."""

    async def carry_out() -> list[Commit]:
        loop = asyncio.get_running_loop()
        carrier = place(loop)
        commits = []
        for parts in rounds:
            done: asyncio.Future[Commit] = loop.create_future()
            carrier.submit(Commit([(None, files, 0) for files in parts], {}), done.set_result)  # type: ignore[misc]
            commits.append(await asyncio.wait_for(done, 10))
        await carrier.close()
        return commits

    return asyncio.run(carry_out())


class _Seal:
    """Something to sync that is not a plain file."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.synced = 0
        self._problem = problem

    def sync(self) -> None:
        self.synced += 1
        if self._problem is not None:
            raise self._problem


def _unsyncable() -> DiskFile:
    """A file as far as anybody can tell, until it is to be synced: the end of a pipe."""
    return DiskFile(os.pipe()[1], "pipe", Holding(""))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[[], DiskFile]]:
    storage = DiskStorage(tmp_path)
    made: list[DiskFile] = []

    def make() -> DiskFile:
        file = storage.open(f"{len(made)}.log", create=True)
        assert isinstance(file, DiskFile)
        file.write(b"messages", 0)
        made.append(file)
        return file

    yield make
    for file in made:
        file.close()


@pytest.fixture(params=[_thread, _compiled], ids=["python", "compiled"])
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


def test_files_are_synced_and_each_round_says_how_long_it_took(place: Place, files: Callable[[], DiskFile]) -> None:
    for commit in _carry_out(place, *([[files()], [files()]] for _ in range(3))):
        assert commit.errors == {}
        assert commit.seconds > 0


def test_a_sync_that_fails_is_an_error_of_its_partition_and_its_round_only(
    place: Place, files: Callable[[], DiskFile]
) -> None:
    failed, after = _carry_out(place, [[files()], [_unsyncable()], [files()]], [[files()], [files()]])
    assert list(failed.errors) == [1]
    error = failed.errors[1]
    assert isinstance(error, OSError)
    assert error.errno == errno.EINVAL
    assert after.errors == {}


def test_what_is_not_a_plain_file_is_synced_as_it_wants_to_be(place: Place, files: Callable[[], DiskFile]) -> None:
    seal, broken = _Seal(), _Seal(OSError(errno.EIO, "broken"))
    (commit,) = _carry_out(place, [[files(), seal], [files(), broken]])
    assert (seal.synced, broken.synced) == (1, 1)
    assert list(commit.errors) == [1]


def test_a_round_of_many_files_and_one_of_none(place: Place, files: Callable[[], DiskFile]) -> None:
    many, none = _carry_out(place, [[files()] for _ in range(20)] + [[_unsyncable()]], [[]])
    assert list(many.errors) == [20]
    assert none.errors == {}


@pytest.mark.parametrize("had", [0, 3], ids=["none", "a few"])
def test_a_round_of_many_files_is_synced_also_where_no_thread_can_be_started(
    place: Place, files: Callable[[], DiskFile], monkeypatch: pytest.MonkeyPatch, had: int
) -> None:
    """A limit of the machine is no failure of the disk: the round takes longer, and nobody waits for ever."""
    start, started = threading.Thread.start, []

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith("millstream-sync"):
            if len(started) == had:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    seals = [_Seal() for _ in range(20)]
    rounds = _carry_out(place, [[files()] for _ in range(6)] + [[_unsyncable()]], [[seal] for seal in seals])
    assert [list(commit.errors) for commit in rounds] == [[6], []]
    assert [seal.synced for seal in seals] == [1] * 20
    assert len(started) == had


def test_a_round_that_cannot_be_carried_out_confirms_nothing_and_ends(files: Callable[[], DiskFile]) -> None:
    class Unlisted(Commit):
        def files(self) -> list[Any]:
            raise MemoryError

    async def carry_out() -> tuple[Commit, Commit]:
        loop = asyncio.get_running_loop()
        rounds = ThreadRounds(loop)
        ended: asyncio.Queue[Commit] = asyncio.Queue()
        parts: list[Any] = [(None, [files()], 0), (None, [files()], 0)]
        rounds.submit(Unlisted(parts, {}), ended.put_nowait)
        rounds.submit(Commit(parts, {}), ended.put_nowait)
        both = await asyncio.wait_for(ended.get(), 10), await asyncio.wait_for(ended.get(), 10)
        await rounds.close()
        return both

    failed, after = asyncio.run(carry_out())
    assert {place: type(error) for place, error in failed.errors.items()} == {0: MemoryError, 1: MemoryError}
    assert after.errors == {}


def test_closing_waits_for_the_round_under_way(files: Callable[[], DiskFile]) -> None:
    syncer = pytest.importorskip("millstream.broker._syncer").Syncer()
    file = files()
    file.write(b"x" * 8_000_000, 0)
    syncer.submit([file.fileno()])
    syncer.close()
    for act in (lambda: syncer.submit([file.fileno()]), syncer.take):
        with pytest.raises(RuntimeError):
            act()


def test_one_round_at_a_time(files: Callable[[], DiskFile]) -> None:
    syncer = pytest.importorskip("millstream.broker._syncer").Syncer()
    with pytest.raises(RuntimeError, match="no round is done"):
        syncer.take()
    with pytest.raises(TypeError):
        syncer.submit(["not a descriptor"])
    syncer.submit([files().fileno()])
    with pytest.raises(RuntimeError, match="under way"):
        syncer.submit([files().fileno()])
    select.select([syncer], [], [], 10)
    assert syncer.take()[1] == [0]
    syncer.close()


@pytest.mark.parametrize("place", [_thread, _compiled])
@pytest.mark.parametrize("others", [0, 5])
def test_what_can_be_tried_again_hides_nothing_that_cannot(place: Place, others: int) -> None:
    put_off, final = NotOpened(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "Input/output error")
    for problems in ((put_off, final), (final, put_off)):
        files = [_Seal(problem) for problem in problems]
        (commit,) = _carry_out(place, [files, *([_Seal()] for _ in range(others))])
        assert commit.errors == {0: final}
    (commit,) = _carry_out(place, [[_Seal(put_off), _Seal()]])
    assert commit.errors == {0: put_off}

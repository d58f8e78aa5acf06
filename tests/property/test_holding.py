"""Whatever is done to files while they are held: whoever copies them gets those of the moment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from millstream.log.holding import HELD, open_held, read_list
from millstream.log.storage import DiskStorage
from tests.examples import examples

PATHS = [f"topics/{topic}/{name}" for topic in "ab" for name in ("0.log", "0.index", "1.log")] + ["node_id"]

a_path = st.sampled_from(PATHS)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), a_path, st.binary(min_size=1, max_size=20)),
        st.tuples(st.just("overwrite"), a_path, st.binary(min_size=1, max_size=20)),
        st.tuples(st.just("replace"), a_path, st.binary(max_size=20)),
        st.tuples(st.just("truncate"), a_path, st.integers(0, 20)),
        st.tuples(st.just("remove"), a_path, st.none()),
        st.tuples(st.just("rename"), a_path, a_path),
        st.tuples(st.just("remove_tree"), st.sampled_from(["topics/a", "topics/b"]), st.none()),
    ),
    max_size=30,
)


def do(storage: DiskStorage, step: tuple[str, str, object]) -> None:
    kind, path, given_ = step
    if kind == "remove_tree":
        storage.remove_tree(path)
        return
    if kind not in ("append", "replace") and not storage.exists(path):
        return
    storage.make_directory(path.rpartition("/")[0])
    if kind == "replace":
        assert isinstance(given_, bytes)
        storage.replace(path, given_)
    elif kind == "remove":
        storage.remove(path)
    elif kind == "rename":
        assert isinstance(given_, str)
        if given_ != path:
            storage.make_directory(given_.rpartition("/")[0])
            storage.rename(path, given_)
    else:
        file = storage.open(path, create=kind == "append")
        if kind == "truncate":
            assert isinstance(given_, int)
            file.truncate(min(given_, file.size()))
        else:
            assert isinstance(given_, bytes)
            file.write(given_, file.size() if kind == "append" else 0)
        file.close()


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.relative_to(root).parts[0] != HELD)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def held_contents(root: Path) -> dict[str, bytes]:
    found = {}
    for path, size in read_list(str(root)).sizes.items():
        with open_held(str(root), path) as file:
            found[path] = file.read(size)
    return found


@example(
    before=[("append", "topics/a/0.log", b"\x01")],
    during=[("rename", "topics/a/0.log", "topics/a/0.index"), ("overwrite", "topics/a/0.index", b"\x00")],
    later=[],
)
@examples(19)
@given(before=steps, during=steps, later=steps)
def test_a_copy_shows_the_moment(before: list, during: list, later: list) -> None:
    # This is not about power cuts, and syncing would take most of the time.
    with tempfile.TemporaryDirectory() as directory, patch("os.fsync"), patch("os.fdatasync"):
        root = Path(directory)
        storage = DiskStorage(root)
        # Files that stay open across the moment, as logs have them.
        storage.make_directory("topics/a")
        kept_open = storage.open("topics/a/open.log", create=True)
        kept_open.write(b"first", 0)
        for step in before:
            do(storage, step)
        for round_of_steps in (during, later):
            moment = contents(root)
            storage.holding.begin("h")
            if storage.exists("topics/a/open.log"):
                kept_open.write(b"more", kept_open.size())
                kept_open.write(b"FIRST", 0)
            for step in round_of_steps:
                do(storage, step)
            assert held_contents(root) == moment
            storage.holding.end()
            assert not (root / HELD).exists()

"""Logs on a real disk leave no files open behind their tests: some clients cannot live with descriptors above 1023."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream.log.storage import DiskStorage, File


@pytest.fixture(autouse=True)
def _close_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[File] = []
    honest = DiskStorage.open

    def remembered(self: DiskStorage, path: str, *, create: bool = False) -> File:
        opened.append(honest(self, path, create=create))
        return opened[-1]

    monkeypatch.setattr(DiskStorage, "open", remembered)
    yield
    for file in opened:
        file.close()

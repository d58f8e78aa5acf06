"""Keys by number, and a set of many such numbers in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Final

__all__ = ["NameSet", "names_of"]

# A name has 45 bits.  The last ones say where it is in a table, and the others are what stands there.
_LOW_BITS: Final = 13
_TOP: Final = 1 << 44  # always set, so that 0 stands for nothing
_REST: Final = _TOP - 1

#: So many names are kept in a set of Python's, where they are found fastest.
_FEW_MAX: Final = 16_384
#: When there are more, so many at once are moved.
_MOVED: Final = 4_096


def names_of(keys: Sequence[bytes | None]) -> list[int]:
    """A number for each key, 0 where there is none: some bytes to remember instead of an object.

    Keys that share a number, of which there may be two among millions, wait for each other and come to no other harm.
    """
    return [0 if key is None else hash(key) & _REST | _TOP for key in keys]


class NameSet:
    """A set of names: about 20 bytes for each if they are many, where a set of Python's takes a hundred.

    Beside a set for the few there are two tables.  A name has one place in each and goes where that is free; in the
    second only if it is not in the first.  A few fit nowhere.  Tables grow by being doubled as they are: of what is
    then there twice only one is in its place, and the other counts for nothing.
    """

    __slots__ = ("_few", "_few_max", "_first", "_many", "_mask", "_misfits", "_second")

    def __init__(self) -> None:
        self._few: set[int] = set()
        self._few_max = _FEW_MAX
        self._clear()

    def _clear(self) -> None:
        self._first = array("I")
        self._second = array("I")
        self._mask = -1
        self._misfits: set[int] = set()
        self._many = 0  # how many are in the tables, with those that do not fit in

    def __len__(self) -> int:
        return len(self._few) + self._many

    def __contains__(self, name: int) -> bool:
        return bool(self.among((name,)))

    def among(self, names: Collection[int]) -> set[int]:
        """The names among these that are in the set.  0 may or may not be in the answer; it stands for no key."""
        found = self._few.intersection(names)
        if self._many:
            first, second, mask = self._first, self._second, self._mask
            found |= self._misfits.intersection(names)
            found.update(
                [
                    name
                    for name in names
                    if (there := first[name & mask])
                    and (there == (part := name >> _LOW_BITS) or second[name & mask] == part)
                ]
            )
        return found

    def around(self, names: Collection[int]) -> set[int]:
        """A set in which to look up these names.  What is put into it while looking must be given to `add` after."""
        return self.among(names) if self._many else self._few

    def add(self, names: Collection[int]) -> None:
        """Take in names; in the tables there must be none of them."""
        self._few.update(names)
        if len(self._few) > self._few_max:
            self._move()

    def remove(self, names: Collection[int]) -> None:
        """Take out names, each of them once."""
        few = self._few
        before = len(few)
        few.difference_update(names)
        if before - len(few) == len(names) or not self._many:
            return
        first, second, mask = self._first, self._second, self._mask
        removed = len(self._misfits)
        self._misfits.difference_update(names)
        removed -= len(self._misfits)
        for name in names:
            at = name & mask
            if there := first[at]:
                part = name >> _LOW_BITS
                if there == part:
                    first[at] = second[at]
                    second[at] = 0
                    removed += 1
                elif second[at] == part:
                    second[at] = 0
                    removed += 1
        self._many -= removed
        if not self._many:
            self._few_max = _FEW_MAX
            self._clear()

    def _move(self) -> None:
        """Move the few to the tables."""
        names = self._few
        self._few, self._few_max = set(), _MOVED
        self._many += len(names)
        if 7 * len(self._first) < 8 * self._many:  # so that one in thirteen does not fit, at most
            names |= self._misfits
            self._misfits = set()
            while 7 * len(self._first) < 8 * self._many:
                self._grow()
        first, second, mask = self._first, self._second, self._mask
        high = mask >> _LOW_BITS
        for name in names:
            at, part = name & mask, name >> _LOW_BITS
            # Nothing is there, or what is there is not in its place.
            if not (there := first[at]) or (there ^ part) & high:
                first[at] = part
            elif not (there := second[at]) or (there ^ part) & high:
                second[at] = part
            else:
                self._misfits.add(name)

    def _grow(self) -> None:
        if self._first:
            self._first *= 2
            self._second *= 2
        else:
            self._first = array("I", bytes(4 << _LOW_BITS))
            self._second = array("I", bytes(4 << _LOW_BITS))
        self._mask = len(self._first) - 1

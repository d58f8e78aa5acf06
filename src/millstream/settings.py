"""Changing a struct of settings by name, with one clear sentence for every mistake."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from millstream.durations import DURATION_MS_MAX, parse_ms
from millstream.errors import ConfigInvalid, InvalidArgument, NewerData
from millstream.names import did_you_mean
from millstream.wording import in_words

__all__ = ["EXACT_MAX", "Bounds", "check_bounds", "check_stored", "limits", "merge_settings", "within_bounds"]

#: Whole numbers beyond this are not exact in every reader of JSON.
EXACT_MAX: Final = 2**53

#: The least and the most that each setting may be.
Bounds: TypeAlias = Mapping[str, tuple[float, float]]

S = TypeVar("S", bound=msgspec.Struct)


@cache
def _fields_of(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    """Worked out once: a lease over HTTP compares settings as well."""
    return {field.name: field for field in msgspec.structs.fields(kind)}


def limits(*names: str) -> Bounds:
    """The bounds of settings that limit something, where 0 means no limit."""
    return {name: (0, DURATION_MS_MAX if name.endswith("_ms") else EXACT_MAX) for name in names}


def check_bounds(settings: msgspec.Struct, bounds: Bounds) -> None:
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            raise ConfigInvalid(f"{name} must be between {least} (no limit) and {most}, not {value}")


def check_stored(kind: type[msgspec.Struct], values: Mapping[str, Any], *, what: str) -> None:
    """Raise NewerData when stored settings have a name that this version does not know."""
    if unknown := values.keys() - _fields_of(kind).keys():
        raise NewerData(
            f"a {what} has the setting {min(unknown)!r}, which this version of Millstream does not know: "
            "use the version that set it or a newer one"
        )


def within_bounds(values: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """Values that were stored when other bounds held, as near as these allow; what is no number becomes the least."""
    return {
        name: min(bounds[name][1], max(bounds[name][0], value)) if name in bounds else value
        for name, value in values.items()
    }


def merge_settings(kind: type[S], values: Mapping[str, Any], base: S | None, *, what: str) -> S:
    """The settings of `base` (or the defaults) with these changes; raises ConfigInvalid naming the bad key."""
    fields = _fields_of(kind)
    merged = msgspec.structs.asdict(base) if base is not None else {}
    for key, given in values.items():
        value = given
        if key not in fields:
            hint = did_you_mean(key, fields) or f"; known keys: {', '.join(sorted(fields))}"
            raise ConfigInvalid(f"unknown {what} setting {key!r}{hint}")
        try:
            if key.endswith("_ms") and isinstance(value, str):
                value = _milliseconds(value)
            # Not strict: settings also come from command lines, where every value is text.
            merged[key] = msgspec.convert(value, fields[key].type, strict=False)
        except (msgspec.ValidationError, InvalidArgument) as problem:
            reason = problem if isinstance(problem, InvalidArgument) else in_words(problem, kind=fields[key].type)
            raise ConfigInvalid(f"{what} setting {key}={given!r} is not allowed: {reason}") from None
    return kind(**merged)


def _milliseconds(text: str) -> object:
    """A number without a unit counts what the name of the setting says, whatever it counts elsewhere."""
    if not any(map(str.isalpha, text)):
        return text
    try:
        return parse_ms(text)
    except InvalidArgument:
        raise InvalidArgument("use milliseconds, or a length such as '30s', '5m' or '1h30m'") from None

"""Options that belong together are the fields of a dataclass, and a command takes them as one parameter.

What is declared as

    @dataclass(frozen=True)
    class Window:
        since: Annotated[str | None, typer.Option("--since")] = None
        until: Annotated[str | None, typer.Option("--until")] = None

    @app.command()
    def show(name: NameArgument, *, window: Window) -> None: ...

is the command `show NAME [--since TEXT] [--until TEXT]`, and any other command that takes a `Window` has the same two.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

import typer

from millstream.cli.output import prose

__all__ = ["Commands"]

F = TypeVar("F", bound=Callable[..., Any])


class Commands(typer.Typer):
    """A group of commands, each of which may take bundles of options.  Their docstrings are their help."""

    def command(self, *names: str, **settings: Any) -> Callable[[F], F]:  # type: ignore[override]
        register = super().command

        def decorate(function: F) -> F:
            register(*names, **{"help": prose(function.__doc__), **settings})(_Spread(function))
            return function

        return decorate


class _Spread:
    """A command as typer sees it: it takes every option of its bundles by itself.

    What these are is found out when somebody looks: only one of all the commands is run.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    @functools.cached_property
    def _own(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._function, eval_str=True).parameters

    @functools.cached_property
    def _bundles(self) -> dict[str, Any]:
        kinds = {name: parameter.annotation for name, parameter in self._own.items()}
        return {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}

    @property
    def __signature__(self) -> inspect.Signature:
        spread: list[inspect.Parameter] = []
        for name, parameter in self._own.items():
            if name in self._bundles:
                spread += _options(self._bundles[name])
            else:
                spread.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        return inspect.Signature(spread)

    def __call__(self, **values: Any) -> Any:
        for name, bundle in self._bundles.items():
            values[name] = bundle(**{field.name: values.pop(field.name) for field in dataclasses.fields(bundle)})
        return self._function(**values)


@functools.cache
def _options(bundle: Any) -> list[inspect.Parameter]:
    types, kind = get_type_hints(bundle, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=types[field.name])
        for field in dataclasses.fields(bundle)
    ]

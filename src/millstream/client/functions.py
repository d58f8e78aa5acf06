"""Functions of the user's: what can be known of them before they are called, and what they return."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from millstream.errors import InvalidArgument

__all__ = ["check_done", "check_handler", "is_asynchronous", "refuse_asynchronous"]


def is_asynchronous(function: Any) -> bool:
    """Whether calling it does nothing until the result is awaited, as far as it shows before it is called."""
    while isinstance(function, functools.partial):
        function = function.func
    # Of its class: a class that is called makes an instance, whatever calling that does.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def refuse_asynchronous(name: str, function: Any) -> None:
    """For functions that nobody would await; and for what is no function, before it is missed."""
    if function is not None and not callable(function):
        raise InvalidArgument(f"{name} is a function, not {function!r}")
    if is_asynchronous(function):
        raise InvalidArgument(f"{name} is a coroutine function, and nobody would await it: give a plain function")


def check_handler(handler: Any) -> None:
    """Whether a worker could give it a message: if not, each message would become a dead letter."""
    if not callable(handler):
        raise InvalidArgument(f"a handler is a function that takes a message, not {handler!r}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # written in C, perhaps, and it does not say
        return
    try:
        signature.bind(None)
    except TypeError as problem:
        raise InvalidArgument(f"{handler!r} cannot be called with a message and nothing else: {problem}") from None


def check_done(result: object) -> None:
    """Raises TypeError when a handler returned something that is still to be run: its message was not handled."""
    if result is None:
        return
    if inspect.isawaitable(result):
        what, advice = "an awaitable", "make it `async def`, also where it wraps one that is, or await the result in it"
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        what, advice = "a generator", "take `yield` out of it, or run the generator in it"
    else:
        return
    if inspect.iscoroutine(result):
        result.close()  # it is known now that nobody awaits it
    raise TypeError(f"the handler returned {what} and did nothing: {advice}")

"""The Python functions that a pipeline names, of modules beside its file or of any that are installed."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigInvalid
from millstream.spark.columns import suggestion

__all__ = ["find_function", "importing_from", "modules_beside"]

_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def find_function(text: str, directory: Path, inputs: int, arguments: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The function that `module:function` names; modules beside the file are found, too.  Raises ConfigInvalid."""
    if not _FUNCTION.fullmatch(text):
        raise ConfigInvalid(f"{text!r} does not name a function: write `module:function`")
    module_name, _, name = text.partition(":")
    with importing_from(directory):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as problem:
            if problem.name is not None and module_name.split(".")[0] == problem.name.split(".")[0]:
                beside = [path.stem for path in directory.glob("*.py")]
                hint = suggestion(module_name, beside) if beside else ""
                raise ConfigInvalid(f"there is no module {module_name!r} beside the file or installed{hint}") from None
            raise ConfigInvalid(f"module {module_name!r} needs {problem.name!r}, which is not installed") from None
        except BaseException as problem:  # whatever the user's module does
            if isinstance(problem, KeyboardInterrupt):
                raise
            raise ConfigInvalid(f"module {module_name!r} fails: {type(problem).__name__}: {problem}") from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value) and not each.startswith("_")]
        raise ConfigInvalid(
            f"module {module_name!r} has no function {name!r}{suggestion(name, known) if known else ''}"
        )
    try:
        inspect.signature(function).bind(*[None] * inputs, **(arguments or {}))
    except TypeError as problem:
        taken = f"{inputs} DataFrame{'s' if inputs > 1 else ''}" + (f" and {', '.join(arguments)}" if arguments else "")
        raise ConfigInvalid(f"function {text!r} does not take {taken}: {problem}") from None
    except ValueError:
        pass  # it does not say what it takes
    return function  # type: ignore[no-any-return]


def modules_beside(directory: Path) -> list[str]:
    """The files of modules that were loaded from beside the pipeline: workers need them, too."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted({file for file in files if file and file.endswith(".py") and Path(file).parent == directory})


@contextmanager
def importing_from(directory: Path) -> Iterator[None]:
    """Within the block, modules of a directory are found before all others."""
    sys.path.insert(0, str(directory))
    try:
        importlib.invalidate_caches()
        yield
    finally:
        if str(directory) in sys.path:
            sys.path.remove(str(directory))

"""`millstream errors`: what the codes in error messages mean and what to do about them."""

from __future__ import annotations

import inspect
from typing import Annotated, Final

import typer

from millstream.cli.bundles import Commands
from millstream.cli.failure import OutputProblem, UsageProblem, exit_code_of
from millstream.cli.output import JsonOption, examples, print_facts, print_json, print_table
from millstream.errors import InternalError, MillstreamError, catalogue
from millstream.names import closest

app = Commands(no_args_is_help=True, help="Look up error codes.")

# The base class carries the number of its plainest child; that is the one people meet.
_ERRORS: Final = {
    error.code: InternalError if error is MillstreamError else error for _, error in sorted(catalogue().items())
}
# Of commands alone: never on the wire, hence without a number.
_OF_COMMANDS: Final[dict[str, type[MillstreamError]]] = {error.code: error for error in (UsageProblem, OutputProblem)}


@app.command("list", epilog=examples("millstream errors list", "millstream errors list --json"))
def list_errors(as_json: JsonOption = False) -> None:
    """List every error that a broker or the SDK can report, and so every command."""
    if as_json:
        print_json([_document(error) for error in _ERRORS.values()])
        return
    print_table(
        ("code", "number", "retry", "meaning"),
        [(error.code, error.number, error.retriable, _meaning(error)) for error in _ERRORS.values()],
        numbers="number",
    )


@app.command(epilog=examples("millstream errors explain TOPIC_NOT_FOUND", "millstream errors explain 22"))
def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code or the number of an error.")],
    as_json: JsonOption = False,
) -> None:
    """Explain an error: what happened, and what to do about it."""
    wanted = code.upper().replace("-", "_")
    known = _ERRORS | _OF_COMMANDS
    error = known.get(wanted) or next((e for e in _ERRORS.values() if str(e.number) == wanted), None)
    if error is None:
        meant = closest(wanted, known)
        hint = "; `millstream errors list` shows all of them" if meant is None else f"; did you mean {meant}?"
        raise UsageProblem(f"there is no error {code!r}{hint}")
    if as_json:
        print_json(_document(error))
        return
    print_facts(
        [
            ("code", error.code if error.code in _OF_COMMANDS else f"{error.code} ({error.number})"),
            ("in Python", "-" if error.code in _OF_COMMANDS else f"millstream.errors.{error.__name__}"),
            ("meaning", _meaning(error)),
            ("retry", "the same request can succeed later" if error.retriable else "will not help"),
            ("what to do", error.remedy),
        ]
    )


def _document(error: type[MillstreamError]) -> dict[str, object]:
    return {
        "code": error.code,
        "number": None if error.code in _OF_COMMANDS else error.number,
        "name": error.__name__,
        "retriable": error.retriable,
        "exit_code": int(exit_code_of(error(""))),
        "meaning": _meaning(error),
        "remedy": error.remedy,
    }


def _meaning(error: type[MillstreamError]) -> str:
    return (inspect.getdoc(error) or "").split("\n\n")[0]

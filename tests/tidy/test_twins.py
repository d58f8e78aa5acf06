"""The admin methods of the blocking and the asyncio client are written out twice, for editors and type checkers.

This test keeps the two copies alike: apart from `async`, `await` and the prefix `Async`, every method of one client is
the same as that of the other, with its signature, docstring and body.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "src/millstream/client"
TWINS = ("access", "admin", "administration", "letters", "mqtt", "pipelines", "queues", "schedules", "webhooks")
#: There is no `islice` for what comes asynchronously.
WRITTEN_ANOTHER_WAY = {"DeadLetters.list"}


class _Blocking(ast.NodeTransformer):
    """Turns asynchronous code into what the blocking twin says."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        return ast.FunctionDef(**{field: getattr(node, field, None) for field in ast.FunctionDef._fields}, lineno=0)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self.generic_visit(node)
        return ast.For(**{field: getattr(node, field) for field in ast.For._fields}, lineno=0)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return node.value

    def visit_For(self, node: ast.For) -> ast.AST:
        """Asynchronous generators have no `yield from`."""
        self.generic_visit(node)
        match node.body:
            case [ast.Expr(ast.Yield())]:
                return ast.Expr(ast.YieldFrom(node.iter))
        return node


def _methods(module: str, side: str) -> Iterator[tuple[str, str]]:
    tree = _Blocking().visit(ast.parse((CLIENT / side / f"{module}.py").read_text()))
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef):
                    name = f"{kind.name.removeprefix('Async')}.{method.name}"
                    if name in WRITTEN_ANOTHER_WAY:
                        del method.body[1:]
                    text = ast.unparse(ast.fix_missing_locations(method)).replace("asyncio.sleep", "time.sleep")
                    yield name, re.sub(r"\bAsync(?=[A-Z])", "", text)


@pytest.mark.parametrize("module", TWINS)
def test_both_clients_have_the_same_calls(module: str) -> None:
    assert dict(_methods(module, "asynchronous")) == dict(_methods(module, "blocking"))

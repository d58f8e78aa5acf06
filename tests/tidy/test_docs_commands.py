"""Every command that the documentation shows exists: its words and options, its path, its parameters, its body."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer

from millstream.cli.main import app
from millstream.errors import MillstreamError
from millstream.server.http.app import API
from millstream.server.http.endpoints import Endpoint, decode_body, decode_query
from millstream.server.http.router import Router
from millstream.server.http.site import FAMILIES

ROOT = Path(__file__).parents[2]
#: Where a command ends and the shell goes on.
SHELL = {"|", ">", "&&", "||", "&", "<"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Paths outside the API.
PAGES_OF_THE_SERVER = {"/metrics", "/health", "/health/live", "/health/ready", "/health/deep"}


def commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"^ *```console\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.strip().startswith("$ "):
                yield line.strip()[2:]


def shown(program: str) -> list[Any]:
    found = []
    for page in PAGES:
        for line in commands(page):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables that are set for it
                words = words[1:]
            if words and Path(words[0]).name == program:
                end = next(
                    (at for at, word in enumerate(words) if word in ("|", ">", "&&", "||", "&", "<")), len(words)
                )
                found.append(pytest.param(words[1:end], id=f"{page.relative_to(ROOT)}: {line}"))
    return found


def without_effect(command: Any) -> Any:
    """The same command line, which only reads what it is given."""
    command.callback = None
    for child in getattr(command, "commands", {}).values():
        without_effect(child)
    return command


@pytest.fixture(scope="module")
def tree() -> Any:
    build = typer.main.get_command
    # A tree of its own: the one that other tests share must keep its effects.
    return without_effect(getattr(build, "__wrapped__", build)(app))


@pytest.mark.parametrize("words", shown("millstream"))
def test_a_command_of_the_documentation_is_understood(words: list[str], tree: Any) -> None:
    try:
        tree.main(args=words, prog_name="millstream", standalone_mode=False)
    except Exception as problem:
        message = getattr(problem, "format_message", lambda: "")()
        assert not message, f"millstream {' '.join(words)}: {message}"
        raise


@pytest.fixture(scope="module")
def router() -> Router[Endpoint]:
    router: Router[Endpoint] = Router()
    for family in FAMILIES:
        for endpoint in family.endpoints:
            for prefix in (API, f"{API}/namespaces/{{namespace}}") if family.namespaced else (API,):
                router.add(endpoint.method, prefix + endpoint.path, endpoint)
    return router


@pytest.mark.parametrize("words", shown("curl"))
def test_a_request_of_the_documentation_is_understood(words: list[str], router: Router[Endpoint]) -> None:
    method, body, url = "GET", "", ""
    rest = iter(words)
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word in ("--json", "-d", "--data", "--data-binary"):
            body = next(rest)
            method = "POST" if method == "GET" else method
        elif word in ("-H", "--header", "-o", "--cacert"):
            next(rest)
        elif not word.startswith("-"):
            url = word
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.path in PAGES_OF_THE_SERVER:
        return
    endpoint, _ = router.find(method, parts.path)
    decode_query(endpoint.query, parts.query.encode("ascii", "ignore"))
    if body.startswith(("{", "[")) and endpoint.body not in (None, bytes):
        decode_body(endpoint.body, body.encode())


def test_there_are_commands_to_look_at() -> None:
    assert len(shown("millstream")) > 30
    assert len(shown("curl")) > 5


def test_a_word_that_does_not_exist_is_noticed(tree: Any, router: Router[Endpoint]) -> None:
    for words in (["publish", "orders", "--colour"], ["publsh", "orders"]):
        with pytest.raises(AssertionError, match="No such"):
            test_a_command_of_the_documentation_is_understood(words, tree)
    with pytest.raises(MillstreamError, match="not known here"):
        test_a_request_of_the_documentation_is_understood(["localhost/api/v1/topics?colour=red"], router)

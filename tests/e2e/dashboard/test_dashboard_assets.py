"""The dashboard's files, without a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import httpx
import pytest

from millstream.testing.broker import BrokerForTests

FOLDER = Path(str(resources.files("millstream.dashboard")))
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES)
MODULES = [path for path in FILES if path.suffix == ".js"]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with BrokerForTests(http=True) as broker, httpx.Client(base_url=broker.url) as client:
        yield client


def test_every_file_is_served_with_its_type_and_may_load_nothing_from_elsewhere(http: httpx.Client) -> None:
    assert len(FILES) > 20
    for path in FILES:
        answer = http.get(f"/dashboard/{path.relative_to(FOLDER).as_posix()}")
        assert answer.status_code == 200, path
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"].split(";")[0] == TYPES[path.suffix]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/dashboard/app.js")
    again = http.get("/dashboard/app.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_the_root_is_the_dashboard_and_other_paths_are_not_files(http: httpx.Client) -> None:
    assert http.get("/").text == (FOLDER / "index.html").read_text()
    assert http.head("/").status_code == 200
    assert http.post("/").status_code == 405
    for path in ("../config.py", "%2e%2e/config.py", "__init__.py", "no.js"):
        assert http.get(f"/dashboard/{path}").status_code == 404, path


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_module_imports_only_what_is_there(module: Path) -> None:
    text = module.read_text()
    for names, where in re.findall(r'^import (.+?) from "(.+?)";$', text, re.MULTILINE):
        target = (module.parent / where).resolve()
        assert target in MODULES, f"{module.name} imports {where}"
        exported = target.read_text()
        for name, _, alias in (one.partition(" as ") for one in names.strip("{ }").split(", ") if "*" not in names):
            declared = rf"export (async )?(function|const|class|let) {name}\b"
            assert re.search(declared, exported), f"{module.name} imports {name} from {where}"
            assert len(re.findall(rf"\b{alias or name}\b", text)) > 1, f"{module.name} does not use {name}"


def test_nothing_is_made_of_markup_and_nothing_comes_from_elsewhere() -> None:
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org", "https://example.com"}, path


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to check the syntax with")
def test_every_module_is_valid_javascript() -> None:
    read = "const [, ...files] = process.argv; for (const file of files) new (require('vm').SourceTextModule)"
    code = f"{read}(require('fs').readFileSync(file, 'utf8'), {{ identifier: file }});"
    command = ["node", "--no-warnings", "--experimental-vm-modules", "--eval", code, *map(str, MODULES)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr

"""What the API serves at `/`: the page and its files, and nothing that needs to be kept from anybody."""

import hashlib
import re
from pathlib import Path

import pytest

from api.console.pages import POLICY, STATIC
from tests.api.served import Api, serving

KEY = "a-key-of-the-tests"
KEYS = f"ada={hashlib.sha256(KEY.encode()).hexdigest()}"


def build_of(page: str) -> str:
    found = re.search(r'src="console/([0-9a-f]{16})/main\.js"', page)
    assert found is not None, page
    return found[1]


async def files(api: Api) -> str:
    return f"/console/{build_of((await api.http.get('/')).text)}"


async def test_the_page_and_its_files_need_no_key_and_all_data_does(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=KEYS) as api:
        page = await api.http.get("/")
        program = await api.http.get(f"{await files(api)}/main.js")
        data = await api.http.get("/v1/sessions")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (program.status_code, program.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert data.status_code == 401


async def test_every_file_says_that_nothing_else_runs(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        for path in ("/", f"{await files(api)}/main.js", f"{await files(api)}/vendor/preact.LICENSE"):
            headers = (await api.http.get(path)).headers

            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in headers


async def test_files_are_kept_for_ever_under_the_name_of_their_build_and_the_page_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        page = await api.http.get("/")
        program = await api.http.get(f"{await files(api)}/main.js")
        of_another_build = await api.http.get("/console/0123456789abcdef/main.js")
        again = await api.http.get("/", headers={"if-none-match": page.headers["etag"]})

    assert page.headers["cache-control"] == "no-cache"
    assert program.headers["cache-control"] == "public, max-age=31536000, immutable"
    # During a deployment the page of the other build may ask here.
    assert (of_another_build.status_code, of_another_build.headers["cache-control"]) == (200, "no-cache")
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "../pages.py", "%2e%2e/pages.py", "..%2f..%2fapp.py", "", "views"])
async def test_only_the_files_of_the_console_are_there(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as api:
        answer = await api.http.get(f"{await files(api)}/{name}")

    assert answer.status_code == 404


async def test_switched_off_there_is_no_console(tmp_path: Path) -> None:
    async with serving(tmp_path, console="off") as api:
        page, program = await api.http.get("/"), await api.http.get("/console/0123456789abcdef/main.js")
        data = await api.http.get("/v1/sessions")

    assert (page.status_code, program.status_code, data.status_code) == (404, 404, 200)


async def test_it_hides_no_other_route(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        for path in ("/docs", "/openapi.json", "/eve/v1/health", "/runs", "/v1/inputs"):
            answer = await api.http.get(path)

            assert (answer.status_code, "console/" in answer.text[:2000]) == (200, False), path


def test_the_files_name_each_other_and_nothing_outside() -> None:
    """Neither a script of another server nor one inside the page would run."""
    page = (STATIC / "index.html").read_text()
    sources = {path: path.read_text() for path in STATIC.rglob("*.js")}

    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", page)
    # A browser asks for all modules at once, and not for one after the other as they name each other.
    preloaded = set(re.findall(r'modulepreload" href="console/{build}/([^"]+)"', page))
    assert preloaded == {str(path.relative_to(STATIC)) for path in sources} - {"main.js"}
    for path, source in sources.items():
        for imported in re.findall(r'^(?:import|export)\b[^;]*?from\s*"([^"]+)"', source, re.MULTILINE):
            assert (path.parent / imported).resolve() in {each.resolve() for each in sources}, (path, imported)
        assert not re.search(
            r"\binnerHTML|dangerouslySetInnerHTML=|document\.write|\beval\(", source
        ) or "vendor" in str(path)

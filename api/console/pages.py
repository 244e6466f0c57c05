"""Serving the console: its page, and the files that the page loads. None of them holds data, so all are public."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"

#: The paths of the page, and of what it loads.
ROOT = "/"
FILES = "/console/{build}/{name:path}"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}

#: Whatever a message contains, nothing but our own files runs, and nothing leaves for another server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
_SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_ASK_EACH_TIME = "no-cache"
_KEEP = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class File:
    content: bytes
    media_type: str
    etag: str


class ConsoleRoutes:
    """The console of this build: read once, when the API starts."""

    def __init__(self, directory: Path = STATIC) -> None:
        contents = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }
        self.build = _build(contents)
        # The page names the files of its own build: a browser that kept those of another one never mixes the two.
        contents[PAGE] = contents[PAGE].replace(b"{build}", self.build.encode())
        self._files = {name: _file(name, content) for name, content in contents.items()}

    async def page(self, request: Request) -> Response:
        """The page, which a browser asks for again each time."""
        return _answer(request, self._files[PAGE], _ASK_EACH_TIME)

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        # Behind one address, APIs of two builds may answer during a deployment. The page of the other one gets what is
        # here and asks again next time: a page without its program would be worse.
        known = request.path_params["build"] == self.build
        return _answer(request, found, _KEEP if known else _ASK_EACH_TIME)


def _build(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(b"%d:%s:%d:%s" % (len(name.encode()), name.encode(), len(content), content))
    return digest.hexdigest()[:16]


def _file(name: str, content: bytes) -> File:
    return File(content, _TYPES[Path(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _answer(request: Request, file: File, caching: str) -> Response:
    headers = {**_SAFE, "cache-control": caching, "etag": file.etag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)

"""`/`: the console, a page with a playground and figures; its files under `/console/`.

The files are read once and sent from memory. They hold nothing secret, so that they need no key:
the page reads its figures from the API, with the key that the user enters.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from server.errors import RouteNotFoundError, describe
from server.http.openapi import DescribedRoute, failing

FOLDER = Path(__file__).parents[1] / "console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    # Licences of the libraries.
    ".txt": "text/plain; charset=utf-8",
}
_FILE = failing(RouteNotFoundError) | {
    200: {"content": {kind.partition(";")[0]: {} for kind in _TYPES.values()}}
}
_HEADERS = {
    # Nothing from other hosts, nothing inline: the page works on a host without a network, and HTML
    # of a model that got past the sanitiser could neither run nor load anything. Trusted types let
    # the sanitiser alone parse text as HTML.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers ask each time whether a file has changed, and mostly get a 304.
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def console_router() -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)
    files = {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in FOLDER.rglob("*")
        if path.suffix in _TYPES
    }

    @router.head("/", include_in_schema=False)
    @router.get("/", response_class=HTMLResponse)
    async def page(request: Request) -> Response:
        """Return the console: a playground, and figures of the server."""
        return _answer(files["index.html"], request)

    @router.head("/console/{file:path}", include_in_schema=False)
    @router.get("/console/{file:path}", response_class=Response, responses=_FILE)
    async def part(file: str, request: Request) -> Response:
        """Return a file of the console."""
        if file not in files:
            raise RouteNotFoundError(f"The console has no file {describe(file)}.")
        return _answer(files[file], request)

    return router


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, _TYPES[path.suffix], etag)


def _answer(file: _File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)

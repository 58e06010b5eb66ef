"""A stand-in of a model hub's HTTP API on a real socket: listings, files, byte ranges, tokens."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = (".safetensors", ".gguf", ".bin")
_PIECE = 1 << 16


@dataclass
class HubServer:
    """Repositories by name: files by path, by revision. `main` is the default revision."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    token: str | None = None
    """Token that every request needs."""
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None
    """Bytes of a large file after which its next response breaks off, once."""
    hold_after: int | None = None
    """Bytes of a large file after which responses wait for `released`."""
    holding: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)
    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header."""

    def add(self, repo: str, folder: Path, revision: str = "main") -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        content = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        self.repos.setdefault(repo, {})[revision] = content

    def ranges(self, path: str) -> list[str | None]:
        return [r for method, p, r in self.requests if method == "GET" and p.endswith(path)]

    def commit(self, repo: str, revision: str) -> str:
        """Return the commit of a revision, which depends on its content."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(self.repos[repo][revision].items()):
            digest.update(path.encode() + content)
        return digest.hexdigest()

    def revision(self, repo: str, name: str) -> str | None:
        """Return the revision that is named so, or has this commit."""
        revisions = self.repos[repo]
        found = (rev for rev in revisions if name in (rev, self.commit(repo, rev)))
        return next(found, None)

    @contextmanager
    def running(self) -> Iterator["HubServer"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Of", (_HubHandler,), {"hub": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """Return a file as the hub lists it, in the fields of both listings."""
    entry: dict[str, Any] = {"rfilename": path, "path": path, "type": "file", "size": len(content)}
    entry["oid"] = entry["blobId"] = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    if path.endswith(_LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        sizes = {"size": len(content), "pointerSize": 134}
        entry["lfs"] = {"sha256": sha256, "oid": sha256, **sizes}
    return entry


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers["range"]))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None or match[1] not in self.hub.repos or not self._is_allowed():
            self._fail(401 if match and match[1] in self.hub.repos else 404, "RepoNotFound")
        elif match[1] in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif api:
            self._list(api[1], api[2] == "tree", api[3] or "main")
        elif file:
            self._file(file[1], file[2], file[3])

    do_GET = do_HEAD = _answer  # noqa: N815 (names of the base class)

    def _is_allowed(self) -> bool:
        return self.hub.token is None or self.headers["authorization"] == f"Bearer {self.hub.token}"

    def _list(self, repo: str, is_tree: bool, name: str) -> None:
        revision = self.hub.revision(repo, name)
        if revision is None:
            self._fail(404, "RevisionNotFound")
            return
        entries = [_entry(*item) for item in self.hub.repos[repo][revision].items()]
        info = {"id": repo, "sha": self.hub.commit(repo, revision), "siblings": entries}
        self._send(json.dumps(entries if is_tree else info).encode(), {})

    def _file(self, repo: str, name: str, path: str) -> None:
        revision = self.hub.revision(repo, name)
        content = self.hub.repos[repo][revision or ""].get(path) if revision else None
        if revision is None or content is None:
            self._fail(404, "EntryNotFound" if revision else "RevisionNotFound")
            return
        entry = _entry(path, content)
        etag = entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit(repo, revision)}
        self._send(content, headers, is_large="lfs" in entry)

    def _send(self, content: bytes, headers: dict[str, str], is_large: bool = False) -> None:
        start = int((self.headers["range"] or "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            whole = len(content)
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        for offset in range(start, len(content), _PIECE):
            if is_large and self._stops(offset):
                return
            self.wfile.write(content[offset : offset + _PIECE])

    def _stops(self, offset: int) -> bool:
        if self.hub.cut_after is not None and offset >= self.hub.cut_after:
            self.hub.cut_after = None
            self.close_connection = True
            return True
        if self.hub.hold_after is not None and offset >= self.hub.hold_after:
            self.wfile.flush()
            self.hub.holding.set()
            self.hub.released.wait(60)
        return False

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass

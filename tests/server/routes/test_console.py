"""The console's files: sent to anybody, from memory, with nothing from elsewhere in them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from server.routes.console import FOLDER
from tests.server.scripted import ScriptedLauncher, running

FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
LIBRARIES = json.loads((FOLDER / "vendor" / "packages.json").read_text(encoding="utf-8"))


async def test_the_page_is_there_before_the_engine_and_without_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedLauncher(), api_key=["secret"]) as service:
        page = await service.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert {"require-trusted-types-for 'script'", "trusted-types dompurify"} <= set(policy)
        assert not re.search("unsafe|[*]|https?:|data:|blob:", " ".join(policy))
        for name in re.findall(r'(?:href|src)="console/([^"]+)"', page.text):
            assert (await service.client.get(f"/console/{name}")).status_code == 200
        # What it shows is guarded as ever.
        assert (await service.client.get("/v1/server_info")).status_code == 401


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with running(tmp_path, console=False) as service:
        for path in ("/", "/console/main.js"):
            answer = await service.client.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "route_not_found"
        documented = (await service.client.get("/openapi.json")).json()["paths"]
        assert "/metrics" in documented
        assert "/" not in documented


async def test_a_file_that_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        first = await service.client.get("/console/main.js")
        tag = {"if-none-match": first.headers["etag"]}
        again = await service.client.get("/console/main.js", headers=tag)
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/console/none.js",
        "/console/vendor/packages.json",
        "/console/vendor",
        "/console/..%2fapp.py",
        "/console/",
    ],
)
async def test_nothing_else_is_sent(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "route_not_found"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_writes_markup(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://[^\s\"')]+", text))
    assert hosts <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert not re.search(r"\son\w+=|<style|javascript:", text)


def test_libraries_are_the_published_files_with_their_licences() -> None:
    folder = FOLDER / "vendor"
    files = {name: of for library in LIBRARIES for name, of in library["files"].items()}
    assert sorted(files) == sorted(p.name for p in folder.iterdir() if p.suffix != ".json")
    for name, of in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == of["sha256"], name
    for library in LIBRARIES:
        assert re.fullmatch(r"[0-9]+([.][0-9]+){2}", library["version"])
        assert library["integrity"].startswith("sha512-")
        assert any("LICENSE" in name for name in library["files"])

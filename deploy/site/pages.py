"""Hooks of MkDocs: the order of pages, pages from outside docs/, and links as GitHub reads them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Pages outside docs/, which appear below this folder of the site.
ELSEWHERE = "repository"
# The index page says what README does.
_LEFT_OUT = ("README.md",)
# Links of docs/index.md whose pages have a section of the navigation to themselves.
_OWN_SECTIONS = ("dev/decisions/index.md", "runbooks/")
_OUTSIDE = ("*.md", "benchmarks/**/*.md", "examples/*.md")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *```)(\w*)(.*)$")
_SCHEME = re.compile(r"^[a-z]+:")
_HEADING = re.compile(r"^## (.+)$")
_CONTENTS_LINK = re.compile(r"\]\(([\w./-]+?)\)")


def _site_path(path: str) -> str:
    """Return the site's source path of the repository's ``path``."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{ELSEWHERE}/{path}"


def _repository_path(source: str) -> str:
    """Return the repository's path of the site's source path: the reverse of `_site_path`."""
    prefix = f"{ELSEWHERE}/"
    return source.removeprefix(prefix) if source.startswith(prefix) else f"docs/{source}"


def _navigation(index: str) -> list[dict[str, list[str]]]:
    """Return MkDocs' `nav`: a section for each heading of docs/index.md, and for each folder.

    The first column of its tables names the pages.
    """
    sections = {"Start": ["index.md"]}
    section = "Start"
    for line in index.splitlines():
        if heading := _HEADING.match(line):
            section = heading[1]
            sections.setdefault(section, [])
        elif line.startswith("| ["):
            links = _CONTENTS_LINK.findall(line.split("|")[1])
            sections[section] += [_in_site(link) for link in links if link not in _OWN_SECTIONS]
    linked = {page for pages in sections.values() for page in pages}
    outside = [_site_path(path) for path in _outside_pages() if path not in _LEFT_OUT]
    sections["Repository"] = [
        page for page in outside if page not in linked and "/results/" not in page
    ]
    for folder in ("dev/decisions", "runbooks"):
        pages = {f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md")}
        first = f"{folder}/index.md"
        sections[posixpath.basename(folder).capitalize()] = [first, *sorted(pages - {first})]
    return [{name: pages} for name, pages in sections.items()]


def _in_site(link: str) -> str:
    """Return the site's source path of a link in docs/index.md."""
    return _site_path(posixpath.normpath(posixpath.join("docs", link)))


def _outside_pages() -> list[str]:
    """Return the repository's pages outside docs/."""
    found = {path for pattern in _OUTSIDE for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def on_config(config: Any) -> Any:
    """Set `nav` from docs/index.md."""
    config.nav = _navigation((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and a list of the runbooks."""
    for path in _outside_pages():
        files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
    runbooks = sorted(file.name for file in files if file.src_uri.startswith("runbooks/"))
    lines = ["# Runbooks", "", "One page for each alert.", ""]
    lines += [f"* [{name}]({name}.md)" for name in runbooks]
    files.append(File.generated(config, "runbooks/index.md", content="\n".join(lines)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page for the site, and drop what follows the language of a fence."""
    if page.file.src_uri.startswith(f"{ELSEWHERE}/benchmarks/results/"):
        page.meta.setdefault("search", {"exclude": True})
    links = _PageLinks(page.file.src_uri, files, config.repo_url)
    lines, in_fence = [], False
    for line in markdown.splitlines():
        if fence := _FENCE.match(line):
            in_fence = not in_fence
            lines.append(fence[1] + fence[2])
        else:
            lines.append(line if in_fence else _LINK.sub(links.rewrite, line))
    return "\n".join(lines)


class _PageLinks:
    """The links of one page.

    A link to a page leads to it in the site; one to another file leads to the public repository,
    or is replaced by its text if the address is unknown.
    """

    def __init__(self, source: str, files: Files, repository: str | None) -> None:
        self._source = source
        self._folder = posixpath.dirname(_repository_path(source))
        self._files = files
        self._repository = repository

    def rewrite(self, match: re.Match[str]) -> str:
        """Return the Markdown that replaces a link."""
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if _SCHEME.match(target) or not path:
            return match[0]
        found = posixpath.normpath(posixpath.join(self._folder, path))
        for candidate in (found, f"{found}/index.md", f"{found}/README.md"):
            source = _site_path(candidate)
            if self._files.get_file_from_path(source) is not None:
                relative = posixpath.relpath(source, posixpath.dirname(self._source) or ".")
                return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"
        if not (ROOT / found).exists():
            return match[0]
        if not self._repository:
            return str(text)
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        return f"{mark}[{text}]({self._repository.rstrip('/')}/{kind}/HEAD/{found})"

"""Rows of the table of errors in docs/http_api.md: one for each class of `server.errors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.errors import ServerError

ERRORS_BEGIN = "<!-- Written by docs/generate.py from server/errors.py. -->"
ERROR_HEADER = ("Status", "`code`", "`type`", "Meaning")


def error_rows() -> Iterable[tuple[str, ...]]:
    """Yield a row for each error class, by status and in the order of the source."""
    for cls in sorted(_classes(ServerError), key=lambda cls: cls.status):
        meaning = " ".join(str(cls.__doc__).partition("\n\n")[0].split())
        # What follows a name of the code is for its readers.
        short = meaning.partition("; `")[0].rstrip(".")
        yield str(cls.status), f"`{cls.code}`", f"`{cls.error_type}`", short


def between(text: str, begin: str, end: str, written: str) -> str:
    """Return a page with the lines between two marks replaced. Raises `ValueError` without them."""
    before, found, rest = text.partition(f"{begin}\n")
    _, closing, after = rest.partition(end)
    if not (found and closing):
        raise ValueError(f"the page lacks {begin} or {end}")
    return f"{before}{found}{written}\n{closing}{after}"


def _classes(cls: type[ServerError]) -> Iterator[type[ServerError]]:
    """Yield a class and its subclasses that have a code of their own."""
    if "code" in vars(cls) and cls is not ServerError:
        yield cls
    for subclass in cls.__subclasses__():
        yield from _classes(subclass)

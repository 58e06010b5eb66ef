"""Keys of stored pages: what computed a page, and the prefix that ends with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

# Raise it when pages are laid out in another way than before.
_FORM = 1


class PageKeys:
    """Keys of 32 bytes. Pages of other weights, kernels or layouts have other keys."""

    def __init__(self, made_by: Mapping[str, Any]) -> None:
        """``made_by``: everything besides the tokens that changes a page, as JSON values."""
        content = json.dumps({"form": _FORM, **made_by}, sort_keys=True, default=str)
        self._base = blake3(content.encode())

    @property
    def folder_name(self) -> str:
        """Name of the folder of all pages with this origin."""
        return self._base.hexdigest(length=16)

    def key(self, prefix: bytes, window_group: int | None = None) -> bytes:
        """Return the key of the page that ends the prefix with vLLM's hash ``prefix``.

        It is a page of all paged layers, or of one window group.
        """
        group = b"" if window_group is None else b"window %d" % window_group
        return self._base.copy().update(prefix).update(group).digest()

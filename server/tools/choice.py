"""Which tools an answer may or must call, as `tool_choice` says it in each of the APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FORCING = frozenset(("required", "any"))
_NAMING = frozenset(("function", "tool"))
ALLOWED = "allowed_tools"
"""Type of a choice that lists the tools which may be called."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Mode `none`, `auto` or `required`; `names` are the tools to choose from, None for all."""

    mode: str = "auto"
    names: frozenset[str] | None = None

    @classmethod
    def of(cls, value: Any) -> ToolChoice:
        """Return the choice of a request's `tool_choice`, whatever its API.

        A form that is not known is `auto`: the request models refuse it.
        """
        kind = value if isinstance(value, str) else _get(value, "type")
        if kind == "none":
            return cls("none")
        if kind in _FORCING:
            return cls("required")
        if kind in _NAMING:
            name = _get(_get(value, "function"), "name") or _get(value, "name")
            return cls("required", frozenset((name,)) if isinstance(name, str) else None)
        return cls()

    @property
    def forces(self) -> bool:
        """Whether a tool must be called."""
        return self.mode == "required"

    def allows(self, name: object) -> bool:
        """Return whether the tool of this name may be called."""
        return self.mode != "none" and (self.names is None or name in self.names)


def _get(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None

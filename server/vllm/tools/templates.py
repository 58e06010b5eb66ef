"""Chat templates and the tool calls that they show to a model."""

from __future__ import annotations

import re

_NOT_HERMES = ("<arg_key>", "<function=", "<parameter=")
"""What GLM's and Qwen3-Coder's calls have between the same tags."""


def tool_parser_of(template: str) -> str | None:
    """Return the name of the parser for the calls of a chat template; None where it is unclear.

    Hermes' form is JSON with a name and arguments between two tags; others have the tags alone.
    """
    hermes = "<tool_call>" in template and re.search(r"""['"]arguments\\?['"]""", template)
    other = any(mark in template for mark in _NOT_HERMES)
    return "hermes" if hermes and not other else None

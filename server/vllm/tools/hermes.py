"""vLLM's parser of Hermes' calls, which finds a call's arguments wherever they are in it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser

_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_DECODER = json.JSONDecoder()


def exact_hermes(parser: type[ToolParser] | None) -> type[ToolParser] | None:
    """Return the subclass with `HermesArguments` for a parser of Hermes' form; others stay."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    if parser is None or not issubclass(parser, Hermes2ProToolParser):
        return parser
    return type(parser.__name__, (HermesArguments, parser), {})


class HermesArguments:
    """Mixed into vLLM's parser, which takes all up to the last brace for the arguments."""

    @staticmethod
    def _extract_tool_name(tc_json: str) -> str | None:
        start, end = _span(tc_json)
        # Arguments may have a name, too.
        found = _NAME.search(tc_json, 0, start)
        if found is None and end is not None:
            found = _NAME.search(tc_json, end)
        return None if found is None else found[1]

    @staticmethod
    def _extract_tool_args(tc_json: str, is_complete: bool) -> str | None:  # noqa: ARG004 (vLLM's)
        start, end = _span(tc_json)
        return None if start == len(tc_json) else tc_json[start:end]


def _span(call: str) -> tuple[int, int | None]:
    """Return where the arguments of a call begin and end; None if they are not complete."""
    found = _ARGUMENTS.search(call)
    if found is None:
        return len(call), None
    try:
        _, end = _DECODER.raw_decode(call, found.end())
    except ValueError:
        return found.end(), None
    return found.end(), end

"""vLLM's parsers of reasoning, and what is known of their markers besides the two they name."""

from __future__ import annotations

from typing import Any

from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.reasoning import ReasoningParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_v3_reasoning_parser import DeepSeekV3ReasoningParser
from vllm.reasoning.ernie45_reasoning_parser import Ernie45ReasoningParser
from vllm.reasoning.gemma4_engine_reasoning_parser import Gemma4ParserReasoningAdapter
from vllm.reasoning.granite_reasoning_parser import GraniteReasoningParser
from vllm.reasoning.hunyuan_a13b_reasoning_parser import HunyuanA13BReasoningParser
from vllm.reasoning.hy_v4_reasoning_parser import HYV4ReasoningParser
from vllm.reasoning.k2_horizon_reasoning_parser import K2HorizonReasoningParser
from vllm.reasoning.minimax_m2_reasoning_parser import MiniMaxM2AppendThinkReasoningParser
from vllm.reasoning.olmo3_reasoning_parser import Olmo3ReasoningParser
from vllm.reasoning.step3_reasoning_parser import Step3ReasoningParser

_BY_MARKS = (
    BaseThinkingReasoningParser,
    DeepSeekV3ReasoningParser,
    GraniteReasoningParser,
    HunyuanA13BReasoningParser,
    HYV4ReasoningParser,
    MiniMaxM2AppendThinkReasoningParser,
    Olmo3ReasoningParser,
    ParserEngineReasoningAdapter,
    Step3ReasoningParser,
)


_OTHERS = ("Mistral", "Inkling")
"""Engines whose end marker ends other blocks, too, or whose grammars have the reasoning."""


def goes_by_marks(parser: type[ReasoningParser]) -> bool:
    """Return whether a parser's reasoning is what stands between two texts."""
    engine = getattr(parser, "_parser_engine_cls", None)
    other = engine is not None and engine.__name__.startswith(_OTHERS)
    return issubclass(parser, _BY_MARKS) and not other


def own_marks(parser: ReasoningParser) -> dict[str, Any] | None:
    """Return the fields of the markers that a parser has in its code; None for most."""
    if isinstance(parser, GraniteReasoningParser):
        starts, ends = parser.valid_think_starts, parser.valid_response_starts
        return {"starts": tuple(starts), "ends": tuple(ends)}
    if isinstance(parser, HunyuanA13BReasoningParser):
        frame = ("<answer>\n", "\n</answer>")
        return {"starts": ("<think>\n",), "ends": ("\n</think>\n",), "frame": frame}
    if isinstance(parser, Gemma4ParserReasoningAdapter):
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        return {
            "starts": (f"{start}thought\n", start),
            "ends": (end,),
            "calls": call_marks(parser),
        }
    if isinstance(parser, MiniMaxM2AppendThinkReasoningParser):
        return {"starts": ("<think>",), "ends": ("</think>",), "shown": True}
    if isinstance(parser, Ernie45ReasoningParser):
        frame = (parser.response_start_token, parser.response_end_token)
        return {"starts": (parser.start_token,), "ends": (parser.end_token,), "frame": frame}
    return None


def call_marks(parser: ReasoningParser) -> tuple[str, ...]:
    """Return the texts that end reasoning because a tool call begins."""
    if isinstance(parser, K2HorizonReasoningParser):
        return (parser._TOOL_CALLS_START,)
    if not isinstance(parser, ParserEngineReasoningAdapter):
        return ()
    config = parser._parser_engine.parser_engine_config
    found = (
        config.terminals[terminal]
        for (state, terminal), step in config.transitions.items()
        if state is ParserState.REASONING
        and step.next_state is not ParserState.REASONING
        and terminal != "THINK_END"
    )
    return tuple(
        text for value in found for text in ((value,) if isinstance(value, str) else value)
    )

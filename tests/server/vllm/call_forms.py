"""Answers with tool calls in the forms of several of vLLM's parsers, token by token."""

import re
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.tools import NATURAL, Ending
from server.vllm.parser import object_call_parser

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
    "required": ["city"],
}
ARGUMENTS = '{"city": "Ulm", "days": [1, 2]}'
OTHER = '{"city": "Bonn"}'
_TAGGED = (
    f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "ring", "arguments": {OTHER}}}\n</tool_call>'
)
_XML = (
    "<function=look>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
    "</function>"
)
_XML_OTHER = "<function=ring>\n<parameter=city>\nBonn\n</parameter>\n</function>"
_PYTHON = '[look(city="Ulm", days=[1, 2]), ring(city="Bonn")]'
_LIST = f'{{"name": "look", "KEY": {ARGUMENTS}}}, {{"name": "ring", "KEY": {OTHER}}}'
_INVOKED = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Ulm</parameter>\n'
    '<parameter name="days">[1, 2]</parameter>\n</invoke>\n<invoke name="ring">\n'
    '<parameter name="city">Bonn</parameter>\n</invoke>\n</minimax:tool_call>'
)
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.ring:1"
    f"<|tool_call_argument_begin|>{OTHER}<|tool_call_end|><|tool_calls_section_end|>"
)
_DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>ring<｜tool▁sep｜>{OTHER}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_GLM = (
    "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>"
    "\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>ring\n<arg_key>city</arg_key>\n"
    "<arg_value>Bonn</arg_value>\n</tool_call>"
)
_GRANITE = "".join(
    f'<function_call> {{"name": "{name}", "arguments": {text}}}'
    for name, text in (("look", ARGUMENTS), ("ring", OTHER))
)


@dataclass(frozen=True)
class Form:
    """An answer in the form of a parser, with a text before its two calls."""

    parser: str
    text: str
    reasoning: str | None = None
    choice: str = "auto"
    said: str | None = None
    thought: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.parser, self.reasoning, self.choice)))


def _form(parser: str, calls: str, said: str | None = "I look.", **more: Any) -> Form:
    return Form(parser, f"{said or ''}{calls}", said=said, **more)


def _thinking(parser: str, reasoning: str, calls: str) -> Form:
    text = f"<think>A city, Ulm.</think>\n\nI look.\n{calls}"
    return Form(parser, text, reasoning, said="\n\nI look.", thought="A city, Ulm.")


HERMES = _form("hermes", f"\n{_TAGGED}")
CODER = _form(
    "qwen3_coder", f"\n<tool_call>\n{_XML}\n</tool_call>\n<tool_call>\n{_XML_OTHER}\n</tool_call>"
)
FORMS = (
    HERMES,
    _form("hermes", _TAGGED, None, choice="required"),
    CODER,
    _form("glm45", _GLM),
    _form("kimi_k2", _KIMI),
    _form("minimax_m2", f"\n{_INVOKED}"),
    _form(
        "seed_oss",
        f"<seed:tool_call>\n{_XML}\n</seed:tool_call>\n"
        f"<seed:tool_call>\n{_XML_OTHER}\n</seed:tool_call>",
    ),
    _form("mistral", f"[TOOL_CALLS][{_LIST.replace('KEY', 'arguments')}]"),
    _form("deepseek_v31", _DEEPSEEK),
    _form("granite-20b-fc", _GRANITE, None),
    _form("pythonic", _PYTHON, None),
    _form("lfm2", f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>", None),
    _form("pythonic", f"[{_LIST.replace('KEY', 'parameters')}]", None, choice="required"),
    _thinking("hermes", "deepseek_r1", _TAGGED),
    _thinking("hermes", "qwen3", _TAGGED),
    _thinking("qwen3_coder", "qwen3", CODER.text.removeprefix("I look.\n")),
)
_MARKS = re.compile(r"<\|?[^\s>=|]+\|?>|\[TOOL_CALLS\]")


def request(choice: Any = "auto", **more: Any) -> ChatCompletionRequest:
    functions = [{"name": name, "parameters": LOOK} for name in ("look", "ring")]
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": one} for one in functions],
        tool_choice=choice,
        **more,
    )


class Reader:
    """Parses prefixes of one form's answer, as streams and whole."""

    def __init__(self, form: Form) -> None:
        self.tokenizer = _tokenizer(form.text)
        self.ids: list[int] = self.tokenizer.encode(form.text, add_special_tokens=False)
        self.texts = [self.tokenizer.decode([one]) for one in self.ids]
        assert "".join(self.texts) == form.text
        self.request = request(form.choice)
        self._parser = object_call_parser(
            ParserManager.get_parser(form.parser, form.reasoning, enable_auto_tools=True)
        )

    def parser(self) -> Any:
        assert self._parser is not None
        return self._parser(self.tokenizer, self.request.tools)

    def streamed(self, end: int, ending: Ending = NATURAL, size: int = 1) -> Any:
        """Return the parts of the first `end` tokens, `size` of them in a piece."""
        parser = self.parser()
        parser.ending = ending
        for at in range(0, end, size):
            to = min(at + size, end)
            text, ids = "".join(self.texts[at:to]), self.ids[at:to]
            parser.parse_delta(text, ids, self.request, [1], finished=to == end)
        return _plain(parser.streamed.parts())

    def whole(self, end: int, ending: Ending = NATURAL) -> Any:
        """Return the parts of the first `end` tokens as a whole answer."""
        parser, text = self.parser(), "".join(self.texts[:end])
        output = SimpleNamespace(
            text=text,
            token_ids=self.ids[:end],
            finish_reason=ending.reason,
            stop_reason=ending.matched,
        )
        parser.read_whole(output, self.request, [1], auto_tools=True)
        return _plain(parser.parse(text, self.request, True, self.ids[:end]))


@cache
def reader(form: Form) -> Reader:
    return Reader(form)


def _tokenizer(text: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    # Marks are one token each, as in the models that have them.
    tokenizer.add_tokens(sorted({*_MARKS.findall(text), "<tool_call>", "</tool_call>"}))
    return tokenizer


def _plain(parts: Any) -> Any:
    reasoning, content, calls = parts
    return reasoning, content, [(call.name, call.arguments) for call in calls or ()]

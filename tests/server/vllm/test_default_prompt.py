"""The default tool prompt: which chat templates get it, and what conversations become by it."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from default_model.paths import CHECKPOINT
from server.settings import ServerSettings
from server.vllm.tools import choose_tools, with_tool_prompt

pytestmark = pytest.mark.engine

TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)
OWN = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's, to the letter."""
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] | trim }}\n{% endfor %}"
)
"""As Gemma's: no system message, and turns that alternate."""
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message['content'] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
"""Takes contents as lists of parts."""
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ülm"}}\n</tool_call>'
RESULT = "<tool_response>\n21 C\n</tool_response>"
USER = {"role": "user", "content": "Weather?"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}


TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [call({"city": "Ülm"})] * 2},
    {"role": "tool", "tool_call_id": "c", "content": "21 C"},
    {"role": "tool", "tool_call_id": "c", "content": "21 C"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Well.", "tool_calls": [call('{"city": "Ülm"}')]},
    {"role": "tool", "tool_call_id": "c", "content": "21 C"},
]


def render(template: str, turns: Any, tools: Any = None) -> str:
    return str(
        TOKENIZER.apply_chat_template(
            turns, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    )


def test_tools_calls_and_results_are_text_of_the_turns() -> None:
    text = render(with_tool_prompt(SMOLLM2, system=True, parts=False), TURNS, [LOOK])
    system, first, called, results, more, last, end = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look", ' in system
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}' in system
    assert "SmolLM" not in system
    assert first == "user\nWeather?<|im_end|>\n"
    assert called == f"assistant\n{CALL}\n{CALL}<|im_end|>\n"
    assert results == f"user\n{RESULT}\n{RESULT}\n\nAnd?<|im_end|>\n"
    assert more == f"assistant\nWell.\n{CALL}<|im_end|>\n"
    assert last == f"user\n{RESULT}<|im_end|>\n"
    assert end == "assistant\n"


def test_a_system_message_comes_before_the_tools() -> None:
    template = with_tool_prompt(SMOLLM2, system=True, parts=False)
    text = render(template, [{"role": "system", "content": "Be kind."}, USER], [LOOK])
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert text.count("# Tools") == text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("turns", [[USER], [{"role": "system", "content": "Be kind."}, USER]])
def test_conversations_without_tools_stay_as_they_are(turns: Any) -> None:
    assert render(with_tool_prompt(SMOLLM2, system=True, parts=False), turns) == render(
        SMOLLM2, turns
    )


def test_calls_of_the_past_are_shown_without_tools_too() -> None:
    text = render(with_tool_prompt(SMOLLM2, system=True, parts=False), TURNS)
    assert "# Tools" not in text
    assert text.count(CALL) == text.count(RESULT) == 3


def test_templates_without_a_system_message_have_the_tools_with_the_user() -> None:
    text = render(with_tool_prompt(ALTERNATING, system=False, parts=False), TURNS, [LOOK])
    assert text.startswith("[user]# Tools\n")
    assert "</tool_call>\n\nWeather?\n[assistant]" in text
    assert text.count(CALL) == text.count(RESULT) == 3


def test_contents_may_be_lists_of_parts() -> None:
    turns = [
        turn | {"content": [{"type": "text", "text": turn["content"]}] if turn["content"] else None}
        for turn in TURNS
    ]
    text = render(with_tool_prompt(PARTS, system=True, parts=True), turns, [LOOK])
    assert text.startswith("[system]# Tools\n")
    assert f"[assistant]{CALL}\n{CALL}[user]{RESULT}\n{RESULT}\n\nAnd?[assistant]" in text
    assert text.count(CALL) == text.count(RESULT) == 3


def settle(
    template: str, parser: str | None = None, model_type: str = "llama", **settings: Any
) -> tuple[Any, Namespace]:
    args = Namespace(
        chat_template=template,
        chat_template_content_format="auto",
        default_chat_template_kwargs=None,
        tool_call_parser=parser,
        enable_auto_tool_choice=parser is not None,
    )
    model: Any = SimpleNamespace(
        revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type=model_type),
    )
    return choose_tools(args, TOKENIZER, model, ServerSettings(**settings)), args


@pytest.mark.parametrize("template", [OWN, SMOLLM2])
def test_gpt_oss_gets_the_parser_of_harmony(template: str) -> None:
    from vllm.parser.harmony import GptOssToolParser
    from vllm.tool_parsers import ToolParserManager

    support, args = settle(template, model_type="gpt_oss")
    assert (support.prompt, args.chat_template) == ("template", template)
    assert ToolParserManager.get_tool_parser(args.tool_call_parser) is GptOssToolParser


def test_a_template_that_shows_tools_is_left_alone() -> None:
    support, args = settle(OWN)
    assert (support.prompt, support.parser) == ("template", "hermes")
    assert args.chat_template == OWN
    assert args.enable_auto_tool_choice
    other = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    support, args = settle(other)
    assert (support.prompt, support.parser, args.chat_template) == ("template", None, other)


@pytest.mark.parametrize(
    ("template", "form", "first"),
    [
        (SMOLLM2, "string", "<|im_start|>system\n# Tools"),
        (ALTERNATING, "string", "[user]# Tools"),
        (PARTS, "openai", "[system]# Tools"),
    ],
)
def test_a_template_without_tools_gets_the_default_prompt(
    template: str, form: str, first: str
) -> None:
    support, args = settle(template)
    assert (support.prompt, support.parser) == ("default", "hermes")
    assert args.enable_auto_tool_choice
    assert args.chat_template_content_format == form
    content: Any = [{"type": "text", "text": "Hi"}] if form == "openai" else "Hi"
    turns = [{"role": "user", "content": content}]
    assert render(args.chat_template, turns, [LOOK]).startswith(first)
    # It shows tools itself now.
    assert settle(args.chat_template)[0].prompt == "template"


def test_tools_are_refused_where_the_default_prompt_may_not_be() -> None:
    for template, parser, settings in (
        (SMOLLM2, None, {"default_tool_prompt": False}),
        (SMOLLM2, "llama3_json", {}),
    ):
        support, args = settle(template, parser, **settings)
        assert support.prompt == "none"
        assert args.chat_template == template
        assert args.tool_call_parser == parser
    assert "--tool-call-parser hermes, not llama3_json" in support.reason


def test_a_template_that_cannot_be_rendered_is_left_alone() -> None:
    support, args = settle("{{ raise_exception('never') }}")
    assert support.prompt == "template"
    assert args.chat_template == "{{ raise_exception('never') }}"

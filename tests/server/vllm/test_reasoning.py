"""Reasoning and answer, read alike from whole answers and streams, for each of vLLM's parsers."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.vllm.parser import object_call_parser

pytestmark = pytest.mark.engine

THINK, SEED, MM, IFM, GEMMA, GRANITE, HUNYUAN = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<ifm|think>", "</ifm|think>"),
    ("<|channel>thought\n", "<channel|>"),
    ("Here is my thought process:", "Here's my response:"),
    ("<think>\n", "\n</think>\n"),
)
MARKS = {
    **dict.fromkeys(
        (
            *"deepseek_r1 deepseek_v4 deepseek_v41 ernie45 glm45 glm47 holo2".split(),
            *"hy_v4 kimi_k2 ling3 mimo minimax_m2 nemotron_v3 olmo3 qwen3".split(),
            "step3",
            "step3p5",
        ),
        THINK,
    ),
    "seed_oss": SEED,
    "minimax_m3": MM,
    "k2_horizon": IFM,
    "gemma4": GEMMA,
    "granite": GRANITE,
    "hunyuan_a13b": HUNYUAN,
}
STARTS_ITSELF = ("minimax_m3", "gemma4", "granite", "hunyuan_a13b")
"""Parsers whose models answer without reasoning unless they write its marker."""
ADDED = [
    *THINK,
    *SEED,
    *MM,
    *IFM,
    "<|channel>",
    "<channel|>",
    "<response>",
    "</response>",
    "<ifm|think_fast>",
    "</ifm|think_fast>",
]
TURN = "<|im_start|>assistant\n"
OPEN, OFF, GO_ON = {}, {"enable_thinking": False}, {"continue_final_message": True}


PARTS = ("Ġ</", "</", "think", ">")
"""Tokens of which olmo3's markers consist."""


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(CHECKPOINT)
    made.add_tokens(ADDED)
    vocabulary = made.get_vocab()
    for number, part in enumerate(PARTS):
        vocabulary.setdefault(part, number)
    made.get_vocab = lambda: vocabulary
    return made


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def request(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **more)


def parser_of(name: str, kwargs: dict[str, Any]) -> Any:
    plain = ParserManager.get_parser(reasoning_parser_name=name)
    made = object_call_parser(plain)
    assert made is not None
    return made(tokenizer(), None, chat_template_kwargs=dict(kwargs))


def whole(
    name: str, prompt: str, text: str, kwargs: dict[str, Any], asked: Any = None
) -> tuple[str, str, int]:
    """Return reasoning, answer and the number of reasoning tokens of a whole answer."""
    parser, asked, ids = parser_of(name, kwargs), asked or request(), ids_of(text)
    output = SimpleNamespace(text=text, token_ids=ids, finish_reason="stop", stop_reason=None)
    parser.read_whole(output, asked, ids_of(prompt), auto_tools=False)
    reasoning, content, _ = parser.parse(text, asked, False, ids)
    return reasoning or "", content or "", parser.count_reasoning_tokens(ids)


def streamed(
    name: str,
    prompt: str,
    text: str,
    kwargs: dict[str, Any],
    size: int = 1,
    asked: Any = None,
    late: int = 0,
) -> tuple[str, str, int]:
    """The same of a stream, whose pieces have some tokens, and some characters later their text."""
    parser, asked, ids = parser_of(name, kwargs), asked or request(), ids_of(text)
    reasoning = content = ""
    sent = 0
    for at in range(0, len(ids), size):
        last = at + size >= len(ids)
        known = len(tokenizer().decode(ids[: at + size])) - late
        piece = text[sent:] if last else text[sent : max(known, sent)]
        sent += len(piece)
        delta = parser.parse_delta(piece, ids[at : at + size], asked, ids_of(prompt), finished=last)
        if delta is not None:
            reasoning += delta.reasoning or ""
            content += delta.content or ""
    return reasoning, content, parser.count_reasoning_tokens(ids)


def opened(name: str) -> str:
    """The prompt's end where the template begins the reasoning."""
    return TURN if name in ("granite", "gemma4") else f"{TURN}{MARKS[name][0].rstrip()}\n"


def closed(name: str) -> str:
    start, end = MARKS[name]
    return TURN if name == "granite" else f"{TURN}{start.strip()}\n\n{end.strip()}\n\n"


def everywhere(name: str, prompt: str, text: str, kwargs: dict[str, Any]) -> tuple[str, str, int]:
    """Return what a whole answer and its streams are read as, which is the same."""
    found = whole(name, prompt, text, kwargs)
    for size, late in ((1, 0), (3, 9), (1000, 0)):
        assert streamed(name, prompt, text, kwargs, size, late=late) == found, (size, late)
    return found


def tokens(text: str) -> int:
    return len(ids_of(text))


SAID = "We think.", "Paris is it."
"""Reasoning and an answer."""


def written(name: str, thought: str = SAID[0], answer: str = SAID[1]) -> str:
    """An answer with its reasoning; it begins where the prompt has not begun it."""
    start, end = MARKS[name]
    return f"{start if name in ('granite', 'gemma4') else ''}{thought}{end}{answer}"


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_that_the_prompt_began(name: str) -> None:
    thought, answer, count = everywhere(name, opened(name), written(name), OPEN)
    assert (thought, answer) == SAID
    assert count == tokens(SAID[0])
    # Its marker once more is no text of it.
    start = MARKS[name][0]
    again = start + written(name).removeprefix(start)
    assert everywhere(name, opened(name), again, OPEN)[:2] == SAID


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_that_the_answer_begins(name: str) -> None:
    start, end = MARKS[name]
    text = f"{start}{SAID[0]}{end}{SAID[1]}"
    thought, answer, count = everywhere(name, TURN, text, OPEN)
    assert (thought, answer, count) == (*SAID, tokens(SAID[0]))


@pytest.mark.parametrize("name", MARKS)
def test_markers_in_a_conversation_are_none_of_the_answers(name: str) -> None:
    start, end = MARKS[name]
    for said in (end, start, f"{start}a{end}b", f"{end} {start}"):
        before = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\nb {said}<|im_end|>\n"
        assert everywhere(name, before + opened(name), written(name), OPEN)[:2] == SAID
        assert everywhere(name, before + closed(name), SAID[1], OFF) == ("", SAID[1], 0)
        assert everywhere(name, f"{before}{TURN}It is ", SAID[1], GO_ON) == ("", SAID[1], 0)


@pytest.mark.parametrize("name", MARKS)
def test_markers_in_an_answer_are_text(name: str) -> None:
    start, end = (mark.strip() for mark in MARKS[name])
    for answer in (f"a {start} b", f"a {end} b", f"a {start} b {end} c {end}{start}"):
        found = everywhere(name, opened(name), written(name, answer=answer), OPEN)
        assert found == (SAID[0], answer, tokens(SAID[0]))
        assert everywhere(name, closed(name), answer, OFF) == ("", answer, 0)
        assert everywhere(name, f"{TURN}It is ", answer, GO_ON) == ("", answer, 0)


@pytest.mark.parametrize("name", MARKS)
def test_the_first_marker_in_reasoning_is_text(name: str) -> None:
    thought = f"r {MARKS[name][0].strip()} r"
    found = everywhere(name, opened(name), written(name, thought), OPEN)
    assert found == (thought, SAID[1], tokens(thought))


@pytest.mark.parametrize("name", MARKS)
def test_an_answer_that_is_continued_is_one(name: str) -> None:
    start, end = MARKS[name]
    for begun in ("It is ", f"{start}r{end}It is ", f"The tag {start} is ", f"a {end} "):
        assert everywhere(name, TURN + begun, SAID[1], GO_ON) == ("", SAID[1], 0), begun
    # Reasoning that is continued is reasoning still.
    thought, answer, _ = everywhere(name, f"{TURN}{start}We ", f"think.{end}Paris", GO_ON)
    assert (thought, answer) == ("think.", "Paris")


@pytest.mark.parametrize("name", MARKS)
def test_no_reasoning_without_a_marker_where_thinking_is_off(name: str) -> None:
    for prompt in (closed(name), TURN):
        assert everywhere(name, prompt, SAID[1], OFF) == ("", SAID[1], 0)


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_that_never_ends(name: str) -> None:
    start, end = MARKS[name]
    text = f"{start}{SAID[0]}{end[:3]}" if name in STARTS_ITSELF else f"{SAID[0]}{end[:3]}"
    thought, answer, _ = everywhere(name, opened(name), text, OPEN)
    assert (thought, answer) == (SAID[0] + end[:3].rstrip(), "")
    output = SimpleNamespace(text=text, token_ids=ids_of(text))
    parser = parser_of(name, OPEN)
    assert parser.is_thinking_behind(output, request(), ids_of(opened(name)))
    ended = SimpleNamespace(text=written(name), token_ids=ids_of(written(name)))
    assert not parser.is_thinking_behind(ended, request(), ids_of(opened(name)))


@pytest.mark.parametrize("name", MARKS)
def test_a_stop_string_that_is_the_marker_garbles_nothing(name: str) -> None:
    text = written(name, answer="")
    cut = text.removesuffix(MARKS[name][1])
    parser, ids = parser_of(name, OPEN), ids_of(text)
    reasoning = ""
    for at, token in enumerate(ids):
        # The text stays behind the tokens by the length of the stop string.
        known = max(len(tokenizer().decode(ids[: at + 1])) - len(MARKS[name][1]), 0)
        before = max(len(tokenizer().decode(ids[:at])) - len(MARKS[name][1]), 0)
        last = at == len(ids) - 1
        piece = cut[before:] if last else cut[before:known]
        delta = parser.parse_delta(piece, [token], request(), ids_of(opened(name)), finished=last)
        assert delta is None or not delta.content
        reasoning += (delta.reasoning or "") if delta is not None else ""
    assert reasoning == SAID[0]
    assert parser.count_reasoning_tokens(ids) == tokens(SAID[0])


@pytest.mark.parametrize("name", MARKS)
def test_hidden_reasoning_leaves_the_answer(name: str) -> None:
    asked = request(include_reasoning=False)
    assert streamed(name, opened(name), written(name), OPEN, asked=asked)[:2] == ("", SAID[1])
    assert whole(name, opened(name), written(name), OPEN, asked)[1] == SAID[1]


@pytest.mark.parametrize("name", MARKS)
def test_a_constraint_binds_behind_the_reasoning(name: str) -> None:
    parser = parser_of(name, OPEN).reasoning_parser
    prompt = ids_of(f"<|im_start|>user\n{MARKS[name][1]}<|im_end|>\n{opened(name)}")
    assert parser.is_reasoning_end(prompt) is (name in ("granite", "gemma4"))
    answer = ids_of(written(name))
    ends = [
        at
        for at in range(1, len(answer) + 1)
        if parser.is_reasoning_end_streaming([*prompt, *answer[:at]], answer[at - 1 : at])
    ]
    assert len(ends) == 1
    assert tokenizer().decode(answer[: ends[0]]).endswith(MARKS[name][1])
    assert parser_of(name, GO_ON).reasoning_parser.is_reasoning_end(ids_of(f"{TURN}It is "))
    assert parser_of(name, OFF).reasoning_parser.is_reasoning_end(ids_of(closed(name)))
    assert parser_of(name, OFF).reasoning_parser.is_reasoning_end(ids_of(TURN))


def test_a_constraint_waits_for_reasoning_that_the_model_begins_itself() -> None:
    for kwargs, at_once in ((OPEN, True), ({"enable_thinking": True}, False)):
        parser = parser_of("gemma4", kwargs)
        assert parser.is_reasoning_end(ids_of(TURN)) is at_once
        assert parser.is_reasoning_end(ids_of(closed("gemma4")))
        assert whole("gemma4", TURN, "Paris", kwargs) == ("", "Paris", 0)


@pytest.mark.parametrize("skips", [True, False])
def test_markers_that_are_special_tokens_are_seen_in_the_tokens(skips: bool) -> None:
    special = AutoTokenizer.from_pretrained(CHECKPOINT)
    special.add_tokens(list(THINK), special_tokens=True)
    made = object_call_parser(ParserManager.get_parser(reasoning_parser_name="qwen3"))
    assert made is not None
    asked = request(skip_special_tokens=skips)
    ids = special.encode(f"<think>{SAID[0]}</think>{SAID[1]}", add_special_tokens=False)
    prompt = special.encode(TURN, add_special_tokens=False)
    pieces = [special.decode([one], skip_special_tokens=skips) for one in ids]
    for late in (0, 1, 3):
        parser = made(special, None, chat_template_kwargs={})
        reasoning = content = ""
        for at, token in enumerate(ids):
            text = pieces[at - late] if at >= late else ""
            if last := at == len(ids) - 1:
                text = "".join(pieces[max(at - late, 0) :])
            delta = parser.parse_delta(text, [token], asked, prompt, finished=last)
            reasoning += (delta.reasoning or "") if delta is not None else ""
            content += (delta.content or "") if delta is not None else ""
        assert (reasoning, content) == SAID
        text = "".join(pieces)
        output = SimpleNamespace(text=text, token_ids=ids, finish_reason="stop", stop_reason=None)
        parser = made(special, None, chat_template_kwargs={})
        parser.read_whole(output, asked, prompt, auto_tools=False)
        assert parser.parse(text, asked, False, ids)[:2] == SAID


def test_frames_of_an_answer_are_no_part_of_it() -> None:
    text = "r\n</think>\n\n<response>\nParis\n</response>\n"
    assert everywhere("ernie45", opened("ernie45"), text, OPEN)[:2] == ("r\n", "\nParis\n")
    text = "<think>\nr\n</think>\n<answer>\nParis\n</answer>"
    assert everywhere("hunyuan_a13b", TURN, text, OPEN)[:2] == ("r", "Paris")
    for answer in ("a <response> b", "a </response> b </response> c"):
        assert everywhere("ernie45", closed("ernie45"), answer, OFF)[:2] == ("", answer)


def test_the_end_of_reasoning_is_trimmed_as_the_parser_does() -> None:
    for name, kept in {"qwen3": "r \n\n", "glm45": "r", "step3p5": "r \n"}.items():
        assert everywhere(name, opened(name), "r \n\n</think>a", OPEN)[:2] == (kept, "a")


def test_a_call_ends_reasoning_and_stays() -> None:
    for name in ("qwen3", "glm45"):
        found = everywhere(name, opened(name), "r<tool_call>{}", OPEN)[:2]
        assert found == ("r", "<tool_call>{}")


def test_a_parser_that_shows_reasoning_writes_the_marker_of_the_prompt() -> None:
    name = "minimax_m2_append_think"
    assert everywhere(name, f"{TURN}<think>\n", "r</think>a", OPEN) == ("", "<think>r</think>a", 0)
    assert everywhere(name, f"{TURN}<think>\n\n</think>\n", "a", OFF) == ("", "a", 0)


def test_a_parser_that_takes_all_for_the_answer() -> None:
    for name in ("deepseek_v3", "hy_v3"):
        assert everywhere(name, TURN, SAID[1], OPEN) == ("", SAID[1], 0)
        assert parser_of(name, OPEN).reasoning_parser.is_reasoning_end(ids_of(TURN))


def test_an_answer_that_may_not_be_empty() -> None:
    forced = {"force_nonempty_content": True}
    asked = request(chat_template_kwargs=forced)
    for text, answer in (("r", "r"), ("r</think>", "r"), ("r</think>a", "a")):
        assert whole("nemotron_v3", f"{TURN}<think>\n", text, forced, asked)[:2] == ("r", answer)
        found = streamed("nemotron_v3", f"{TURN}<think>\n", text, forced, asked=asked)
        assert found[:2] == ("r", answer)

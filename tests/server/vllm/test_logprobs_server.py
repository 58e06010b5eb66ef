"""Log-probabilities, echoed and cut prompts of a real server, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from default_model.paths import CHECKPOINT
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONTEXT = 512
TEXT = "漢é日 <b> ok😀x"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
END = 3
"""`<|im_end|>`, a special token."""
BYTES = list(range(4, 260))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--max-model-len", str(CONTEXT), "--dtype", "bfloat16")
    with RealServer(CHECKPOINT, tmp_path_factory.mktemp("l"), *flags) as up:
        up.until_ready()
        yield up


def whole(server: RealServer, path: str, **body: Any) -> Any:
    answer = server.client.post(path, json={"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: RealServer, path: str, **body: Any) -> list[Any]:
    body = {"model": "tiny", "temperature": 0, "stream": True, **body}
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def say(text: str) -> dict[str, str]:
    return {"grammar": "root ::= " + json.dumps(text, ensure_ascii=False)}


def joined(entries: list[Any]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def chat_entries(server: RealServer, **body: Any) -> tuple[str, list[Any], int]:
    """Return the text, the entries and the number of tokens of a chat; its stream has the same."""
    body = {"messages": [{"role": "user", "content": "Say"}], "logprobs": True, **body}
    answer = whole(server, CHAT, **body)
    choice = answer["choices"][0]
    text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    chunks = [one for event in events(server, CHAT, **body) for one in event["choices"]]
    chunks = [chunk for chunk in chunks if chunk["index"] == 0]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text
    streamed = [one for c in chunks if c["logprobs"] for one in c["logprobs"]["content"]]
    assert streamed == entries
    return text, entries, answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"top_logprobs": 2}, 1),
        ({"tools": CHAT_TOOLS, "top_logprobs": 1}, 1),
        ({"include_stop_str_in_output": True}, 1),
        ({"skip_special_tokens": False}, 1),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, 0),
        ({"stop": ["x"], "include_stop_str_in_output": True}, 0),
        ({"max_tokens": 3}, 0),
        ({"return_tokens_as_token_ids": True, "top_logprobs": 1}, 1),
        ({"use_beam_search": True, "n": 2, "max_tokens": 20}, None),
    ],
    ids=str,
)
def test_bytes_of_a_chat_are_its_text(
    server: RealServer, fields: dict[str, Any], missing: int | None
) -> None:
    if "use_beam_search" in fields:
        body = {"messages": [{"role": "user", "content": "漢字 😀"}], "logprobs": True, **fields}
        choices = whole(server, CHAT, **body)["choices"]
        pairs = [(one["message"]["content"], one["logprobs"]["content"]) for one in choices]
    else:
        text, entries, tokens = chat_entries(server, structured_outputs=say(TEXT), **fields)
        pairs = [(text, entries)]
        # Of the tokens that are billed, the one that ends an answer has no entry.
        assert missing is None or len(entries) == tokens - missing
    for text, entries in pairs:
        assert joined(entries).decode() == text
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                assert one["token"]
                assert one["bytes"]
                if not one["token"].startswith(("\\x", "token_id:")):
                    assert bytes(one["bytes"]).decode() == one["token"]


@pytest.mark.parametrize("stop", ["日", "é日 <"])
def test_a_stop_strings_tokens_have_entries(server: RealServer, stop: str) -> None:
    text, entries, tokens = chat_entries(server, structured_outputs=say(TEXT), stop=[stop])
    assert text == TEXT.partition(stop)[0]
    assert len(entries) == tokens
    assert joined(entries).startswith(text.encode())


@pytest.mark.parametrize("seed", range(12))
def test_bytes_that_are_no_characters(server: RealServer, seed: int) -> None:
    fields = {"allowed_token_ids": BYTES, "temperature": 1, "seed": seed, "max_tokens": 12}
    text, entries, _ = chat_entries(server, top_logprobs=3, **fields)
    assert joined(entries).decode(errors="replace").removesuffix("\ufffd") == text.removesuffix(
        "\ufffd"
    )
    assert all(one["token"] for entry in entries for one in (entry, *entry["top_logprobs"]))


def test_a_hidden_special_token_adds_no_bytes(server: RealServer) -> None:
    fields = {"allowed_token_ids": [END, *BYTES[60:90]], "ignore_eos": True, "max_tokens": 12}
    fields |= {"logit_bias": {str(END): 2}, "temperature": 1, "seed": 1}
    text, entries, tokens = chat_entries(server, **fields)
    assert len(entries) == tokens
    assert "<|im_end|>" in [entry["token"] for entry in entries]
    assert joined(entries).decode() == text


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", **FUNCTION}]}])
def test_bytes_of_a_response_are_its_text(server: RealServer, tools: dict[str, Any]) -> None:
    fields = {"input": "Say", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    fields |= {"structured_outputs": say(TEXT), **tools}
    part = whole(server, RESPONSES, **fields)["output"][0]["content"][0]
    assert (part["text"], joined(part["logprobs"]).decode()) == (TEXT, TEXT)
    found = events(server, RESPONSES, **fields)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]


PROMPT_IDS = [1, 2, END, 539, 226, 4]
ECHOES: list[dict[str, Any]] = [
    {"prompt": "Hello, I'm a"},
    {"prompt": "Hello, I'm a", "add_special_tokens": False},
    {"prompt": "Hello, I'm a", "n": 2, "temperature": 1, "seed": 1},
    {"prompt": ["漢字 <|im_end|> 😀!", "b", " \n c"]},
    {"prompt": "<|startoftext|><|im_end|>"},
    {"prompt": PROMPT_IDS},
    {"prompt": [PROMPT_IDS, [539]]},
    {"prompt": "one two 漢字 three", "truncate_prompt_tokens": 5},
    {"prompt": "one two 漢字 three", "truncate_prompt_tokens": 5, "truncation_side": "left"},
    {"prompt": PROMPT_IDS, "truncate_prompt_tokens": 3, "truncation_side": "left"},
    {"prompt": "a", "allowed_token_ids": [END, *BYTES], "ignore_eos": True, "seed": 3},
    {"prompt": "a", "allowed_token_ids": [68, 249], "bad_words": ["aa"], "ignore_eos": True},
    {"prompt": "a", "stop": ["!"], "structured_outputs": say("b 漢!")},
    {"prompt": "a", "skip_special_tokens": False, "ignore_eos": True, "allowed_token_ids": [END]},
]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("fields", ECHOES, ids=str)
def test_offsets_count_the_characters_before(
    server: RealServer, fields: dict[str, Any], echo: bool
) -> None:
    fields = {"max_tokens": 6, "logprobs": 1, "echo": echo, "return_token_ids": True, **fields}
    answer = whole(server, COMPLETION, **fields)
    echoed = prompt = billed = 0
    for choice in answer["choices"]:
        text, found = choice["text"], choice["logprobs"]
        starts = found["text_offset"]
        assert starts == sorted(starts)
        assert starts[:1] in ([], [0])
        for token, (begin, end) in zip(
            found["tokens"], pairwise([*starts, len(text)]), strict=True
        ):
            # A part of a character has the text that it completes, a hidden token none.
            assert (
                token == text[begin:end]
                or (token.startswith("<|") and begin == end)
                or "\\x" in token
                or begin >= len(text)
            ), (token, begin, end)
        echoed = len(choice["prompt_token_ids"]) if echo else 0
        ended = choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        assert len(starts) == echoed + len(choice["token_ids"]) - ended
        if choice["index"] % fields.get("n", 1) == 0:
            prompt += len(choice["prompt_token_ids"])
        billed += len(choice["token_ids"])
    assert (prompt, billed) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )
    streamed: dict[int, dict[str, Any]] = {}
    for event in events(server, COMPLETION, **fields):
        for choice in event["choices"]:
            one = streamed.setdefault(choice["index"], {"text": "", "token_ids": []})
            one["text"] += choice["text"]
            one["token_ids"] += choice["token_ids"]
            for name, values in choice["logprobs"].items():
                one[name] = one.get(name, []) + values
    for choice in answer["choices"]:
        same = {name: choice[name] for name in ("text", "token_ids")} | choice["logprobs"]
        assert streamed[choice["index"]] == same


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "Say hi"}, "Say hi"),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2}, None),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2, "truncation_side": "left"}, None),
        ({"prompt": [539, 540, 541], "truncate_prompt_tokens": 2}, None),
        ({"prompt": [END, 539]}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("ids", [True, False])
def test_the_echoed_prompt_is_what_the_model_reads(
    server: RealServer, fields: dict[str, Any], text: str | None, most: int, ids: bool
) -> None:
    shown = {**fields, "echo": True, "max_tokens": most, "return_token_ids": True}
    read = whole(server, COMPLETION, **shown)["choices"][0]["prompt_token_ids"]
    kept = [token for token in read if token != 1]
    if text is None:
        text = server.client.post("/detokenize", json={"model": "tiny", "tokens": kept}).json()[
            "prompt"
        ]
    fields = {**fields, "max_tokens": most, "return_token_ids": ids}
    rest = "" if not most else whole(server, COMPLETION, **fields)["choices"][0]["text"]
    answer = whole(server, COMPLETION, **fields, echo=True)
    choice = answer["choices"][0]
    assert choice["text"] == text + rest
    assert choice["token_ids"] == ([] if not most else choice["token_ids"]) if ids else True
    assert answer["usage"]["completion_tokens"] == most
    assert answer["usage"]["prompt_tokens"] == len(read)
    streamed = events(server, COMPLETION, **fields, echo=True)
    assert "".join(one["text"] for event in streamed for one in event["choices"]) == text + rest


LONG = "word " * CONTEXT


@pytest.mark.parametrize("kept", [-1, CONTEXT, CONTEXT - 1, CONTEXT - 2])
@pytest.mark.parametrize("side", [{}, {"truncation_side": "left"}, {"truncation_side": "right"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (COMPLETION, {"prompt": LONG}),
        (COMPLETION, {"prompt": [539] * (CONTEXT + 50)}),
        (COMPLETION, {"prompt": LONG, "echo": True}),
    ],
    ids=["chat", "text", "ids", "echo"],
)
def test_a_cut_prompt_leaves_room_for_a_token(
    server: RealServer, path: str, body: dict[str, Any], side: dict[str, Any], kept: int
) -> None:
    usage = whole(server, path, **body, **side, truncate_prompt_tokens=kept)["usage"]
    # An answer of completions has 16 tokens, if nothing is said.
    most = CONTEXT - (1 if path == CHAT or kept > 0 else 16)
    assert usage["prompt_tokens"] == (min(kept, most) if kept > 0 else most)
    assert usage["completion_tokens"] >= 1


def test_a_truncated_response_has_room_for_a_token(server: RealServer) -> None:
    fields = {"input": LONG, "truncation": "auto"}
    assert whole(server, RESPONSES, **fields)["usage"]["input_tokens"] == CONTEXT - 1
    counted = server.client.post(f"{RESPONSES}/input_tokens", json={"model": "tiny", **fields})
    assert counted.json()["input_tokens"] == CONTEXT - 1

"""Tokens of a real server: which may be sampled, what a seed gives, where answers end, what counts.

The model has eight more rows of embeddings than its tokenizer has ids, and a gap among those: rows
like the others, which are sampled as often where nothing forbids them.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_tokenizer import VOCAB_SIZE
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GAP, PADDING = 3000, 8
"""A token that no other is merged from, and rows behind the tokenizer's last id."""
ROWS = VOCAB_SIZE + PADDING
FIRST, LAST = VOCAB_SIZE, ROWS - 1
MISSING = {GAP, *range(VOCAB_SIZE, ROWS)}
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
KEY = {"authorization": "Bearer a"}
TEXT = "A B C D A B C D A B C D A B C D"


def padded(source: Path, folder: Path) -> Path:
    """Write a checkpoint whose embeddings have rows without a token."""
    shutil.copytree(source, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    model = tokens["model"]
    gone = next(text for text, token in model["vocab"].items() if token == GAP)
    del model["vocab"][gone]
    model["merges"] = [m for m in model["merges"] if gone not in ("".join(m), *m)]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": ROWS}))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            rows = weights[name]
            weights[name] = torch.cat([rows, rows[100 : 100 + PADDING] * 1.1])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(checkpoints("llama", dtype="float32"), tmp_path_factory.mktemp("m") / "model")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--speculative-config", DRAFTS, "--logprobs-mode", "processed_logprobs")
    flags += ("--api-key", "alice=a", "--max-logprobs", "-1", "--enable-tokenizer-info-endpoint")
    with RealServer(checkpoint, tmp_path_factory.mktemp("s"), *flags) as up:
        up.client.headers.update(KEY)
        up.until_ready()
        yield up


def post(server: RealServer, path: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8}
    if path == CHAT:
        fields.setdefault("messages", [{"role": "user", "content": "hi"}])
    elif path == COMPLETIONS:
        fields.setdefault("prompt", "Answer:")
    return server.client.post(path, json=body | fields)


def choices(server: RealServer, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, path, **fields)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def text(server: RealServer, **fields: Any) -> str:
    return str(choices(server, **fields)[0]["text"])


def tokens(server: RealServer, **fields: Any) -> list[int]:
    found: list[int] = choices(server, return_token_ids=True, **fields)[0]["token_ids"]
    return found


# Answers in which a later token is the first that everything forbids.
PAIRS = {"allowed_token_ids": [4, 34], "bad_words": ["!!", "!?", "?!", "??"]}
EMPTY = [
    (PAIRS, ["allowed_token_ids", "bad_words"]),
    (PAIRS | {"min_tokens": 1}, ["allowed_token_ids", "bad_words", "min_tokens"]),
    ({"allowed_token_ids": [3], "min_tokens": 2}, ["allowed_token_ids", "min_tokens"]),
    (
        {"allowed_token_ids": [3, 4], "bad_words": ["!!"], "min_tokens": 4},
        ["allowed_token_ids", "bad_words", "min_tokens"],
    ),
    (
        {"allowed_token_ids": [300], "stop_token_ids": [300], "min_tokens": 2},
        ["allowed_token_ids", "min_tokens", "stop_token_ids"],
    ),
    ({**PAIRS, "structured_outputs": {"regex": "[!?]{5}"}}, ["allowed_token_ids", "bad_words"]),
]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "speculative": False},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "n": 3, "logprobs": 0},
    {"temperature": 0.5, "presence_penalty": 1, "logit_bias": {"4": 5}, "top_p": 0.9},
]


@pytest.mark.parametrize("way", WAYS, ids=json.dumps)
@pytest.mark.parametrize(("fields", "names"), EMPTY)
def test_where_every_token_is_forbidden_the_error_names_the_fields(
    server: RealServer, fields: dict[str, Any], names: list[str], way: dict[str, Any]
) -> None:
    answer = post(server, COMPLETIONS, **fields, **way)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", names[0])
    assert all(repr(name) in error["message"] for name in names)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_ends_with_the_error(server: RealServer, path: str) -> None:
    late = {"allowed_token_ids": [4], "bad_words": ["!" * 100]}
    answer = post(server, path, **late, max_tokens=200, stream=True)
    assert answer.status_code == 200
    first, *_, last = [json.loads(x[6:]) for x in answer.text.splitlines() if x[6:7] == "{"]
    assert "choices" in first
    assert last["error"]["param"] == "allowed_token_ids"
    # Without a token before it, it is an answer of its own.
    answer = post(server, path, allowed_token_ids=[3], min_tokens=2, stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_a_row_without_a_token_harms_no_other(server: RealServer) -> None:
    wish: dict[str, Any] = {"seed": 5, "max_tokens": 60, "ignore_eos": True}
    alone = tokens(server, **wish)
    found: list[list[int]] = []
    beside = threading.Thread(target=lambda: found.append(tokens(server, **wish)))
    beside.start()
    for way in WAYS:
        assert post(server, COMPLETIONS, **PAIRS, **way).status_code == 400
    beside.join()
    assert found == [alone]


@pytest.mark.parametrize("word", ["\n", " "])
def test_white_space_can_be_banned(server: RealServer, word: str) -> None:
    body = {"model": "tiny", "prompt": word, "add_special_tokens": False}
    (token,) = server.client.post("/tokenize", json=body).json()["tokens"]
    wish = {"logit_bias": {str(token): 100}, "temperature": 0}
    assert set(tokens(server, **wish)) == {token}
    assert token not in tokens(server, **wish, bad_words=[word])


MIXES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "speculative": False},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 2, "seed": 1},
    {"temperature": 2, "seed": 2, "top_k": 400, "repetition_penalty": 1.2},
    {"temperature": 2, "seed": 3, "logprobs": 20, "min_p": 1e-6},
    {"temperature": 2, "seed": 4, "min_tokens": 100, "bad_words": ["a"]},
    {"temperature": 2, "seed": 5, "n": 4},
    {"use_beam_search": True, "n": 4, "max_tokens": 20},
]


@pytest.mark.parametrize("mix", MIXES, ids=json.dumps)
def test_ids_without_a_token_are_never_sampled(server: RealServer, mix: dict[str, Any]) -> None:
    for choice in choices(
        server, **{"max_tokens": 240, "ignore_eos": True} | mix, return_token_ids=True
    ):
        assert MISSING.isdisjoint(choice["token_ids"])


@pytest.mark.parametrize("token", [GAP, FIRST, LAST])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, lambda token: {"logit_bias": {str(token): 100}}, "logit_bias"),
        (CHAT, lambda token: {"logit_bias": {str(token): -1}}, "logit_bias"),
        (COMPLETIONS, lambda token: {"allowed_token_ids": [5, token]}, "allowed_token_ids[1]"),
        (CHAT, lambda token: {"stop_token_ids": [token]}, "stop_token_ids[0]"),
        (COMPLETIONS, lambda token: {"prompt": [5, token]}, "prompt[1]"),
        (COMPLETIONS, lambda token: {"prompt": [[5], [token]]}, "prompt[1][0]"),
        ("/detokenize", lambda token: {"tokens": [token]}, "tokens[0]"),
    ],
)
def test_ids_without_a_token_are_refused(
    server: RealServer, path: str, fields: Any, param: str, token: int
) -> None:
    body = {"model": "tiny", **fields(token)}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hi"}]
    elif path == COMPLETIONS:
        body.setdefault("prompt", "hi")
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert str(token) in error["message"]


def test_log_probabilities_are_of_the_tokens_that_exist(
    server: RealServer, checkpoint: Path
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [1, 17, 300, 45, 900]
    wish: dict[str, Any] = {"prompt": prompt, "temperature": 1, "seed": 3, "max_tokens": 6}
    choice = choices(
        server,
        **wish,
        logprobs=20,
        prompt_logprobs=0,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        ignore_eos=True,
    )[0]
    answer = choice["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, :-1]
    logits[:, sorted(MISSING)] = -torch.inf
    expected = logits.log_softmax(-1)
    given = choice["logprobs"]["token_logprobs"]
    own = [float(expected[len(prompt) - 1 + i, t]) for i, t in enumerate(answer)]
    assert given == pytest.approx(own, abs=2e-3)
    for row, likely in zip(
        expected[len(prompt) - 1 :], choice["logprobs"]["top_logprobs"], strict=True
    ):
        named = {int(name.removeprefix("token_id:")): value for name, value in likely.items()}
        assert set(row.topk(20).indices.tolist()) <= named.keys()
        assert [float(row[token]) for token in named] == pytest.approx([*named.values()], abs=2e-3)
    for row, token, report in zip(
        expected, prompt[1:], choice["prompt_logprobs"][1:], strict=False
    ):
        assert report[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-3)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.05, "top_k": 50}]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2))])
def test_log_probabilities_change_no_seeded_answer(
    server: RealServer, options: dict[str, Any], seed: int
) -> None:
    wish = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "seed": seed, **options}
    alone = text(server, **wish)
    assert text(server, **wish, logprobs=0) == alone
    assert text(server, **wish, logprobs=5, speculative=False) == alone
    others: list[dict[str, Any]] = [
        {"max_tokens": 160, "ignore_eos": True, "logprobs": 5},
        {"use_beam_search": True, "n": 3, "max_tokens": 12},
    ]
    for other in others:
        beside = threading.Thread(target=post, args=(server, COMPLETIONS), kwargs=other)
        beside.start()
        time.sleep(0.05)
        assert text(server, **wish) == alone
        beside.join()


@pytest.mark.parametrize("seed", [0, 7, -1, -2, -3, 1 << 62, -(1 << 63)])
def test_answers_of_a_seed_are_repeated_and_no_other_seeds(server: RealServer, seed: int) -> None:
    wish: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}

    def answers(seed: int, n: int) -> list[str]:
        return [str(c["text"]) for c in choices(server, **wish, seed=seed, n=n)]

    several = answers(seed, 3)
    assert len(set(several)) == 3
    if seed == -1:
        # No seed, as in vLLM.
        assert answers(seed, 3) != several
        return
    assert answers(seed, 3) == several
    assert answers(seed, 1) == several[:1]
    assert answers(seed, 2) == several[:2]
    nearby = [answers(seed + step, 1)[0] for step in (1, 2) if seed + step not in (-1, 1 << 63)]
    assert set(several).isdisjoint(nearby)


def test_prompts_of_a_list_are_answered_as_if_alone(server: RealServer) -> None:
    wish: dict[str, Any] = {"temperature": 1.0, "seed": 4, "n": 2}
    listed = [c["text"] for c in choices(server, **wish, prompt=["Dogs", "Cats"])]
    alone = [c["text"] for p in ("Dogs", "Cats") for c in choices(server, **wish, prompt=p)]
    assert listed == alone


STOPS: list[dict[str, Any]] = [
    {"stop": ["B"]},
    {"stop": ["D A"]},
    {"stop": [" C D A B", "C D A"], "include_stop_str_in_output": True},
    {"stop": ["B"], "min_tokens": 5},
    {"stop": ["B"], "n": 2, "temperature": 1, "seed": 1},
]
PLAIN = {"structured_outputs": {"regex": "( A B C D)+"}, "max_tokens": 40}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(x[6:]) for x in answer.text.splitlines() if x[6:7] == "{"]


@pytest.mark.parametrize("stops", STOPS, ids=json.dumps)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_drafts_bring_no_token_behind_a_stop_string(
    server: RealServer, path: str, stops: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {**PLAIN, "temperature": 0, **stops, "return_token_ids": True}
    fields |= {"prompt": TEXT} if path == COMPLETIONS else {}
    fields |= {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    seen = []
    for drafts in (True, False):
        generated = server.metric("vllm:generation_tokens_total")
        billed = server.metric('rbln_key_tokens_total{key="alice",kind="completion"')
        whole = post(server, path, **fields, speculative=drafts).json()
        streamed = events(
            post(
                server,
                path,
                **fields,
                speculative=drafts,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        ids: dict[int, list[int]] = {}
        for chunk in streamed:
            for choice in chunk["choices"]:
                ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
        used = whole["usage"]["completion_tokens"]
        assert used == sum(len(choice["token_ids"]) for choice in whole["choices"])
        assert streamed[-1]["usage"]["completion_tokens"] == used
        assert [ids[i] for i in sorted(ids)] == [c["token_ids"] for c in whole["choices"]]
        assert server.metric("vllm:generation_tokens_total") - generated == 2 * used
        assert (
            server.metric('rbln_key_tokens_total{key="alice",kind="completion"') - billed
            == 2 * used
        )
        for one in whole["choices"]:
            one["logprobs"] = json.loads(json.dumps(one["logprobs"]))
        seen.append(whole["choices"])
    assert seen[0] == seen[1]


def spent(server: RealServer) -> dict[str, float]:
    names = {
        "prompt": 'rbln_key_tokens_total{key="alice",kind="prompt"',
        "completion": 'rbln_key_tokens_total{key="alice",kind="completion"',
        "read": "vllm:prompt_tokens_total",
        "generated": "vllm:generation_tokens_total",
        "aborted": 'vllm:request_success_total{engine="0",finished_reason="abort"',
    }
    return {name: server.metric(start) for name, start in names.items()}


def spending(server: RealServer, before: dict[str, float], aborted: int = 0) -> dict[str, float]:
    deadline = time.monotonic() + 10
    while spent(server)["aborted"] - before["aborted"] < aborted and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
    return {name: value - before[name] for name, value in spent(server).items()}


@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 2}, {"stream": True}, {"n": 2, "temperature": 1}]
)
def test_an_echo_without_an_answer_uses_no_answer_token(
    server: RealServer, options: dict[str, Any]
) -> None:
    before = spent(server)
    fields = {"prompt": [5, 6, 7, 8], "echo": True, "max_tokens": 0, **options}
    if options.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    answer = post(server, COMPLETIONS, **fields)
    body = events(answer)[-1] if options.get("stream") else answer.json()
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 0)
    assert spending(server, before) | {"read": 0} == {
        "prompt": 4,
        "completion": 0,
        "read": 0,
        "generated": 0,
        "aborted": 0,
    }
    if "logprobs" in options:
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 4


def test_aborted_requests_are_counted_and_pay_what_was_read(server: RealServer) -> None:
    before = spent(server)
    long: dict[str, Any] = {
        "model": "tiny",
        "ignore_eos": True,
        "max_tokens": 240,
        "prompt": [5] * 10,
    }
    started = 0
    used = before
    # A stream whose end is there before the client goes away is no aborted one: try another.
    while started < 3 or (used["aborted"] < 3 and started < 12):
        with server.client.stream("POST", COMPLETIONS, json=long | {"stream": True}) as stream:
            next(stream.iter_lines())
        started += 1
        used = spending(server, before)
    assert 3 <= used["aborted"] <= started
    assert used["prompt"] == 10 * started
    streams = used["aborted"]
    # A limit which is over before the request has reached the engine aborts nothing there.
    for attempts in range(1, 6):
        late = server.client.post(
            COMPLETIONS,
            json=long | {"n": 2},
            headers={"x-request-timeout-ms": str(30 * 2**attempts)},
        )
        assert late.status_code in (408, 504), late.text
        used = spending(server, before)
        if used["aborted"] >= streams + 2:
            break
    assert streams + 2 <= used["aborted"] <= started + 2 * attempts
    # A late request may have been too late for its first token.
    assert 10 * started <= used["prompt"] <= 10 * (started + attempts)
    assert used["completion"] == used["generated"]


def test_a_prompt_that_was_not_read_is_not_paid(server: RealServer) -> None:
    long = {"model": "tiny", "ignore_eos": True, "max_tokens": 240, "prompt": [5] * 10}
    # The fifth may come too late to wait, or not at all: try again.
    for _ in range(5):
        before = spent(server)
        with ExitStack() as running:
            streams = []
            for _ in range(4):
                stream = server.client.stream("POST", COMPLETIONS, json=long | {"stream": True})
                streams.append(running.enter_context(stream).iter_lines())
                next(streams[-1])
            # All four rows are in use.
            with suppress(httpx.ReadTimeout):
                server.client.post(COMPLETIONS, json=long, timeout=0.03)
            for lines in streams:
                list(lines)
        used = spending(server, before, aborted=1)
        if (found := (used["aborted"], used["prompt"], used["read"])) == (1, 40, 40):
            break
    assert found == (1, 40, 40)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_beam_search_uses_the_tokens_of_its_usage(server: RealServer, path: str) -> None:
    before = spent(server)
    usage = post(server, path, use_beam_search=True, n=2, max_tokens=10).json()["usage"]
    used = spending(server, before)
    assert used["prompt"] == usage["prompt_tokens"]
    assert used["completion"] == usage["completion_tokens"] > 0

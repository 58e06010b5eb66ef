"""Logprobs: those of prompts, the most likely tokens, their number, and kept texts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from server.vllm import logprobs as kept_texts
from server.vllm.logprobs import AnswerLogprobs, PlacedLogprob, TokenTexts
from server.vllm.responses import Responses
from server.vllm.sampling import MAX_ENTRIES, check_logprobs
from server.vllm.serving import Chats
from tests.checkpoints import CheckpointCache

pytestmark = pytest.mark.engine

LENGTH, TOP = 300, 20
VOCABULARY = 4096


@pytest.fixture(scope="module")
def tokenizer(checkpoints: CheckpointCache) -> Any:
    return CachedHfTokenizer.from_pretrained(str(checkpoints("llama", dtype="float32")))


def tensors(length: int = LENGTH, top: int = TOP) -> LogprobsTensors:
    """Logprobs of a prompt as the engine sends them; some tokens are bytes of one character."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 300, (length, top + 1), generator=random)
    values = -torch.rand((length, top + 1), generator=random).sort(dim=1).values
    values[3, 4] = -torch.inf
    ranks = torch.randint(1, 40, (length,), generator=random)
    return LogprobsTensors(ids, values, ranks)


def processor(tokenizer: Any) -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=None,
        prompt_logprobs=[None],
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=TOP,
    )


def test_a_prompts_logprobs_are_returned_every_time(tokenizer: Any) -> None:
    theirs = processor(tokenizer)
    lasting = AnswerLogprobs.of(processor(tokenizer), SimpleNamespace(decode_next=None))
    for one in (theirs, lasting):
        one._update_prompt_logprobs(tensors())
    expected = theirs.pop_prompt_logprobs()
    assert expected is not None
    assert len(expected) == LENGTH + 1
    for _ in range(2):
        found = lasting.pop_prompt_logprobs()
        assert found is not None
        for own, same in zip(found[1:], expected[1:], strict=True):
            assert own is not None
            assert same is not None
            assert {token: (entry.logprob, entry.rank) for token, entry in own.items()} == {
                token: (entry.logprob, entry.rank) for token, entry in same.items()
            }


def serve(kind: str) -> Any:
    """Our serving class of a kind, of which nothing but logprobs is used."""
    ours: Any = object.__new__({"chat": Chats, "response": Responses}[kind])
    ours.return_tokens_as_token_ids = False
    return ours


def sampled(tokenizer: Any, length: int = LENGTH) -> tuple[list[int], list[Any]]:
    """Tokens and logprobs of an answer, of which every other token is not among the likeliest."""
    ids, positions = [], []
    for number in range(length):
        likely = {
            5 + number + rank: Logprob(-float(rank), rank, tokenizer.decode([5 + number + rank]))
            for rank in range(1, TOP + 1)
        }
        token = 3 + number if number % 2 else 5 + number + 2
        one = likely.get(token) or Logprob(-30.0, 999, tokenizer.decode([token]))
        ids.append(token)
        positions.append({token: one, **likely} | {token: PlacedLogprob(**vars(one))})
    return ids, positions


@pytest.mark.parametrize("kind", ["chat", "response"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_alternatives_are_the_most_likely_tokens(tokenizer: Any, kind: str, number: int) -> None:
    ours = serve(kind)
    ids, positions = sampled(tokenizer, 4)
    if kind == "chat":
        made = ours._create_chat_logprobs(
            ids, positions, tokenizer=tokenizer, num_output_top_logprobs=number
        ).content
    else:
        made = ours._create_response_logprobs(
            ids, positions, tokenizer=tokenizer, top_logprobs=number
        )
    for entry, token, position in zip(made, ids, positions, strict=True):
        shown = json.loads(entry.model_dump_json())
        assert shown["logprob"] == position[token].logprob
        assert [one["logprob"] for one in shown["top_logprobs"]] == [
            -float(rank) for rank in range(1, number + 1)
        ]


@pytest.mark.parametrize(
    ("params", "length", "name"),
    [
        ({"prompt_logprobs": -1}, MAX_ENTRIES // VOCABULARY + 1, "prompt_logprobs"),
        ({"prompt_logprobs": 99}, MAX_ENTRIES // 100 + 1, "prompt_logprobs"),
        ({"logprobs": -1, "max_tokens": MAX_ENTRIES // VOCABULARY + 1}, 1, "logprobs"),
        ({"logprobs": 99, "max_tokens": 2000, "n": 6, "temperature": 1}, 1, "logprobs"),
    ],
)
def test_an_answer_has_so_many_at_most(params: dict[str, Any], length: int, name: str) -> None:
    prompt = {"prompt_token_ids": [5] * length}
    with pytest.raises(VLLMValidationError, match=f"may have {MAX_ENTRIES}") as caught:
        check_logprobs(SamplingParams(**params), prompt, VOCABULARY)
    assert caught.value.parameter == name


def test_what_is_ordinary_passes() -> None:
    prompt = {"prompt_token_ids": [5] * 40_000}
    check_logprobs(SamplingParams(prompt_logprobs=20, max_tokens=10**6), prompt, VOCABULARY)
    check_logprobs(SamplingParams(logprobs=20, max_tokens=10**6), prompt, VOCABULARY)
    check_logprobs(SamplingParams(logprobs=-1, max_tokens=100), {}, VOCABULARY)


def test_texts_of_tokens_are_kept(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TokenTexts()
    lists = [[5, 5, 200, 4, 255], [200, 7], [], [299, *range(4, 60)]]
    for _ in range(2):
        for tokens in lists:
            found = texts(tokenizer, tokens)
            theirs = convert_ids_list_to_tokens(tokenizer, tokens)
            for own, text in zip(found, theirs, strict=True):
                assert own == text if "\ufffd" not in text else own.startswith("\\x")
            # The list is the caller's.
            found[:] = [""] * len(found)
    monkeypatch.setattr(kept_texts, "convert_ids_list_to_tokens", None)
    assert len(texts(tokenizer, lists[3])) == len(lists[3])

"""The text of an answer never holds text of its prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from server.engine.outputs import TokenBytes, keep_prompt_out
from tests.checkpoint_tokenizer import EOS_TOKEN, train_tokenizer

TEXTS = (
    "The code is 1234 漢字",
    "smile 🙂🙂 end",
    "Ünïcödé",
    "日",
    "bad \ufffd",
    "\ufffd" * 9,
    "x",
)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: spaces begin words, bytes are spelled <0xNN>."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehilmnostx1234 "]
    tokenizer = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte level": train_tokenizer(), "byte fallback": byte_fallback()}


def answer_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int], **given: Any) -> str:
    request = SimpleNamespace(
        sampling_params=SamplingParams(**given), request_id="r", prompt_token_ids=prompt
    )
    detokenizer = FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=tokenizer), request)
    state: Any = SimpleNamespace(detokenizer=detokenizer, prompt_token_ids=prompt)
    keep_prompt_out(state, TokenBytes(tokenizer))
    detokenizer.update(answer, stop_terminated=False)
    return detokenizer.get_next_output_text(finished=True, delta=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_of_a_text_continues_with_the_rest(name: str, text: str) -> None:
    """The prompt's last character may be joined, if it is open; no other text of it comes back."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    own = TokenBytes(tokenizer)
    answer = tokenizer.encode("ab cd", add_special_tokens=False).ids
    for cut in range(1, len(ids) + 1):
        spelled = b"".join(own.of(token) for token in ids[:cut])
        rest = b"".join(own.of(token) for token in ids[cut:])
        whole = spelled.decode(errors="ignore")
        opened = spelled[len(whole.encode()) :]
        wanted = (opened + rest).decode() + tokenizer.decode([*ids, *answer])[len(text) :]
        got = answer_text(tokenizer, ids[:cut], [*ids[cut:], *answer])
        assert got.replace("▁", " ") == wanted.replace("▁", " "), (cut, spelled)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("own", ["x", "漢", "\ufffdx"])
def test_an_open_character_that_stays_open_is_no_part_of_the_answer(name: str, own: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("secret 漢", add_special_tokens=False).ids[:-1]
    answer = tokenizer.encode(own, add_special_tokens=False).ids
    assert answer_text(tokenizer, prompt, answer).replace("▁", " ").lstrip() == own


def test_special_tokens_behind_an_open_character_hide_nothing() -> None:
    tokenizer = TOKENIZERS["byte level"]
    end = tokenizer.token_to_id(EOS_TOKEN)
    prompt = tokenizer.encode("secret 漢", add_special_tokens=False).ids[:-1] + [end] * 40
    answer = tokenizer.encode("x", add_special_tokens=False).ids
    for skip in (True, False):
        text = answer_text(tokenizer, prompt, answer, skip_special_tokens=skip)
        assert "secret" not in text
        assert text.endswith("x")


def test_stop_strings_match_in_the_answer_alone() -> None:
    tokenizer = TOKENIZERS["byte level"]
    prompt = tokenizer.encode("The secret is here\ufffd", add_special_tokens=False).ids
    answer = tokenizer.encode(" no more", add_special_tokens=False).ids
    assert answer_text(tokenizer, prompt, answer, stop=["secret"]) == " no more"

"""The tokenizer of a file cuts texts as the one that it was made of, sentencepiece's as well."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from rbln_backend.gguf.checkpoint import write_checkpoint
from tests.checkpoint_tokenizer import VOCAB_SIZE
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf

CORPUS = Path(__file__).parents[2] / "checkpoint_text" / "corpus.txt"
TEXTS = (
    "Hello, world! It's 2026; don't panic.",
    "  two  spaces,\n\nlines\tand tabs   ",
    "12345 + 678 = 13023",
    "Größe, naïve café, 中文字 и кириллица 🙂🙂",
    "def f(x):\n    return x**2  # squared\r\n",
    "<|im_start|>user\nHi<|im_end|>\n<tool_call>{}</tool_call>",
    "",
    " ",
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(numbers: str) -> Any:
    """Pre-tokenizer of the published tokenizer.json files of Llama-3 and Qwen2."""
    pattern = Regex(_CONTRACTION + _WORDS + numbers + _REST)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def by_digits() -> Any:
    """Pre-tokenizer of SmolLM2's and StarCoder2's files."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def converted(checkpoint: Path, folder: Path, **keys: Any) -> Any:
    folder.mkdir()
    write_checkpoint(write_gguf(checkpoint, folder / "m.gguf", keys=keys), folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "dbrx"])
def test_byte_level(pre: str, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama", num_hidden_layers=1)
    wanted = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    if pre == "smollm":
        wanted.pre_tokenizer = by_digits()
    elif pre in ("llama-bpe", "dbrx"):
        wanted.pre_tokenizer = split(r"\p{N}{1,3}")
        wanted.model.ignore_merges = pre == "llama-bpe"
    elif pre == "qwen2":
        wanted.pre_tokenizer = split(r"\p{N}")
        wanted.normalizer = normalizers.NFC()
    found = converted(checkpoint, tmp_path / "c", **{"tokenizer.ggml.pre": pre})
    texts = (*TEXTS, "e\u0301tude")
    assert [found.encode(text) for text in texts] == [wanted.encode(text).ids for text in texts]
    ids = found.encode(TEXTS[3], add_special_tokens=False)
    assert found.decode(ids) == TEXTS[3]
    turn = [{"role": "user", "content": "Hi"}]
    original = AutoTokenizer.from_pretrained(checkpoint)
    assert found.apply_chat_template(turn, tokenize=False) == original.apply_chat_template(
        turn, tokenize=False
    )
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 3, 0)


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_llama3_takes_words_whole_that_no_merge_makes(
    pre: str, whole: bool, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", num_hidden_layers=1)
    merges = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    # A word of letters, which either way of cutting leaves alone.
    last = max(i for i, pair in enumerate(merges) if "".join(pair).removeprefix("Ġ").isalpha())
    word = "".join(merges.pop(last))
    kept = [" ".join(pair) for pair in merges]
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": kept}
    found = converted(checkpoint, tmp_path / "c", **keys)
    ids = found.encode(word.replace("Ġ", " "), add_special_tokens=False)
    assert (ids == [found.convert_tokens_to_ids(word)]) is whole


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_first_token_is_added_where_the_file_says_so(
    adds_bos: bool, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", num_hidden_layers=1)
    found = converted(checkpoint, tmp_path / "c", **{"tokenizer.ggml.add_bos_token": adds_bos})
    assert (found.encode("Hello")[0] == 1) is adds_bos


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS.read_text("utf-8").splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    pieces = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in pieces
    ]
    fill = VOCAB_SIZE - len(kinds)
    checkpoint = checkpoints("llama", num_hidden_layers=1)
    found = converted(
        checkpoint,
        tmp_path / "c",
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": None,
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.add_bos_token": None,
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in pieces]
            + [f"[PAD{i}]" for i in range(fill)],
            "tokenizer.ggml.scores": [model.get_score(i) for i in pieces] + [-1e4] * fill,
            "tokenizer.ggml.token_type": kinds + [5] * fill,
            "tokenizer.ggml.eos_token_id": 2,
        },
    )
    texts = [text for text in TEXTS if "<|" not in text]
    assert [found.encode(text) for text in texts] == [[1, *model.encode(text)] for text in texts]
    for text in texts:
        assert found.decode(found.encode(text), skip_special_tokens=True) == text

"""Gives a checkpoint of shapes.py a tokenizer, so that it can be served over HTTP.

Random weights choose random tokens. Their texts are ASCII syllables but for the 128 bytes above it:
a token whose text ends inside a character is held back by a server, and would spoil its latencies.
Every engine splits words the GPT-2 way and merges in the order given here. Invariant: ` bake domi`
and any other run of `WORDS`, each after a blank, is one token a word.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.models.shapes import built_once

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # the ids that shapes.py writes into config.json
_BLANK = "Ġ"  # how byte-level BPE spells a blank
_SYLLABLES = [a + b for a in "bcdfghjklmnpqrstvwxyz" for b in "aeiou"]
_WORD_COUNT = 4096
WORDS = [a + b for a, b in itertools.islice(itertools.product(_SYLLABLES, repeat=2), _WORD_COUNT)]


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens of a vocabulary of `size` entries, by id, and its merges, by rank.

    Raises ValueError below the tokens that prompts need or above what three syllables can spell.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(itertools.islice(_merges(), max(0, size - len(tokens))))
    tokens += [left + right for left, right in merges]
    least = len(SPECIAL_TOKENS) + 256 + len(_SYLLABLES) + 2 * _WORD_COUNT
    if len(tokens) != size or size < least:
        raise ValueError(f"vocab_size {size} must lie between {least} and the syllables' triples")
    return tokens, merges


def _merges() -> Iterator[tuple[str, str]]:
    yield from ((syllable[0], syllable[1]) for syllable in _SYLLABLES)
    yield from ((word[:2], word[2:]) for word in WORDS)
    yield from ((_BLANK, word) for word in WORDS)
    yield from itertools.product(WORDS, _SYLLABLES)


def prompt_text(chooser: random.Random, tokens: int) -> str:
    """Return a text of exactly `tokens` tokens."""
    return "".join(f" {word}" for word in chooser.choices(WORDS, k=tokens))


def make_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of `size` entries that adds no special tokens."""
    tokens, merges = vocabulary(size)
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def text_checkpoint(path: Path) -> Path:
    """Return a copy of checkpoint `path`, its weights hard-linked, that has a tokenizer.

    It lies beside `path`, which must be a folder of shapes.py, and is made once.
    """
    place = path.with_name(f"{path.name}-text")

    def build(folder: Path) -> None:
        for file in path.iterdir():
            os.link(file, folder / file.name)
        _write_tokenizer(folder)

    return built_once(place, build)


def _write_tokenizer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = make_tokenizer(config["vocab_size"])
    pad, bos, eos = SPECIAL_TOKENS
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
    }
    # Not written through: config.json and its like are links to the original's. transformers serve
    # cannot ignore the end-of-sequence token by request, so its defaults name none.
    (folder / "generation_config.json").unlink()
    for name, content in (
        ("generation_config.json", {"pad_token_id": 0}),
        ("tokenizer_config.json", described),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

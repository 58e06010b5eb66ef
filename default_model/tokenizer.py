"""Trains the byte-level BPE tokenizer on text that the generators draw, and writes its files.

Invariant: the same generators and the same pinned `tokenizers` release give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS_TOKEN = "<|startoftext|>"
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|pad|>"
TURN_TOKEN = "<|im_start|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, TURN_TOKEN, EOS_TOKEN)
# Visible in decoded text, because a tool parser looks for them there.
TOOL_TOKENS = ("<tool_call>", "</tool_call>")


def dump_json(value: Any) -> str:
    """Return `value` as the chat template's `tojson` writes it in transformers and vLLM."""
    return json.dumps(value, ensure_ascii=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts` and return a tokenizer of exactly `vocab_size` entries.

    Digits are tokens of their own, so that sums are sums of digits. Raises ValueError if the texts
    have too few different words to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_TOKENS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TOOL_TOKENS))
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"The texts yield {tokenizer.get_vocab_size()} tokens; vocab_size is {vocab_size}."
            " Give more, or different, texts."
        )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS_TOKEN} $A",
                pair=f"{BOS_TOKEN} $A {BOS_TOKEN}:1 $B:1",
                special_tokens=[(BOS_TOKEN, tokenizer.token_to_id(BOS_TOKEN))],
            ),
        ]
    )
    return tokenizer


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens under their names in config.json."""
    names = {"bos_token_id": BOS_TOKEN, "eos_token_id": EOS_TOKEN, "pad_token_id": PAD_TOKEN}
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[token] for name, token in names.items()}


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json, with which transformers loads tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": [TURN_TOKEN],
    }

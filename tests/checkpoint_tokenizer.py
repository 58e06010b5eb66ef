"""The tokenizer of the test checkpoints: byte-level BPE over checkpoint_text/corpus.txt.

Invariant: the same corpus and the same pinned `tokenizers` release give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS_TOKEN = "<|startoftext|>"
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|pad|>"
TURN_TOKEN = "<|im_start|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, TURN_TOKEN, EOS_TOKEN)
# Visible in decoded text, because a tool parser looks for them there.
TOOL_TOKENS = ("<tool_call>", "</tool_call>")

_HERE = Path(__file__).parent / "checkpoint_text"


def train_tokenizer(corpus: Path = _HERE / "corpus.txt") -> Tokenizer:
    """Train on `corpus` and return a tokenizer of exactly VOCAB_SIZE entries.

    Raises ValueError if the corpus has too few different words to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_TOKENS),
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.read_text(encoding="utf-8").splitlines(True), trainer)
    tokenizer.add_tokens(list(TOOL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"{corpus.name} yields {tokenizer.get_vocab_size()} tokens; VOCAB_SIZE is {VOCAB_SIZE}."
            " Add different words to the corpus."
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


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return the file names and contents that transformers loads as a fast tokenizer."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": [TURN_TOKEN],
    }
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=False) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "chat_template.jinja": (_HERE / "chat_template.jinja").read_bytes(),
    }

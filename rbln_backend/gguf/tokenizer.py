"""A file's tokenizer as transformers' fast one.

transformers makes it of the lists of tokens and merges; how text is cut beforehand it knows for
some of llama.cpp's `tokenizer.ggml.pre`, and takes GPT-2's way for the others without a word. Here
each that is taken has a row, and the rest is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.reader import GgufFile

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPACE = "\u2581"
_ENDS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Settings of the published tokenizers of one `tokenizer.ggml.pre`, besides their merges."""

    single_digits: bool = False
    """Digits one by one, then GPT-2's rule; else transformers' own rule of that name."""
    composed: bool = False
    whole_words_first: bool = False
    """A word that is a token is one, whether or not merges lead there."""
    adds_bos: bool = False


_LLAMA3 = _Cut(whole_words_first=True, adds_bos=True)
_CUTS: Mapping[str, _Cut] = {
    **dict.fromkeys(("gpt-2", "dbrx"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Cut(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Cut(composed=True)),
    "tekken": _Cut(whole_words_first=True, adds_bos=True),
}


def make_tokenizer(file: GgufFile, max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer, with its chat template. Raises `CheckpointError`."""
    keys = file.metadata
    kind, cut = keys.get("tokenizer.ggml.model"), _cut(keys)
    try:
        architecture, parts, _ = get_gguf_tokenizer(str(file.path))
        tokenizer, _ = convert_gguf_tokenizer(architecture, parts)
    except Exception as error:
        # The tokenizers library raises plain exceptions.
        raise CheckpointError(f"the file's tokenizer cannot be made: {error}") from error
    if kind == "gpt2":
        _cut_as(tokenizer, cut)
    else:
        _space_as(tokenizer, prefix=keys.get("tokenizer.ggml.add_space_prefix", True))
    tokens = keys["tokenizer.ggml.tokens"]
    special = {
        name: tokens[keys[f"tokenizer.ggml.{key}"]]
        for name, key in _SPECIAL.items()
        if f"tokenizer.ggml.{key}" in keys
    }
    _frame(tokenizer, keys, special, adds_bos=cut.adds_bos or kind == "llama")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=keys.get("tokenizer.chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **special,
    )


def special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the configuration's ids: of the beginning, of padding, and of all ends.

    An answer ends with the text, with a turn or with a message.
    """
    keys = file.metadata
    ends = [keys[name] for name in _ENDS if name in keys]
    return {
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
    }


def _cut(keys: Mapping[str, Any]) -> _Cut:
    kind, pre = keys.get("tokenizer.ggml.model"), keys.get("tokenizer.ggml.pre")
    if kind == "llama":
        return _Cut()
    if kind != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model {kind!r} is not read; gpt2 and llama are")
    if not isinstance(pre, str) or pre not in _CUTS:
        raise CheckpointError(
            f"tokenizer.ggml.pre {pre!r} is not read; {', '.join(_CUTS)} are; use the model's "
            "Hugging Face checkpoint"
        )
    return _CUTS[pre]


def _cut_as(tokenizer: Tokenizer, cut: _Cut) -> None:
    if cut.single_digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    if cut.whole_words_first:
        tokenizer.model.ignore_merges = True


def _space_as(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """Mark spaces as sentencepiece does, which adds its prefix also to a text that has a space.

    Gemma's tokenizer has no prefix and comes without the pre-tokenizer that adds one.
    """
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        return
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = None
    if not prefix:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _frame(
    tokenizer: Tokenizer, keys: Mapping[str, Any], special: Mapping[str, str], *, adds_bos: bool
) -> None:
    """Put the tokens around a text that the file asks for."""
    begin = keys.get("tokenizer.ggml.add_bos_token", adds_bos)
    end = keys.get("tokenizer.ggml.add_eos_token", False)
    before = [special["bos_token"]] if begin and "bos_token" in special else []
    after = [special["eos_token"]] if end and "eos_token" in special else []
    if before or after:
        second = [f"{token}:1" for token in ("$B", *after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *after}],
        )

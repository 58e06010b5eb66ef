"""A damaged file is refused in one line that names the key and what is accepted."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf import head
from rbln_backend.gguf.head import read_head
from tests.checkpoint_tokenizer import VOCAB_SIZE
from tests.checkpoints import CheckpointCache
from tests.damaged_gguf import convert, damage, rewritten
from tests.gguf_files import write_gguf

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
Change = Callable[[list[Any]], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoints = CheckpointCache(Path.home() / ".cache" / "rbln-serve" / "test-checkpoints")
    small = checkpoints("llama", num_hidden_layers=1, tie_word_embeddings=True)
    return write_gguf(small, tmp_path_factory.mktemp("gguf") / "m.gguf")


def refusal(content: bytes, folder: Path) -> str:
    file = folder / "damaged.gguf"
    file.write_bytes(content)
    reason = convert(file, folder / "made")
    assert reason is not None
    assert "\n" not in reason
    return reason


def test_the_unchanged_file_is_converted(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "same.gguf").write_bytes(rewritten(whole, {}))
    assert convert(tmp_path / "same.gguf", tmp_path / "made") is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("general.architecture", 7, "general.architecture: 7; must be the name of a family"),
        ("general.alignment", 0, "general.alignment: 0; must be a power of two up to"),
        ("general.alignment", "x", "general.alignment: 'x'; must be a power of two up to"),
        ("split.count", "2", "split.count: '2'; must be a number up to 10,000"),
        ("split.count", 10**12, "split.count: 1000000000000; must be a number up to 10,000"),
        ("llama.block_count", "1", "llama.block_count: '1'; must be a whole number from 1 to"),
        ("llama.block_count", 10**6, "llama.block_count: 1000000; the file has 11 tensors"),
        ("llama.embedding_length", 0, "llama.embedding_length: 0; must be a whole number from 1"),
        ("llama.embedding_length", 64, "llama.embedding_length must be 128, not 64"),
        ("llama.attention.head_count", 2.5, "llama.attention.head_count: 2.5; must be a whole"),
        ("llama.attention.head_count", 2**40, "must be a whole number from 1 to 2,147,483,647"),
        ("llama.attention.head_count_kv", 3, "head_count_kv: 3; must divide the 4 heads"),
        ("llama.attention.key_length", 33, "key_length: 33; must be an even number up to 65,536"),
        ("llama.rope.freq_base", -1.0, "llama.rope.freq_base: -1.0; must be a positive number"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "nan; must be a positive number"),
        ("llama.rope.scaling.type", 1, "llama.rope.scaling.type: 1; must be a text"),
        ("llama.strange", "x" * 10**6, "llama.strange = xxx"),
        (TOKENS, None, f"{TOKENS}: None; must be a list of texts"),
        (TOKENS, "a", f"{TOKENS}: 'str'; must be a list of texts"),
        (TOKENS, [1, 2], f"{TOKENS}: 'list'; must be a list of texts"),
        (TOKENS, [], f"{TOKENS}: []; must be a list of texts"),
        (TOKENS, ["a"] * (VOCAB_SIZE + 1), f"'4,097 tokens'; must be at most {VOCAB_SIZE:,}, one"),
        (TOKENS, ["a", "b", "a"], f"{TOKENS}[2]: 'a'; must be another token than that of 0"),
        (TOKENS, ["a" * 2000], f"{TOKENS}[0]: '2,000 characters'; must be at most 1,024"),
        ("tokenizer.ggml.token_type", [1], f"'1 values'; must be {VOCAB_SIZE:,}, one for each"),
        ("tokenizer.ggml.token_type", 1, "token_type: 'int'; must be a list of numbers"),
        ("tokenizer.ggml.token_type", [9] * VOCAB_SIZE, "token_type[0]: 9; must be a whole number"),
        ("tokenizer.ggml.scores", [float("inf")] * VOCAB_SIZE, "scores[0]: inf; must be a number"),
        (MERGES, None, f"the file has neither {MERGES} nor tokenizer.ggml.scores"),
        (MERGES, ["a b c"], f"{MERGES}[0]: 'a b c'; must be two tokens with a space between"),
        (MERGES, ["ab"], f"{MERGES}[0]: 'ab'; must be two tokens with a space between"),
        (MERGES, ["e qqq"], f"{MERGES}[0]: 'e qqq'; must be of tokens; 'qqq' is not one"),
        (MERGES, 5, f"{MERGES}: 'int'; must be a list of texts"),
        ("tokenizer.ggml.eos_token_id", VOCAB_SIZE, "eos_token_id: 4096; must be a token from 0"),
        ("tokenizer.ggml.bos_token_id", -1, "bos_token_id: -1; must be a token from 0 to 4,095"),
        ("tokenizer.ggml.bos_token_id", "1", "bos_token_id: '1'; must be a token from 0 to 4,095"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token: 1; must be true or false"),
        ("tokenizer.ggml.model", 1, "tokenizer.ggml.model 1 is not read"),
        ("tokenizer.chat_template", 1, "tokenizer.chat_template: 1; must be a text"),
    ],
)
def test_a_key_that_is_wrong_is_named(
    name: str, value: Any, reason: str, whole: Path, tmp_path: Path
) -> None:
    message = refusal(rewritten(whole, {name: value}), tmp_path)
    assert reason in message
    assert len(message) < 300


def test_lists_are_bounded_by_what_they_say(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count or a length does not decide how much is allocated."""
    content = whole.read_bytes()
    name = TOKENS.encode()
    place = content.index(name) + len(name) + 8
    for count, reason in (
        (2**22, "bytes of text; at most"),
        (2**22 + 1, f"{TOKENS}: 4,194,305 items; at most 4,194,304 are read"),
        (2**64 - 1, "items; at most 4,194,304 are read"),
    ):
        changed = bytearray(content)
        struct.pack_into("<Q", changed, place, count)
        assert reason in refusal(bytes(changed), tmp_path)
    changed = bytearray(content)
    struct.pack_into("<Q", changed, place + 8, 2**62)
    assert f"{TOKENS}[0]: 4,611,686,018,427,387,904 bytes of text; at most" in refusal(
        bytes(changed), tmp_path
    )
    monkeypatch.setattr(head, "MAX_KEYS", 3)
    assert "the header: 21 keys; at most 3 are read" in refusal(content, tmp_path)
    monkeypatch.setattr(head, "MAX_TENSORS", 3)
    assert "the header: 11 tensors; at most 3 are read" in refusal(content, tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda info: info.__setitem__(0, 9), "tensor token_embd.weight: 9 dimensions; at most 4"),
        (lambda info: info.__setitem__(1, 0), "which has no elements"),
        (lambda info: info.__setitem__(1, 2**63), "bytes of damaged.gguf are missing"),
        (lambda info: info.__setitem__(3, 99), "tensor token_embd.weight: type 99, which is not"),
        (lambda info: info.__setitem__(3, 8) or info.__setitem__(1, 100), "not whole blocks of 32"),
        (lambda info: info.__setitem__(4, 5), "begins at byte 5, which is not a multiple of 32"),
        (lambda info: info.__setitem__(4, 2**62), "bytes of damaged.gguf are missing"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    change: Change, reason: str, whole: Path, tmp_path: Path
) -> None:
    changed = bytearray(whole.read_bytes())
    place = changed.index(b"token_embd.weight") + len("token_embd.weight")
    info = list(struct.unpack_from("<IQQIQ", changed, place))
    change(info)
    struct.pack_into("<IQQIQ", changed, place, *info)
    assert reason in refusal(bytes(changed), tmp_path)


def test_a_name_twice_and_one_that_cannot_be_printed(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    twice = content.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
    assert refusal(twice, tmp_path) == "tokenizer.ggml.eos_token_id: stands twice in the file"
    twice = content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_v.weight")
    assert refusal(twice, tmp_path) == "tensor blk.0.attn_v.weight: stands twice in the file"
    escaped = content.replace(b"general.architecture", b"general.\x1b[2Jchitectu")
    assert r"the name of key 1 of 21: 'general.\x1b[2Jchitectu', which cannot" in refusal(
        escaped, tmp_path
    )


def test_no_damage_is_a_crash(whole: Path, tmp_path: Path) -> None:
    """``python -m tests.damaged_gguf`` tries many more, also of SmolLM2's file."""
    content, end = whole.read_bytes(), read_head(whole).data_start
    refused = 0
    for seed in range(150):
        file = tmp_path / "damaged.gguf"
        file.write_bytes(damage(random.Random(seed), content, end))
        refused += convert(file, tmp_path / "made") is not None
    assert refused > 100


def test_a_file_without_embeddings_is_refused(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes().replace(b"token_embd.weight", b"token_embd.wEight")
    assert refusal(content, tmp_path) == "the file lacks token_embd.weight"


def test_an_absent_file_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        read_head(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        read_head(tmp_path / "empty.gguf")

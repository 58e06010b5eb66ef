"""The tiny checkpoints give the token tests something to compare."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.checkpoint_families import REQUIRED
from tests.checkpoint_weights import LOGIT_STD
from tests.checkpoints import CheckpointCache, make_checkpoint
from tests.reference import reference_generate

ARCHS = ("llama", "qwen2", "qwen3")
# Tied heads without a gate in the MLP, factors on embeddings and logits, experts.
HARDEST = ("gpt2", "cohere", "gemma4_text", "gpt_oss")


@pytest.mark.parametrize("arch", [*REQUIRED, *HARDEST])
def test_greedy_continuations_have_clear_margins_and_do_not_repeat(
    checkpoints: CheckpointCache, arch: str
) -> None:
    path = checkpoints(arch)
    draw = random.Random(0)
    margins, spreads, distinct = [], [], 0
    for _ in range(8):
        prompt = [draw.randrange(4, 4000) for _ in range(16)]
        out = reference_generate(path, prompt, 16)
        margins.append(out.margins)
        spreads.append(out.logprobs.std(-1))
        distinct += len(set(out.token_ids))
    joined = torch.cat(margins)
    assert joined.median() > 0.3
    assert (joined > 1e-3).float().mean() > 0.98
    assert distinct > 8 * 8
    assert float(torch.cat(spreads).mean()) == pytest.approx(LOGIT_STD, rel=0.2)


def test_the_same_arguments_give_the_same_folder_and_bytes(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    cached = checkpoints("llama", num_hidden_layers=2)
    again = make_checkpoint("llama", tmp_path / "again", num_hidden_layers=2)
    assert cached == checkpoints("llama", num_hidden_layers=2)
    weights = "model.safetensors"
    assert (cached / weights).read_bytes() == (again / weights).read_bytes()


def test_overrides_dtype_and_seed_reach_the_checkpoint(checkpoints: CheckpointCache) -> None:
    path = checkpoints("llama", dtype="bfloat16", seed=3, tie_word_embeddings=True)
    config = AutoConfig.from_pretrained(path)
    assert (str(config.dtype), config.tie_word_embeddings) == ("torch.bfloat16", True)
    assert path != checkpoints("llama", dtype="bfloat16", seed=4, tie_word_embeddings=True)


def test_reference_stops_at_the_end_token_only_on_request(checkpoints: CheckpointCache) -> None:
    path = checkpoints("llama", eos_token_id=list(range(4, 4090)))
    assert len(reference_generate(path, [1, 7, 9], 5).token_ids) == 5
    assert len(reference_generate(path, [1, 7, 9], 5, ignore_eos=False).token_ids) == 1


def test_reference_logprobs_are_those_of_the_chosen_tokens(checkpoints: CheckpointCache) -> None:
    out = reference_generate(checkpoints("qwen3"), [1, 7, 9], 4)
    assert out.logprobs.exp().sum(-1) == pytest.approx([1.0] * 4, abs=1e-4)
    assert out.token_logprobs() == pytest.approx(out.logprobs.max(-1).values.tolist())


def test_checkpoints_come_with_the_chat_template(checkpoints: CheckpointCache) -> None:
    for arch in ARCHS:
        tokenizer = AutoTokenizer.from_pretrained(checkpoints(arch))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")

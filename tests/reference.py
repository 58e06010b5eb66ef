"""Greedy continuations by transformers in float32: the independent reference of the token tests.

transformers runs in a process of its own, for an engine wraps some of its classes for good. A
continuation is kept between runs under a hash of the checkpoint, the arguments and this code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests import e4m3
from tests.e4m3 import kept_as_e4m3

_KEPT = Path.home() / ".cache" / "rbln-serve" / "test-references"


@dataclass(frozen=True, slots=True)
class Reference:
    """One greedy continuation of `num_tokens` tokens."""

    token_ids: list[int]
    logprobs: torch.Tensor  # [num_tokens, vocab_size], float32, natural logarithm
    margins: torch.Tensor  # [num_tokens], float32: best logit minus second best

    def token_logprobs(self) -> list[float]:
        rows = torch.arange(len(self.token_ids))
        return [float(x) for x in self.logprobs[rows, torch.tensor(self.token_ids)]]


@lru_cache(maxsize=4)
def _load(path: Path, attention: str | None) -> PreTrainedModel:
    # The class that the checkpoint names: one with images has no class for text alone.
    name = AutoConfig.from_pretrained(path).architectures[0]
    model: PreTrainedModel = getattr(transformers, name).from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def reference_generate(
    path: Path,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    *,
    ignore_eos: bool = True,
    cache_scales: tuple[tuple[float, float], ...] = (),
) -> Reference:
    """Continue the prompt greedily in float32, whatever the dtype of the stored weights.

    With `ignore_eos` false the end-of-sequence token ends the continuation and is its last token.
    With `cache_scales`, of each layer's keys and values, every token sees both as e4m3 keeps them.
    """
    options = (tuple(prompt_token_ids), max_tokens, ignore_eos, cache_scales)
    kept = _KEPT / _code_digest() / f"{_digest(_checkpoint_digest(path), options)}.safetensors"
    if kept.exists():
        tensors = load_file(kept)
        token_ids = tensors.pop("token_ids").tolist()
        return Reference(token_ids, **tensors)
    reference = _process().submit(_generate, path, *options).result()
    _keep(reference, kept)
    return reference


def _keep(reference: Reference, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same.
    part = place.with_suffix(f".{os.getpid()}.part")
    tensors = {
        "token_ids": torch.tensor(reference.token_ids),
        "logprobs": reference.logprobs,
        "margins": reference.margins.contiguous(),
    }
    save_file(tensors, part)
    part.replace(place)


@cache
def _code_digest() -> str:
    sources = [Path(source).read_bytes() for source in (__file__, e4m3.__file__)]
    return _digest(torch.__version__, transformers.__version__, *sources)


def _checkpoint_digest(path: Path) -> str:
    """Return the digest of a checkpoint's files; tests may replace one under the same path."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _digest(
        *((str(x.relative_to(path)), hashlib.sha256(x.read_bytes()).digest()) for x in files)
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def _process() -> ProcessPoolExecutor:
    # The models are tiny: a second thread would only wait.
    return ProcessPoolExecutor(
        1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def _over_e4m3(scales: tuple[tuple[float, float], ...]) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: object, **named: object
    ) -> tuple[Tensor, None]:
        k_scale, v_scale = scales[module.layer_idx]
        kept = (kept_as_e4m3(key, k_scale).float(), kept_as_e4m3(value, v_scale).float())
        return sdpa_attention_forward(module, query, *kept, *rest, **named)

    return attend


_E4M3 = "sdpa_over_e4m3"


def load_over(path: Path, cache_scales: tuple[tuple[float, float], ...]) -> PreTrainedModel:
    """Return transformers' model, over keys and values in e4m3 if there are ``cache_scales``."""
    if not cache_scales:
        return _load(path, None)
    AttentionInterface.register(_E4M3, _over_e4m3(cache_scales))
    AttentionMaskInterface.register(_E4M3, sdpa_mask)
    return _load(path, _E4M3)


@lru_cache(maxsize=256)
def _generate(
    path: Path,
    prompt_token_ids: tuple[int, ...],
    max_tokens: int,
    ignore_eos: bool,
    cache_scales: tuple[tuple[float, float], ...],
) -> Reference:
    model = load_over(path, cache_scales)
    prompt = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None if ignore_eos else model.config.eos_token_id,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(out.logits).float()
    best = logits.topk(2).values
    return Reference(
        token_ids=out.sequences[0, prompt.shape[1] :].tolist(),
        logprobs=logits.log_softmax(-1),
        margins=best[:, 0] - best[:, 1],
    )

"""Tokens visible to each token of a prompt, with and without a window, and to padding."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.attention import EncoderMetadata, RblnAttentionImpl
from rbln_backend.layers.encoder import EncoderAttentionImpl

LENGTH = 12


def prefill(count: int) -> EncoderMetadata:
    last = torch.tensor([count - 1])
    return EncoderMetadata(batch_size=1, query_len=LENGTH, is_prefill=True, last_row=last)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("count", [1, 5, LENGTH])
def test_rows_see_the_prompt_near_them(window: int | None, count: int) -> None:
    impl = EncoderAttentionImpl(2, 8, 1.0, sliding_window=window)
    visible = impl._visible(prefill(count)).expand(1, 1, LENGTH, LENGTH)[0, 0]
    for row in range(count):
        near = [c for c in range(count) if window is None or abs(c - row) < window]
        assert visible[row].nonzero().flatten().tolist() == near
    # Torch makes zeros of a row that sees nothing; another device's softmax may make NaN.
    assert visible.any(dim=1).all()


def test_padding_holds_anything_and_reaches_nothing() -> None:
    impl = EncoderAttentionImpl(4, 8, 0.3, num_kv_heads=2, sliding_window=4)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(LENGTH, heads, 8, generator=generator) for heads in (4, 2, 2))

    def attend(count: int) -> torch.Tensor:
        found = impl.forward(None, q, k, v, torch.empty(0), prefill(count), torch.empty_like(q))
        return found[:count].clone()

    before = attend(6)
    for tensor in (q, k, v):
        tensor[6:] = 1e30
    assert torch.equal(attend(6), before)


# ------------------------------------------------------------------------------------------ options
def test_options_without_an_effect_are_accepted_and_unknown_ones_refused() -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = RblnAttentionImpl(4, 32, 0.125, layer_idx=3, mm_prefix_clamp_sliding_window=True)
    assert layer.num_kv_heads == 4
    with pytest.raises(UnsupportedModelError, match="with chunk_lookback"):
        RblnAttentionImpl(4, 32, 0.125, chunk_lookback=2, layer_idx=3)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_custom_kernels_have_no_caches_of_e4m3(name: str) -> None:
    custom = VllmConfig(additional_config={"rbln": {"use_custom_kernel": True}})
    with set_current_vllm_config(custom), pytest.raises(UnsupportedModelError, match=name):
        RblnAttentionImpl(4, 32, 0.125, kv_cache_dtype=name)
    with set_current_vllm_config(VllmConfig()):
        RblnAttentionImpl(4, 32, 0.125, kv_cache_dtype=name)

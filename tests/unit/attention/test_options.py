"""Options of an attention layer beyond plain causal attention."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig, set_current_vllm_config

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.attention import RblnAttentionImpl


def test_an_option_we_do_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="with chunk_lookback"):
        RblnAttentionImpl(4, 32, 0.125, chunk_lookback=2, layer_idx=3)


def test_options_without_an_effect_are_accepted() -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = RblnAttentionImpl(4, 32, 0.125, layer_idx=3, mm_prefix_clamp_sliding_window=True)
    assert layer.num_kv_heads == 4


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_custom_kernels_have_no_caches_of_e4m3(name: str) -> None:
    custom = VllmConfig(additional_config={"rbln": {"use_custom_kernel": True}})
    with set_current_vllm_config(custom), pytest.raises(UnsupportedModelError, match=name):
        RblnAttentionImpl(4, 32, 0.125, kv_cache_dtype=name)
    with set_current_vllm_config(VllmConfig()):
        RblnAttentionImpl(4, 32, 0.125, kv_cache_dtype=name)

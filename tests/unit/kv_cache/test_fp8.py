"""Scales of layers that share a cache, and the log of scales."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rbln_backend.devices.emulated.memory import HostKvMemory
from rbln_backend.kv_cache.tensors import KvCaches


def layer(k_scale: float, v_scale: float, owner: str | None = None) -> Any:
    return SimpleNamespace(
        kv_cache=None,
        kv_cache_dtype="fp8",
        kv_sharing_target_layer_name=owner,
        _k_scale=torch.tensor(k_scale),
        _v_scale=torch.tensor(v_scale),
    )


def test_a_shared_cache_is_read_by_its_owners_scales(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {name: torch.zeros(2, dtype=torch.float8_e4m3fn) for name in ("plain", "owner")}
    layers = {
        "plain": layer(1.0, 1.0),
        "owner": layer(0.5, 0.25),
        "reader": layer(1.0, 1.0, owner="owner"),
    }
    with caplog.at_level(logging.INFO):
        KvCaches(HostKvMemory(), tensors, [], {}).bind(layers)
    assert layers["reader"].kv_cache is tensors["owner"]
    # The same tensors: a graph knows them by their identity.
    assert layers["reader"]._k_scale is layers["owner"]._k_scale
    assert layers["reader"]._v_scale is layers["owner"]._v_scale
    assert float(layers["plain"]._k_scale) == 1.0
    assert "2 of 3 layers have scales from the checkpoint" in caplog.text

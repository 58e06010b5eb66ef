"""`RblnConfig` refuses what it cannot honour and survives the trip to a worker."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import VllmConfig

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.settings import EngineSettings, resolve

STRATEGY, BUCKETS = "decode_batch_bucket_strategy", "decode_batch_bucket_manual_buckets"


def from_options(**options: object) -> RblnConfig:
    return resolve({"rbln": options}, {}).config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "Invalid device: 'gpu', Valid choices: auto, emulated, rebel"),
        ({"device": ""}, "Invalid device: '', Valid choices: auto, emulated, rebel"),
        ({"kernels": "avx"}, "Invalid kernels: 'avx', Valid choices: auto, native, aten"),
        ({"hot_path_policy": "ignore"}, "Valid choices: error, warn"),
        ({"sampler": "true"}, "Invalid sampler: 'true', Valid choices: true, false"),
        ({"sampler": 1}, "Invalid sampler: 1, Valid choices: true, false"),
        ({"num_threads": 0}, "num_threads: 0, must be greater than 0 (from additional_config)"),
        ({"decode_batch_bucket_step": True}, "bucket_step: True, must be a valid integer"),
        ({"decode_batch_bucket_limit": "4"}, "bucket_limit: '4', must be a valid integer"),
        ({"num_threads": -1}, "num_threads: -1, must be greater than 0"),
        ({"decode_batch_bucket_step": 1}, "step must be greater than 1, step: 1"),
        ({STRATEGY: "quadratic"}, "Valid choices: exponential, exp, linear, manual"),
        ({STRATEGY: "manual"}, f"{STRATEGY}='manual' needs at least one entry in"),
        ({BUCKETS: [0, 4]}, f"{BUCKETS}: [0, 4], each must be greater than 0"),
        ({BUCKETS: [4, 4]}, f"{BUCKETS}: [4, 4], all must be unique"),
        ({BUCKETS: "1,2"}, f"{BUCKETS}: '1,2', must be a list"),
        ({BUCKETS: [1, "2"]}, "each must be a valid integer"),
        ({"prefill_chunk_buckets": []}, "prefill_chunk_buckets: [], must have at least one entry"),
        ({"zzz": 1}, "Unknown option 'zzz' in additional_config; known names: auto_port, cache_bu"),
        ({"cache_root": "~no-such-user/cache"}, "set VLLM_CACHE_ROOT"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_choices(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_options(**options)
    assert message in str(caught.value)


def test_the_cache_root_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert RblnConfig().cache_root == "/home/someone/.cache/vllm"
    assert RblnConfig(cache_root="here").cache_root == str(tmp_path / "here")


def test_a_config_survives_json() -> None:
    buckets: dict[str, Any] = {STRATEGY: "manual", BUCKETS: (1, 3, 8)}
    more = {"prefill_chunk_buckets": (16, 64), "force_npu_name": "RBLN-CR13", "run_dir": "/run/x"}
    config = RblnConfig(**buckets, **more)
    assert from_options(**json.loads(json.dumps(config.to_dict()))) == config


def test_vllm_carries_the_config_as_it_is_and_tells_it_from_others() -> None:
    others = {"other_plugin": {"x": 1}}
    config = VllmConfig()
    config.additional_config = EngineSettings(RblnConfig(num_threads=3), 2, others)
    again = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert again.additional_config == config.additional_config
    first = config.compute_hash()
    config.additional_config = EngineSettings(RblnConfig(num_threads=4), 2, others)
    assert config.compute_hash() != first
    config.additional_config = EngineSettings(RblnConfig(num_threads=3), 2, others)
    assert config.compute_hash() == first


def test_a_config_cannot_change() -> None:
    config = RblnConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.device = "rebel"  # type: ignore[misc]


def test_only_what_changes_a_graph_is_a_graph_field() -> None:
    names = """use_custom_kernel enforce_model_fp32 num_devices_per_local_rank moe_use_opt_kernel
    moe_custom_kernel use_moe_tokens_mask use_w8a8 sampler"""
    assert set(RblnConfig().graph_fields()) == {*names.split()}


def test_a_graph_field_changes_with_its_option() -> None:
    changed = RblnConfig(use_custom_kernel=True).graph_fields()
    assert changed == {**RblnConfig().graph_fields(), "use_custom_kernel": True}

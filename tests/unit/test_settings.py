"""Documented variable names resolve into the config with the documented precedence."""

import re
from pathlib import Path
from typing import get_args

import pytest

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.settings import OPTION_NAMES, VARIABLES, Status, resolve
from tests.sdk_double.launch import install_metadata

DOCUMENTED = """
VLLM_RBLN_COMPILE_MODEL VLLM_RBLN_COMPILE_STRICT_MODE VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK
VLLM_RBLN_TP_SIZE VLLM_RBLN_SAMPLER VLLM_RBLN_NUM_HIDDEN_LAYERS VLLM_RBLN_DISABLE_WORKER_FAIL_FAST
VLLM_RBLN_USE_DYNAMIC_KV_CACHE VLLM_RBLN_USE_W8A8 VLLM_RBLN_ENABLE_WARM_UP
VLLM_RBLN_USE_NESTED_COMPILE_REGION VLLM_RBLN_USE_VLLM_MODEL VLLM_RBLN_SPECIALIZE_MOE_DECODE
VLLM_RBLN_FLASH_CAUSAL_ATTN VLLM_RBLN_BATCH_ATTN_OPT VLLM_RBLN_DISABLE_MM VLLM_RBLN_DP_IMPL
VLLM_RBLN_USE_MOE_TOKENS_MASK VLLM_RBLN_ENFORCE_MODEL_FP32 VLLM_RBLN_DP_INPUT_ALL_GATHER
VLLM_RBLN_LOGITS_ALL_GATHER VLLM_RBLN_NUM_RAY_NODES VLLM_RBLN_METRICS VLLM_RBLN_METRICS_FILE
VLLM_RBLN_NUMA VLLM_RBLN_SORT_BATCH VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY
VLLM_RBLN_DECODE_BATCH_BUCKET_MIN VLLM_RBLN_DECODE_BATCH_BUCKET_STEP
VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS
RBLN_USE_CUSTOM_KERNEL VLLM_RBLN_AUTO_PORT VLLM_RBLN_DISPATCH_ALL2ALL VLLM_RBLN_COMBINE_ALL2ALL
VLLM_RBLN_MOE_REDUCE_SCATTER VLLM_RBLN_SUB_BLOCK_CACHE VLLM_RBLN_USE_DEVICE_TENSOR
VLLM_RBLN_DISABLE_OFFLOAD VLLM_RBLN_COMPILE_ONLY RBLN_PROFILER VLLM_RBLN_MOE_CUSTOM_KERNEL
VLLM_RBLN_MOE_USE_OPT_KERNEL VLLM_RBLN_METRICS_DIR VLLM_RBLN_BACKFILL_TRACE_REQS
RBLN_FORCE_NPU_NAME RBLN_TARGET_SOC RBLN_KERNEL_MODE RBLN_NUM_THREADS RBLN_NPUS_PER_DEVICE
VLLM_CACHE_ROOT VLLM_DISABLE_COMPILE_CACHE VLLM_LOG_BATCHSIZE_INTERVAL
""".split()
"""Of vllm-rbln 0.12, vLLM and the SDK."""
BUCKET = "VLLM_RBLN_DECODE_BATCH_BUCKET_"


def config_of(environ: dict[str, str], **options: object) -> RblnConfig:
    return resolve({"rbln": options}, environ).config


def error_of(environ: dict[str, str], **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({"rbln": options}, environ)
    return str(caught.value)


def test_every_documented_name_is_known_once() -> None:
    names = [var.name for var in VARIABLES]
    assert len(names) == len({*names})
    assert {*DOCUMENTED} | {*OPTION_NAMES.values()} <= {*names}


def test_each_row_targets_a_field_or_says_why_not() -> None:
    without = (Status.NO_EFFECT, Status.REFUSED, Status.OF_SDK)
    for var in VARIABLES:
        assert var.field in RblnConfig.model_fields or var.status in without, var.name


def test_every_option_but_those_of_the_host_has_a_variable() -> None:
    without = """run_dir max_queue_ms prefill_step_tokens prefill_policy max_num_partial_prefills
    kv_cache_pages verify_lengths verify_tokens sample_on_device
    kv_tier_memory_bytes kv_tier_folder kv_tier_folder_bytes"""
    reachable = {var.field for var in VARIABLES}
    assert set(RblnConfig.model_fields) - reachable == {*without.split()}


@pytest.mark.parametrize(
    ("value", "spellings"), [(True, "true 1 yes on True ON"), (False, "false 0 no off FALSE Off")]
)
def test_a_truth_has_four_spellings(value: bool, spellings: str) -> None:
    for raw in spellings.split():
        for name in ("strict_mode", "enable_warm_up"):
            variable = {"strict_mode": "COMPILE_STRICT_MODE"}.get(name, name.upper())
            assert getattr(config_of({f"VLLM_RBLN_{variable}": raw}), name) is value


@pytest.mark.parametrize(
    ("name", "raw", "field", "value"),
    [
        ("VLLM_RBLN_DEVICE", "Rebel", "device", "rebel"),
        ("VLLM_RBLN_KERNELS", "aten", "kernels", "aten"),
        ("VLLM_RBLN_COMPILE_STRICT_MODE", "0", "strict_mode", False),
        ("VLLM_RBLN_USE_DEVICE_TENSOR", "0", "use_device_tensor", False),
        ("VLLM_RBLN_AUTO_PORT", "0", "auto_port", False),
        ("VLLM_RBLN_ENABLE_WARM_UP", "0", "enable_warm_up", False),
        ("VLLM_RBLN_HOT_PATH_POLICY", "warn", "hot_path_policy", "warn"),
        (f"{BUCKET}STRATEGY", "Exp", "decode_batch_bucket_strategy", "exponential"),
        (f"{BUCKET}STRATEGY", "LINEAR", "decode_batch_bucket_strategy", "linear"),
        (f"{BUCKET}MIN", "2", "decode_batch_bucket_min", 2),
        (f"{BUCKET}STEP", "4", "decode_batch_bucket_step", 4),
        (f"{BUCKET}LIMIT", "8", "decode_batch_bucket_limit", 8),
        (f"{BUCKET}MANUAL_BUCKETS", "8, 1,4", "decode_batch_bucket_manual_buckets", (1, 4, 8)),
        (f"{BUCKET}MANUAL_BUCKETS", "", "decode_batch_bucket_manual_buckets", ()),
        ("VLLM_RBLN_PREFILL_CHUNK_BUCKETS", "16,128", "prefill_chunk_buckets", (16, 128)),
        ("VLLM_RBLN_PREFILL_PROMPTS", "4", "prefill_prompts", 4),
        ("VLLM_RBLN_DECODE_STEPS_PER_CHUNK", "0", "decode_steps_per_chunk", 0),
        ("VLLM_CACHE_ROOT", "/cache", "cache_root", "/cache"),
        ("XDG_CACHE_HOME", "/xdg", "cache_root", "/xdg/vllm"),
        ("XDG_CACHE_HOME", "", "cache_root", RblnConfig().cache_root),
        ("VLLM_RBLN_CACHE_MAX_BYTES", "1000", "cache_max_bytes", 1000),
        ("VLLM_RBLN_CACHE_READ_ONLY", "yes", "cache_read_only", True),
        ("VLLM_RBLN_CACHE_BUNDLES", "/a:/b:", "cache_bundles", ("/a", "/b")),
        ("VLLM_DISABLE_COMPILE_CACHE", "1", "disable_compile_cache", True),
        ("VLLM_RBLN_DISABLE_MM", "1", "disable_mm", True),
        ("VLLM_RBLN_SAMPLER", "no", "sampler", False),
        ("RBLN_USE_CUSTOM_KERNEL", "1", "use_custom_kernel", True),
        ("RBLN_KERNEL_MODE", "triton", "use_custom_kernel", True),
        ("VLLM_RBLN_ENFORCE_MODEL_FP32", "1", "enforce_model_fp32", True),
        ("VLLM_RBLN_SUB_BLOCK_CACHE", "0", "sub_block_cache", False),
        ("VLLM_RBLN_SUB_BLOCK_SIZE", "32", "sub_block_size", 32),
        ("VLLM_RBLN_WINDOW_PREFIX_CACHE", "no", "window_prefix_cache", False),
        ("VLLM_RBLN_WINDOW_PREFIX_TOKENS", "4096", "window_prefix_tokens", 4096),
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "0.5", "log_batchsize_interval", 0.5),
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "60", "log_batchsize_interval", 60.0),
        ("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", "4", "num_devices_per_local_rank", 4),
        ("VLLM_RBLN_TP_SIZE", "2", "num_devices_per_local_rank", 2),
        ("RBLN_FORCE_NPU_NAME", "RBLN-CR13", "force_npu_name", "RBLN-CR13"),
        ("RBLN_TARGET_SOC", "RBLN-CA25", "force_npu_name", "RBLN-CA25"),
        ("RBLN_PROFILER", "true", "profiler", True),
        ("RBLN_NUM_THREADS", "6", "num_threads", 6),
        ("OMP_NUM_THREADS", "3,2", "num_threads", 3),
        ("VLLM_RBLN_MOE_USE_OPT_KERNEL", "0", "moe_use_opt_kernel", False),
        ("VLLM_RBLN_MOE_CUSTOM_KERNEL", "0", "moe_custom_kernel", False),
        ("VLLM_RBLN_USE_MOE_TOKENS_MASK", "0", "use_moe_tokens_mask", False),
        ("VLLM_RBLN_USE_W8A8", "1", "use_w8a8", True),
    ],
)
def test_each_honoured_name_sets_its_field(name: str, raw: str, field: str, value: object) -> None:
    assert getattr(config_of({name: raw}), field) == value


def test_the_table_of_values_above_covers_every_field_a_variable_sets() -> None:
    marks = test_each_honoured_name_sets_its_field.pytestmark  # type: ignore[attr-defined]
    covered = {case[0] for case in marks[0].args[1]}
    assert covered == {var.name for var in VARIABLES if var.field is not None}


def test_additional_config_wins_over_the_environment_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {f"{BUCKET}LIMIT": "4", f"{BUCKET}MIN": "3", "RBLN_VISIBLE_DEVICES": "0,1"}
    additional = {"rbln": {"decode_batch_bucket_limit": 2}, "gdn_prefill_backend": "triton"}
    config = resolve(additional, environ | {"PATH": "/bin"}).config
    assert (config.decode_batch_bucket_limit, config.decode_batch_bucket_min) == (2, 3)
    # In a worker it resolves to itself.
    assert resolve({"rbln": config.to_dict()}, {}).config == config
    # The process environment is read when none is given.
    monkeypatch.setenv(f"{BUCKET}LIMIT", "3")
    assert resolve(None).config.decode_batch_bucket_limit == 3


@pytest.mark.parametrize(("sdk", "is_known"), [("0.12.0", True), ("0.12.1.dev288", False)])
def test_a_newer_sdk_may_have_variables_of_its_own(
    sdk: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install_metadata(tmp_path, sdk)))
    environ = {"VLLM_RBLN_OF_TOMORROW": "1"}
    if is_known:
        assert "VLLM_RBLN_OF_TOMORROW" in error_of(environ)
    else:
        (warning,) = resolve({}, environ).warnings
        assert "VLLM_RBLN_OF_TOMORROW" in warning
        assert sdk in warning


@pytest.mark.parametrize(
    ("name", "value", "known", "later"),
    [
        ("VLLM_RBLN_METRICS_FILE", "m.json", "no effect: Metrics", "is gone, and has no effect"),
        (
            "VLLM_RBLN_BATCH_ATTN_OPT",
            "1",
            "no effect: One",
            "BATCH_ATTN_OPT=1: .* SDK 0.12.1.*gone",
        ),
        ("VLLM_RBLN_USE_NESTED_COMPILE_REGION", "1", "compiled whole", "compiled whole"),
        ("RBLN_NPUS_PER_DEVICE", "1", None, None),
        ("RBLN_NPUS_PER_DEVICE", "2", None, "error: .*=2: with RBLN SDK 0.12.1.* one NPU"),
    ],
)
def test_names_follow_the_sdk(
    name: str,
    value: str,
    known: str | None,
    later: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said() -> str | None:
        try:
            return "; ".join(resolve({}, {name: value}).warnings) or None
        except ConfigError as error:
            return f"error: {error}"

    for sdk, wanted in (("0.12.0", known), ("0.12.1a8", later)):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(install_metadata(tmp_path, sdk)))
            message = said()
        assert (message is None) == (wanted is None), message
        assert wanted is None or re.search(wanted, str(message)), message


def test_flat_keys_are_read_as_vllm_rbln_reads_them() -> None:
    flat = {"decode_batch_bucket_limit": 4, "use_w8a8": True, "use_dynamic_kv_cache": True}
    flat |= {"kda_prefill_backend": "triton"}
    resolved = resolve({**flat, "rbln": {"device": "emulated"}}, {})
    assert resolved.config.decode_batch_bucket_limit == 4
    assert resolved.config.device == "emulated"
    assert resolved.config.use_w8a8
    assert len(resolved.warnings) == 1
    assert resolved.warnings[0].startswith("use_dynamic_kv_cache has no effect")


def test_an_error_across_fields_says_where_they_came_from() -> None:
    message = error_of({f"{BUCKET}STRATEGY": "manual"})
    assert "There must be at least one decode batch size in the manual buckets" in message
    assert f"decode_batch_bucket_strategy from environment {BUCKET}STRATEGY" in message


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [
        ("VLLM_RBLN_USE_VLLM_MODEL", "0", "1"),
        ("VLLM_RBLN_COMPILE_MODEL", "false", "true"),
        ("VLLM_RBLN_COMPILE_ONLY", "1", "0"),
        ("VLLM_RBLN_DISPATCH_ALL2ALL", "1", "0"),
        ("VLLM_RBLN_COMBINE_ALL2ALL", "true", "false"),
        ("VLLM_RBLN_DP_IMPL", "dummy_prefill", "PADDED_DECODE"),
    ],
)
def test_a_refused_name_accepts_only_what_is_done_anyway(
    name: str, refused: str, accepted: str
) -> None:
    assert error_of({name: refused}).startswith(f"{name}={refused} is not supported: ")
    assert resolve(None, {name: accepted}).warnings == []


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("VLLM_RBLN_NUM_HIDDEN_LAYERS", "0", "2"),
        ("VLLM_RBLN_DISABLE_WORKER_FAIL_FAST", "0", "1"),
        ("VLLM_RBLN_USE_DYNAMIC_KV_CACHE", "0", "1"),
        ("VLLM_RBLN_FLASH_CAUSAL_ATTN", "1", "0"),
    ],
)
def test_a_variable_without_effect_warns_only_if_an_effect_is_missed(
    name: str, usual: str, other: str
) -> None:
    assert resolve(None, {name: usual}).warnings == []
    (warning,) = resolve(None, {name: other}).warnings
    assert warning.startswith(f"{name} has no effect: ")


BOOLEANS = "Valid choices: true, 1, yes, on, false, 0, no, off"
STRATEGIES = get_args(RblnConfig.model_fields["decode_batch_bucket_strategy"].annotation)
BOTH = "'device' is in additional_config and in additional_config['rbln']; give one of them"


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        *(("VLLM_RBLN_SAMPLER", raw, BOOLEANS) for raw in ("", "2", "truee", "enable", "None")),
        # Without an effect, but checked.
        ("VLLM_RBLN_NUMA", "maybe", BOOLEANS),
        ("VLLM_RBLN_DP_IMPL", "none", "Valid choices: padded_decode, dummy_prefill"),
        (f"{BUCKET}STRATEGY", "Geometric", f"Valid choices: {', '.join(STRATEGIES)}"),
        (f"{BUCKET}MANUAL_BUCKETS", "1,0", "each must be greater than 0"),
        (f"{BUCKET}MANUAL_BUCKETS", "4,4", "all must be unique"),
        (f"{BUCKET}MANUAL_BUCKETS", "1,x", "each must be a valid integer"),
        *((f"{BUCKET}LIMIT", raw, "must be greater than 0") for raw in ("0", "-1")),
        ("RBLN_NUM_THREADS", "many", "must be a valid integer"),
    ],
)
def test_an_invalid_value_is_named_with_its_variable(name: str, raw: str, reason: str) -> None:
    assert error_of({name: raw}) == f"Invalid {name}: {raw}, {reason}"


@pytest.mark.parametrize(
    ("environ", "additional", "message"),
    [
        # Also a value that another wins over.
        (
            {"VLLM_RBLN_TP_SIZE": "0"},
            {"num_devices_per_local_rank": 2},
            "Invalid VLLM_RBLN_TP_SIZE: 0, must be greater than 0",
        ),
        # The name of `device` is part of the other's.
        (
            {"VLLM_RBLN_DEVICE": "emulated"},
            {"num_devices_per_local_rank": 0},
            "Invalid num_devices_per_local_rank: 0, must be greater than 0 "
            "(from additional_config)",
        ),
        (
            {f"{BUCKET}STRATGY": "exp"},
            {},
            f"Unknown environment variable {BUCKET}STRATGY; did you mean '{BUCKET}STRATEGY'?",
        ),
        (
            {},
            {"rbln": {"decode_batch_bucket_limits": 2}},
            "Unknown option 'decode_batch_bucket_limits' in additional_config; "
            "did you mean 'decode_batch_bucket_limit'?",
        ),
        ({}, {"decode_batch_bucket_limits": 4}, "Unknown option 'decode_batch_bucket_limits'"),
        ({}, {"other_plugin": {"x": 1}}, "Unknown option 'other_plugin' in additional_config"),
        ({}, {"device": "emulated", "rbln": {"device": "rebel"}}, BOTH),
        ({}, {"rbln": 3}, "Invalid additional_config['rbln']: 3, must be an object"),
    ],
)
def test_an_error_names_its_source(
    environ: dict[str, str], additional: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(additional, environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("environ", "options", "fields", "warnings"),
    [
        ({}, {}, {}, []),
        (
            {"VLLM_RBLN_METRICS": "1"},
            {},
            {},
            ["VLLM_RBLN_METRICS has no effect: Metrics are always on, at `/metrics`."],
        ),
        (
            {"VLLM_RBLN_TP_SIZE": "2"},
            {},
            {"num_devices_per_local_rank": 2},
            ["VLLM_RBLN_TP_SIZE is deprecated, use VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK"],
        ),
        (
            {"RBLN_TARGET_SOC": "RBLN-CA25", "RBLN_FORCE_NPU_NAME": "RBLN-CR13"},
            {},
            {"force_npu_name": "RBLN-CR13"},
            ["RBLN_TARGET_SOC is ignored because RBLN_FORCE_NPU_NAME is set"],
        ),
        ({"XDG_CACHE_HOME": "/xdg", "VLLM_CACHE_ROOT": "/vllm"}, {}, {"cache_root": "/vllm"}, []),
        # Names of vllm-rbln.
        (
            {},
            {"use_custom_sampler": False, "use_batch_attn_opt": True},
            {"sampler": False},
            ["use_batch_attn_opt has no effect: One attention op serves every batch."],
        ),
    ],
)
def test_what_is_set_and_said(
    environ: dict[str, str],
    options: dict[str, object],
    fields: dict[str, object],
    warnings: list[str],
) -> None:
    resolved = resolve({"rbln": options} if options else None, environ)
    assert resolved.config == RblnConfig(**fields)  # type: ignore[arg-type]
    assert resolved.warnings == warnings

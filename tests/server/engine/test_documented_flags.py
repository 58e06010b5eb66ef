"""The command lines of vLLM's documents: taken, translated, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.frontend import LaunchError
from tests.checkpoints import CheckpointCache
from tests.server.engine.test_config import configured

pytestmark = pytest.mark.engine

DEFAULT_BUCKETS: tuple[str, tuple[int, ...]] = ("exponential", ())


def buckets(config: Any) -> tuple[str, tuple[int, ...]]:
    rbln = config.additional_config.rbln
    return rbln.decode_batch_bucket_strategy, rbln.decode_batch_bucket_manual_buckets


def test_the_documented_command_line_is_taken(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    flags = "--max-model-len 256 --max-num-seqs 8 --block-size 1024"
    more = "--enable-chunked-prefill --max-num-batched-tokens 128"
    config = configured(checkpoints("llama"), tmp_path, *flags.split(), *more.split())
    assert config.cache_config.block_size == 1024
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.scheduler_config.max_num_seqs == 8
    assert config.scheduler_config.enable_chunked_prefill


@pytest.mark.parametrize(
    "flags",
    [
        ("-O3",),
        ("-O", "3"),
        ("-O=3",),
        ("-O2",),
        ("-cc", '{"mode": 3, "cudagraph_mode": "NONE"}'),
        ("-cc.mode=3",),
        ("--no-async-scheduling",),
        ("--async-scheduling",),
        ("--kv-cache-dtype", "auto"),
        ("--kv-cache-dtype", "bfloat16", "--dtype", "bfloat16"),
    ],
)
def test_what_is_done_anyway_may_be_asked_for(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = configured(checkpoints("llama"), tmp_path, *flags)
    assert buckets(config) == DEFAULT_BUCKETS
    assert config.compilation_config.mode.name == "NONE"


# FLAGS of the real server allow four requests.
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--compilation-config", '{"mode": 3, "compile_sizes": [1]}'), (1, 4)),
        (('--compilation-config={"compile_sizes": [3, 4, 232, 256]}',), (3, 4)),
        (("-cc", '{"compile_sizes": [2, 1]}'), (1, 2, 4)),
        (("-cc", '{"compile_sizes": [2]}'), (2, 4)),
    ],
)
def test_sizes_to_compile_become_decode_buckets(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    flags: tuple[str, ...],
    expected: tuple[int, ...],
) -> None:
    config = configured(checkpoints("llama"), tmp_path, *flags)
    assert buckets(config) == ("manual", expected)


def test_stages_of_a_pipeline_share_the_largest_bucket(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    flags = ("-cc", '{"compile_sizes": [1, 4]}', "--pipeline-parallel-size", "2")
    assert buckets(configured(checkpoints("llama"), tmp_path, *flags)) == ("manual", (1, 2))


BUCKETS = json.dumps({"rbln": {"decode_batch_bucket_step": 3}})
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--enforce-eager",), "--enforce-eager is not supported: there is no eager path"),
    (("-O0",), r"--optimization-level 0 \(-O0\) is not supported: there is no eager path"),
    (("-cc.mode=0",), r"mode must be 3, got 0 \(NONE\)"),
    (("-cc.mode=1",), r"mode must be 3, got 1 \(STOCK_TORCH_COMPILE\)"),
    (("-cc", '{"backend": "inductor"}'), "backend='inductor' is not supported"),
    (
        ("--cudagraph-capture-sizes", "1", "2"),
        r"--compilation-config: cudagraph_capture_sizes=\[1, 2\] is not supported",
    ),
    (
        ("-cc", '{"compile_sizes": ["cudagraph_capture_sizes"]}'),
        r"compile_sizes must be integers above 0, got \['cudagraph_capture_sizes'\]",
    ),
    (
        ("-cc", '{"compile_sizes": [2]}', "--additional-config", BUCKETS),
        "decode_batch_bucket_step of --additional-config both set the decode buckets",
    ),
    (("--device-ids", "0"), "--device-ids: the emulated device has no numbers"),
    (
        ("--kv-cache-dtype", "fp8_e5m2"),
        "--kv-cache-dtype fp8_e5m2: a KV cache in this dtype: not supported",
    ),
    (("--kv-cache-dtype", "float16"), "--kv-cache-dtype float16: a KV cache in this dtype"),
    (
        ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"),
        "--kv-cache-dtype-skip-layers: a KV cache in this dtype",
    ),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_is_not_done_is_refused_by_name(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises((LaunchError, ValueError), match=said):
        configured(checkpoints("llama"), tmp_path, *flags)


def test_latent_attention_keeps_what_the_model_computes(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    with pytest.raises((LaunchError, ValueError), match="fp8: a KV cache in this dtype"):
        configured(checkpoints("deepseek_v2"), tmp_path, "--kv-cache-dtype", "fp8")


def test_python_asks_in_the_same_words(checkpoints: CheckpointCache) -> None:
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.engine.arg_utils import AsyncEngineArgs

    def config(**options: Any) -> Any:
        args = {"model": str(checkpoints("llama")), "max_num_seqs": 4, "max_model_len": 256}
        return AsyncEngineArgs(**args, **options).create_engine_config()

    asked = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, compile_sizes=[1])
    assert buckets(config(compilation_config=asked)) == ("manual", (1, 4))
    with pytest.raises(ValueError, match="--enforce-eager is not supported"):
        config(enforce_eager=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_inc"):
        config(kv_cache_dtype="fp8_inc")

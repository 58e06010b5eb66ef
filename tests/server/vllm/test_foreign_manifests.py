"""Arguments of manifests of llm-d and KServe, which run `vllm serve`, are taken as they are."""

from __future__ import annotations

import pytest

from server.commands.flags import server_parser, settings_of, split
from tests.checkpoints import CheckpointCache

pytestmark = pytest.mark.engine

ENDPOINTS = "--disable-access-log-for-endpoints=/health,/metrics,/v1/models"
# Of llm-d/llm-d, guides/optimized-baseline/modelserver/{gpu,npu}/vllm (the latter is Rebellions'
# own, with a shorter context), and of kserve/kserve, config/llmisvcconfig/config-llm-template.yaml,
# with its later --shutdown-timeout.
LLM_D_GPU = (ENDPOINTS, "--tensor-parallel-size=1")
LLM_D_NPU = (
    *("--served-model-name=openai/gpt-oss-120b", ENDPOINTS, "--max-model-len=128"),
    *("--block-size=4096", "--enable-chunked-prefill", "--max-num-batched-tokens=512"),
    *("--no-enable-prefix-caching", "--num-gpu-blocks-override=34", "--max-num-seqs=1"),
)
KSERVE = ("--served-model-name", "name", "--port", "8000", "--shutdown-timeout", "30")


@pytest.mark.parametrize(
    ("flags", "drain_s"),
    [(LLM_D_GPU, None), (LLM_D_NPU, None), (KSERVE, 30)],
    ids=["llm-d", "llm-d-rbln", "kserve"],
)
def test_arguments_are_taken(
    checkpoints: CheckpointCache, flags: tuple[str, ...], drain_s: float | None
) -> None:
    from server.vllm.flags import parse_arguments

    parser = server_parser("serve")
    ours, rest = split(parser, [str(checkpoints("llama")), *flags])
    settings = settings_of(parser, ours, rest)
    args = parse_arguments(rest, settings)
    assert args.port == 8000
    if drain_s is not None:
        assert settings.drain_timeout_s == drain_s

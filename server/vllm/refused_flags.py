"""Flags of `vllm serve` that this server refuses, with the reasons.

Imports nothing of vLLM, so that the documents are generated without it.
"""

from __future__ import annotations

_OURS = "this server has its own: see `rbln-serve serve --help`"
_ABSENT = "this server does not offer it"
REFUSED_FLAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "uvicorn_log_level",
            "disable_uvicorn_access_log",
            "disable_access_log_for_endpoints",
            "h11_max_incomplete_event_size",
            "h11_max_header_count",
            "shutdown_timeout",
        ),
        _OURS,
    ),
    **dict.fromkeys(
        (
            "headless",
            "grpc",
            "api_server_count",
            "data_parallel_multi_port_external_lb",
            "uds",
            "middleware",
            "enable_offline_docs",
            "enable_tokenizer_info_endpoint",
            "enable_server_load_tracking",
            "enable_scale_out",
            "tokens_only",
            "enable_fault_tolerance",
            "cohere_is_reasoning_model",
            "cohere_format",
            "default_mm_loras",
        ),
        _ABSENT,
    ),
    "enable_prompt_embeds": "prompts are texts or token ids",
    "device_ids": "RBLN_VISIBLE_DEVICES names the devices",
}
"""vLLM flags that would be accepted and then ignored, with the reason that is given."""

"""Flags of `vllm serve` outside of the engine that this server refuses, renames or fulfils.

Imports nothing of vLLM, so that the documents are generated without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_ABSENT = "this server does not offer it"
REFUSED_FLAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "headless",
            "grpc",
            "api_server_count",
            "data_parallel_multi_port_external_lb",
            "uds",
            "middleware",
            "enable_offline_docs",
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
    "h11_max_header_count": "--max-header-bytes bounds the headers",
}
"""vLLM flags that would be accepted and then ignored, with the reason that is given."""

FULFILLED_VALUES: Mapping[str, Collection[object]] = {"api_server_count": (1,)}
"""Values of refused flags that ask for what this server does."""

RENAMED_FLAGS: Mapping[str, str] = {
    "shutdown_timeout": "drain_timeout_s",
    "h11_max_incomplete_event_size": "max_header_bytes",
}
"""vLLM flags that are settings of this server, with its names."""

FULFILLED_FLAGS: Mapping[str, str] = {
    "disable_uvicorn_access_log": "finished requests are not logged",
    "disable_access_log_for_endpoints": "finished requests of these routes are not logged",
    "enable_server_load_tracking": "`/load` is always there",
    "uvicorn_log_level": "level of the HTTP server's own messages; unset, `warning`",
}
"""vLLM flags that are accepted, with what they lead to."""

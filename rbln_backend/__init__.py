"""The vLLM platform plugin for RBLN devices; importing it loads nothing heavy."""

from __future__ import annotations


def register() -> str:
    """Return the dotted path of the platform class, as `vllm.platform_plugins` asks for."""
    from rbln_backend.vllm_compat.log import drop_expected_warnings

    drop_expected_warnings()
    return "rbln_backend.platform.RblnPlatform"

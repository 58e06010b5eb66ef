"""vLLM platform plug-in for RBLN devices; importing it loads neither torch nor vLLM."""

from __future__ import annotations


def register() -> str:
    """Return the dotted path of the platform class; entry point of `vllm.platform_plugins`."""
    from rbln_backend.vllm_compat.log import drop_expected_warnings

    drop_expected_warnings()
    return "rbln_backend.platform.RblnPlatform"

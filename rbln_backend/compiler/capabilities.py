"""Capabilities of the device that graphs are compiled for.

Callers branch on these fields, never on the device's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rbln_backend.compiler.sdk.npu import Npu

Device = Literal["emulated", "rebel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Differences between devices that code above the compiler port needs."""

    device: Device
    """For reports and error texts only."""
    runs_on_host: bool
    """Graphs run in this process, with kernels and layers of our own, in host memory."""
    general_attention: bool
    """Ops of our own, with soft caps, ALiBi, caches that layers share, e4m3 caches of windows, and
    every head size, also of latent attention; otherwise the SDK's, which have none of these."""
    packed_weights: bool
    """Kernels for quantized words as they are; otherwise int8 weights of symmetric formats."""
    picks_tokens: bool
    """Graphs can end in an op that picks the token of the largest logit."""
    fused_experts: bool
    """One SDK op computes a layer of experts."""
    adapters: bool
    """Graphs with LoRA slots, whose tensors can be written between two runs."""
    joint_prompts: bool
    """A prefill chunk may hold tokens of several prompts."""
    window_logs: bool
    """Sliding-window caches keep a prefix log, and their ops take total token counts."""
    copies_caches: bool
    """Blocks of KV caches can be copied to host memory and back."""
    keeps_axes: bool = False
    """Layers take hidden states with axes of batch and sequence, not rows of tokens."""
    appends_windows: bool = False
    """Sliding windows lie in pages; otherwise a window is one block whose content is shifted."""
    stores_binaries: bool = False
    """Besides programs, the store holds what the device's compiler made of them."""
    longest_first: bool = False
    """Decode kernels skip the rows after the last one that reaches into a block."""
    npu: Npu | None = None
    """Product, memory and shape limits of the NPU; None: host memory, any shape."""

    @property
    def product(self) -> str:
        """The NPU's name in error texts, else the device's."""
        return self.device if self.npu is None else self.npu.name


EMULATED = Capabilities(
    device="emulated",
    runs_on_host=True,
    general_attention=True,
    packed_weights=True,
    picks_tokens=False,
    fused_experts=False,
    adapters=True,
    joint_prompts=True,
    window_logs=True,
    copies_caches=True,
)


def npu_capabilities(npu: Npu, *, copies_caches: bool = False) -> Capabilities:
    """Return the capabilities of ``npu`` under the RBLN SDK.

    ``copies_caches``: torch-rbln has the KV caches, not the runtimes of the SDK.
    """
    return Capabilities(
        device="rebel",
        runs_on_host=False,
        general_attention=False,
        packed_weights=False,
        picks_tokens=True,
        fused_experts=True,
        adapters=copies_caches,
        joint_prompts=False,
        window_logs=False,
        copies_caches=copies_caches,
        stores_binaries=True,
        keeps_axes=True,
        appends_windows=npu.appends_windows,
        longest_first=npu.wants_longest_first,
        npu=npu,
    )

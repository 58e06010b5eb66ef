"""Weight formats of quantized layers; pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHANNEL = -1
"""The group size of weights with one scale per output channel."""
BITS, GROUP_SIZES = (4, 8), (64, 128, CHANNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weight format of a quantized layer."""

    bits: int
    group_size: int
    """Weights along the input that share a scale, or CHANNEL."""
    symmetric: bool = True
    is_ordered: bool = False
    """True if groups have their own input order (``g_idx``)."""
    kind: str = "int"
    """"int", "float" for e4m3 and e2m1, or "nvfp4"."""
    input_bits: int = 16
    """Of what is multiplied by; 16 stands for the model's dtype."""
    published: str = ""
    """Name of a published form that also quantizes activations, else empty."""

    def __str__(self) -> str:
        group = "channel" if self.group_size == CHANNEL else f"group {self.group_size}"
        kind = {8: " FP8", 4: " MXFP4"}[self.bits] if self.kind == "float" else ""
        kind = " NVFP4" if self.kind == "nvfp4" else kind
        zeros = "" if self.symmetric else " with zero points"
        published = f" (published as {self.published})" if self.published else ""
        return f"W{self.bits}A{self.input_bits}{kind} {group}{zeros}{published}"

    @property
    def format(self) -> str:
        """The format's name in ``devices.emulated.packing``."""
        if self.kind == "nvfp4":
            return "blocks8"
        return {8: "e4m3", 4: "e2m1"}[self.bits] if self.kind == "float" else f"int{self.bits}"

    def obstacle(self, *, may_have_zeros: bool = False) -> tuple[str, str] | None:
        """Of integers, the first field that cannot be, and the documented reason; None: none."""
        if self.bits not in BITS or self.kind != "int":
            return "bits", f"Weight type {self.kind}{self.bits} not supported"
        if not self.symmetric and not may_have_zeros:
            return "symmetric", "Asymmetric quantization not supported"
        if self.group_size not in GROUP_SIZES:
            return "group_size", f"Group size {self.group_size} not supported"
        if self.is_ordered:
            return "order", "Group/dynamic activation ordering not supported"
        return None


def summary(layers: Sequence[str]) -> str | None:
    """The kinds of quantised layers and how many there are of each; None without any."""
    return ", ".join(_counts(layers)) or None


def _counts(layers: Sequence[str]) -> Iterator[str]:
    for kind in dict.fromkeys(layers):
        count = layers.count(kind)
        yield f"{count} {'layer' if count == 1 else 'layers'} {kind}"

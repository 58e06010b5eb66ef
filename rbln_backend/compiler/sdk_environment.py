"""What the RBLN SDK wants to find in the environment; it offers no other way."""

from __future__ import annotations

import os

from rbln_backend.errors import UnsupportedModelError

_QUANT_BITS = "RBLN_QUANT_BITS"


def announce_quant_bits(bits: int) -> None:
    """Tell the SDK's compiler how many bits the int8 weights of the graphs stand for.

    The SDK knows one width: raises ``UnsupportedModelError`` for a second one.
    """
    told = os.environ.setdefault(_QUANT_BITS, str(bits))
    if told != str(bits):
        raise UnsupportedModelError(
            f"the model has weights of {told} and of {bits} bits: the RBLN SDK takes one width "
            f"({_QUANT_BITS}); serve a checkpoint of one width, or run it on the emulated device"
        )

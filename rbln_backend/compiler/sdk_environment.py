"""What the RBLN SDK takes from the environment; it offers no other way."""

from __future__ import annotations

import os

from rbln_backend.errors import UnsupportedModelError

_STANDALONE = "RBLN_CTX_STANDALONE"
_ASYNCHRONOUS = "RBLN_FORCE_CCL_ASYNC"
_QUANT_BITS = "RBLN_QUANT_BITS"


def announce_ranks() -> str | None:
    """Set what the documents say their platform sets under model parallelism.

    Call it before the SDK makes a context. Returns a warning where the user has chosen otherwise.
    """
    environment = os.environ
    environment[_STANDALONE] = "1"
    if environment.setdefault(_ASYNCHRONOUS, "1") != "0":
        return None
    return f"{_ASYNCHRONOUS}=0 makes collectives wait for the host; unset it unless you debug them"


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

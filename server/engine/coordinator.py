"""vLLM's coordinator of data-parallel engines, which ignores messages of strangers.

Its port is open to every host of the network. Loaded in its own process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.serial_utils import MsgpackDecoder

from server.engine.socket import decode_outputs, log_stranger
from server.vllm.patches import decode_in_coordinator


class Coordinator(DPCoordinatorProc):
    """vLLM's coordinator with another decoder."""

    @staticmethod
    def run_coordinator(engine_count: int, *args: Any, **kwargs: Any) -> None:
        """Run until the process is ended."""

        class Decoder(MsgpackDecoder):
            """Makes messages without content of those that are from no engine."""

            def decode(self, bufs: Any) -> EngineCoreOutputs:
                decoder: Any = super()
                outputs = decode_outputs(decoder, bufs, range(engine_count))
                if outputs is None or outputs.outputs or outputs.utility_output is not None:
                    log_stranger("to the coordinator's port")
                    return EngineCoreOutputs()
                return outputs

        decode_in_coordinator(Decoder)
        DPCoordinatorProc.run_coordinator(engine_count, *args, **kwargs)

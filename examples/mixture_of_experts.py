"""A mixture of experts over two ranks: layers split by tensor parallelism, experts by rank."""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams


def main() -> None:
    """Answer one prompt; with `--tensor-parallel-size 1` in one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint with experts, such as Qwen3-MoE or Mixtral")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="float32: as exact as one rank (auto)")
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=4,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.tensor_parallel_size > 1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate(["The sea is"], sampling)
    print(f"{args.tensor_parallel_size} ranks: {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()

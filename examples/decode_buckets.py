"""Decode buckets by environment variables: a batch runs in the smallest graph that holds it.

The variables are read once, when the engine is configured; the same names work for `rbln-serve`.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "manual")
os.environ.setdefault("VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS", "1,3,8")

from vllm import LLM, SamplingParams

DEFAULT_MODEL = "build/default-model"


def main() -> None:
    """Decode batches of several sizes and print the bucket of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    args = parser.parse_args()

    llm = LLM(model=args.model, max_model_len=256, max_num_seqs=8)
    rbln = llm.llm_engine.vllm_config.additional_config.rbln
    buckets = rbln.decode_batch_bucket_manual_buckets
    print(f"compiled decode buckets: {', '.join(map(str, buckets))}")
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for batch in (1, 2, 3, 5, 8):
        prompts = [f"Count from {start} on:" for start in range(batch)]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        bucket = min(size for size in buckets if size >= batch)
        print(f"{len(outputs)} requests ran in decode-{bucket}, {bucket - batch} rows were padding")


if __name__ == "__main__":
    main()

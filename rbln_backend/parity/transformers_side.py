"""Side of Hugging Face transformers in float32, independent of vLLM and this project."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rbln_backend.host.processes import Report
from rbln_backend.parity.jobs import Answer, Job, Layers, SideResult, downloaded_folder
from rbln_backend.parity.layers import profiled, tapped

Tensors = dict[str, Tensor]

_ADAPTED = "base_model.model."
# Fields of adapter_config.json with another sum than scale * B A.
_OTHER_SUMS = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@contextmanager
def plain_checkpoint(model: str, lora: str | None) -> Iterator[str]:
    """Yield `model`, or with an adapter a temporary folder with a copy that it is added to.

    `model` and `lora` are folders or hub names. Raises `ValueError` for an adapter of quantised
    weights.
    """
    if lora is None:
        yield model
        return
    folder = downloaded_folder(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError(f"{model} is quantised: the transformers side adds no adapter to it")
    weights = read_weights(folder)
    add_adapter(weights, downloaded_folder(lora))
    with TemporaryDirectory() as copy:
        for file in (folder / "config.json", *folder.glob("*.py")):
            shutil.copy(file, copy)
        save_file(weights, Path(copy) / "model.safetensors", {"format": "pt"})
        yield copy


def read_weights(folder: Path) -> Tensors:
    """Return all tensors [...] of the checkpoint. Raises `ValueError` without safetensors."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise ValueError(f"{folder} holds no *.safetensors")
    return found


def add_adapter(tensors: Tensors, folder: Path) -> None:
    """Add a LoRA adapter in PEFT's files to its weights [N, K], which become float32."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if others := [field for field in _OTHER_SUMS if config.get(field)]:
        raise ValueError(f"{folder}: {others[0]} is not known to the transformers side")
    rank = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    matrices = load_file(folder / "adapter_model.safetensors")
    for name, down in matrices.items():
        module, is_down, _ = name.partition(".lora_A.")
        if not is_down:
            continue
        target = f"{module.removeprefix(_ADAPTED)}.weight"
        if target not in tensors:
            raise ValueError(f"{folder} adapts {target}, which the checkpoint does not have")
        delta = matrices[name.replace(".lora_A.", ".lora_B.")].float() @ down.float()
        tensors[target] = tensors[target].float() + delta * (config["lora_alpha"] / rank)


def run(job: Job, report: Report) -> SideResult:
    """Generate greedily, or follow the reference's tokens if the job has them."""
    from transformers import AutoTokenizer

    report("model", 0, 1)
    trust = bool(job.engine_args.get("trust_remote_code"))
    model = _load(job, trust)
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model, trust_remote_code=trust)
    report("model", 1, 1)
    started, answers = time.perf_counter(), []
    with profiled(job):
        for index, text in enumerate(job.prompts):
            forced = None if job.forced is None else job.forced[index]
            answers.append(_answer(model, tokenizer, text, job, forced))
            report("generate", index + 1, len(job.prompts))
    return SideResult(
        answers=tuple(answers),
        seconds=time.perf_counter() - started,
        layers=None if job.probe is None else _probe(model, job.probe[0]),
        about={
            "transformers": version("transformers"),
            "dtype": "float32",
            "vocab_size": model.config.get_text_config().vocab_size,
        },
    )


def _load(job: Job, trust: bool) -> Any:
    """Return the model in float32, with the adapter merged."""
    from transformers import AutoModelForCausalLM

    # transformers' own functions are not typed throughout.
    load: Any = AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float32, "trust_remote_code": trust, "output_loading_info": True}
    with plain_checkpoint(job.model, job.lora) as path:
        model, found = load(path, **options)
    if missing := sorted(found["missing_keys"]):
        # transformers initialises missing weights at random.
        raise ValueError(
            f"transformers finds no weights for {missing[0]} and {len(missing) - 1} more in "
            f"{job.model}: it does not know how they are packed"
        )
    return model.eval()


@torch.inference_mode()
def _answer(
    model: Any, tokenizer: Any, text: str, job: Job, forced: Sequence[int] | None
) -> Answer:
    prompt = torch.tensor([tokenizer(text).input_ids])
    free = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=job.max_tokens,
        min_new_tokens=job.max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    count = prompt.shape[1]
    token_ids = free[0, count:]
    along = token_ids if forced is None else torch.tensor(list(forced))
    logits = model(torch.cat([prompt[0], along])[None, :-1]).logits[0, count - 1 :]
    wanted = logits.shape[-1] if job.num_logprobs < 0 else job.num_logprobs
    best = logits.float().log_softmax(-1).topk(min(wanted, logits.shape[-1]), dim=-1)
    return Answer(
        prompt_ids=prompt[0].numpy(),
        token_ids=token_ids.numpy(),
        text=tokenizer.decode(token_ids),
        top_ids=best.indices.numpy(),
        logprobs=best.values.numpy(),
    )


@torch.inference_mode()
def _probe(model: Any, token_ids: Sequence[int]) -> Layers:
    taken: list[torch.Tensor] = []
    with tapped(model, lambda state: taken.append(state[0].clone())) as names:
        model(torch.tensor([list(token_ids)]))
    return Layers(names=tuple(names), states=np.stack([state.numpy() for state in taken]))

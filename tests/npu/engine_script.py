"""Run in a process of its own: engines over the SDK's double, one after another.

Its argument is a JSON list of jobs: the model's path, the options of ``LLM``, batches of prompts
(token ids), how many tokens to answer with, and after how many steps the first request of each
batch is aborted, if it is. Then, if they are given, the seed of sampled tokens, which are greedy
otherwise, whether steps check as many drafts as there are, whatever they gain, the texts (token
ids) that vLLM's n-gram drafts are read from, the quantisation method of vLLM that is to accept
float32, when outputs are read against the rules, fields of ``SamplingParams``, for each batch the
folder of the adapter of each prompt, what is done wrong with adapters, and the folder of one that
is loaded and unloaded between steps. It prints the tokens of every job's batches behind ``RESULT``,
before that how many tokens were drafted and accepted behind ``DRAFTS``.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from importlib.util import find_spec
from typing import Any

_FOLDERS: dict[str, int] = {}
"""The number of each adapter's folder."""


def main() -> None:
    """Each batch is answered before the next is sent: later ones meet what earlier ones left."""
    logging.getLogger("rbln_backend.worker.graph_factory").addFilter(_refuse_warnings)
    drafts = _count_drafts()
    answers = [_answer(**job) for job in json.loads(sys.argv[1])]
    sys.stdout.write(f"DRAFTS {json.dumps(drafts)}\n")
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


def _refuse_warnings(record: logging.LogRecord) -> bool:
    """A graph that cannot be stored makes every start a cold one."""
    assert record.levelno < logging.WARNING, record.getMessage()
    return True


def _answer(
    path: str,
    options: dict[str, Any],
    batches: list[list[list[int]]],
    max_tokens: int,
    abort_after: int | None,
    seed: int | None = None,
    checks_all_drafts: bool = False,
    texts: list[list[int]] | None = None,
    float32_method: str | None = None,
    reads: str | None = None,
    sampling: dict[str, Any] | None = None,
    adapters: list[list[str | None]] | None = None,
    wrong_adapters: str | None = None,
    coming_adapter: str | None = None,
) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams

    if find_spec("rbln_backend"):
        # The vendor's environment, which runs this script as well, does not have it.
        from rbln_backend.vllm_patches import inspect_models_here

        inspect_models_here()
    if texts is not None:
        _draft_from(texts)
    if float32_method is not None:
        _accept_float32(float32_method)
    if reads is not None:
        _read(reads)
    if wrong_adapters is not None:
        _adapt_wrongly(wrong_adapters)
    llm = LLM(path, **options)
    if checks_all_drafts:
        _check_all_drafts(llm.llm_engine)
    fields = {"temperature": 0.0 if seed is None else 1.2} | (sampling or {})
    params = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields)
    answers = []
    for number, batch in enumerate(batches):
        own: list[str | None] = adapters[number] if adapters else [None] * len(batch)
        answers.append(_generate(llm.llm_engine, batch, params, abort_after, own, coming_adapter))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return answers


def _count_drafts() -> list[int]:
    """Return the number of drafted tokens and of those that are accepted, as they become."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counts = [0, 0]
    count_them = Scheduler.make_spec_decoding_stats

    def counted(self: Any, stats: Any, **of_request: Any) -> Any:
        counts[0] += of_request["num_draft_tokens"]
        counts[1] += of_request["num_accepted_tokens"]
        return count_them(self, stats, **of_request)

    setattr(Scheduler, "make_spec_decoding_stats", counted)  # noqa: B010
    return counts


def _draft_from(texts: list[list[int]]) -> None:
    """Tokens of tiny random models repeat nothing: without this, no draft would be right."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def propose(
        self: Any, most: int, sampled: list[list[int]], counts: Any, tokens: Any, *rest: object
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for drawn, count, row in zip(sampled, counts, tokens, strict=False):
            known = row[:count].tolist()
            right = [text[count : count + most] for text in texts if text[:count] == known]
            drafts.append(right[0] if drawn and right else [])
        return drafts

    setattr(NgramProposer, "propose", propose)  # noqa: B010 - a method, to the type checker


def _accept_float32(method: str) -> None:
    """Let vLLM's configuration of ``method`` accept float32, whose tokens can be compared."""
    import torch
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = get_quantization_config(method)
    setattr(config, "get_supported_act_dtypes", lambda _: [torch.float32])  # noqa: B010


def _read(when: str) -> None:
    """Break the runner: ``early`` reads outputs without a wait, ``late`` after the next launch."""

    from rbln_backend.core import StepOutputs
    from rbln_backend.worker import build
    from rbln_backend.worker.runner import RblnModelRunner

    if when == "late":
        setattr(RblnModelRunner, "synchronize", lambda _: None)  # noqa: B010
        return

    def read(self: Any, number: int) -> Any:
        output = self._outputs[number]
        return output if self._arrange is None else self._arrange(output)

    def launch(graph: Any, useful: Any) -> Any:
        outputs = graph.run(useful)
        return lambda: (outputs, 0.0)

    setattr(StepOutputs, "__getitem__", read)  # noqa: B010
    setattr(build, "launch_on_device", launch)  # noqa: B010


def _check_all_drafts(engine: Any) -> None:
    """Steps of the double take as long with drafts as they happen to."""
    engine.engine_core.engine_core.model_executor.collective_rpc(_check_all_drafts_of_rank)


def _check_all_drafts_of_rank(worker: Any) -> None:
    from tests.engine.support import MOST, AnyLength

    # A stage that makes no tokens makes no drafts.
    if (drafting := getattr(worker.worker._runner, "_drafting", None)) is not None:
        drafting._budget = AnyLength(MOST + 1)


def _generate(
    engine: Any,
    prompts: list[list[int]],
    params: Any,
    abort_after: int | None,
    adapters: list[str | None],
    coming_adapter: str | None,
) -> list[list[int]]:
    """The tokens of each prompt, none of one that was aborted."""
    names = [str(number) for number in range(len(prompts))]
    for name, prompt, adapter in zip(names, prompts, adapters, strict=True):
        engine.add_request(
            name, {"prompt_token_ids": prompt}, params, lora_request=_lora_request(adapter)
        )
    tokens: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        if steps == abort_after:
            engine.abort_request(names[:1])
        if coming_adapter is not None:
            _come_or_go(engine, coming_adapter, steps)
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return [tokens.get(name, []) for name in names]


def _come_or_go(engine: Any, folder: str, step: int) -> None:
    """Load an adapter under a new number before every other step, and unload it before the next."""
    from vllm.lora.request import LoRARequest

    number = 1000 + step // 2
    call = engine.engine_core.engine_core.model_executor.collective_rpc
    if step % 2:
        assert all(call("remove_lora", args=(number,)))
    else:
        assert all(call("add_lora", args=(LoRARequest(f"coming-{number}", number, folder),)))


def _adapt_wrongly(how: str) -> None:
    """Do something wrong with adapters: with the rows of a mask, a slot, or what slots are."""
    from torch import nn

    from rbln_backend.devices.rebel.memory import Moved
    from rbln_backend.lora.slots import MatrixStack, SlotMask

    fill, write, resident = SlotMask.fill, MatrixStack.write, Moved.resident

    def fill_the_row_after(self: Any, tensor: Any, slots: Any) -> None:
        fill(self, tensor, slots)
        tensor.copy_(tensor.roll(1, dims=0))

    def leave_the_rest(self: Any, slot: int, image: Any) -> None:
        if image is not None:
            write(self, slot, image)

    def as_weight(self: Any, tensor: Any) -> Any:
        twin = nn.Parameter(resident(self, tensor), requires_grad=False)
        self._copies[id(tensor)] = (tensor, twin)
        return twin

    owner, name, function = {
        "mask": (SlotMask, "fill", fill_the_row_after),
        "slot": (MatrixStack, "write", leave_the_rest),
        "weights": (Moved, "resident", as_weight),
    }[how]
    setattr(owner, name, function)


def _lora_request(folder: str | None) -> Any:
    """The request for an adapter; a folder has the same number whenever it comes."""
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    _FOLDERS.setdefault(folder, len(_FOLDERS) + 1)
    return LoRARequest(folder, _FOLDERS[folder], folder)


if __name__ == "__main__":
    main()

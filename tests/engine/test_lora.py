"""Adapters in a running engine: merged weights' tokens, any company, no compile, no old blocks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import ATTENTION, EVERY_LINEAR, HEAD, MLP, make_adapter, merge
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, assert_equals_reference, make_prompts
from tests.engine.test_pooling import EMBED, ONE_CHUNK, assert_close
from tests.pooling_checkpoints import pooled
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}


class Adapters:
    """Makes adapters of one engine, each with its merged checkpoint and a request for it."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self._engine, self._root, self._count = engine, root, 0
        self.merged: dict[str, Path] = {}

    def __call__(self, number: int, **options: Any) -> LoRARequest:
        self._count += 1
        folder = self._root / f"adapter-{self._count}"
        adapter = make_adapter(self._engine.checkpoint, folder, seed=number, **options)
        request = LoRARequest(f"adapter-{self._count}", number, str(adapter))
        merged = self._root / f"merged-{self._count}"
        self.merged[request.lora_name] = merge(self._engine.checkpoint, adapter, merged)
        return request

    def expected(self, prompt: list[int], request: LoRARequest | None) -> list[int]:
        path = self._engine.checkpoint if request is None else self.merged[request.lora_name]
        return reference_generate(path, prompt, NUM_TOKENS).token_ids


@pytest.fixture
def lora(engines: Engines) -> Any:
    """The shared engine, empty of adapters before and after."""
    engine = engines("llama", **LORA)
    yield engine
    for number in worker(engine).list_loras():
        assert worker(engine).remove_lora(number)


def worker(engine: Engine) -> Any:
    return engine.core.model_executor.driver_worker.worker


def generate(
    engine: Engine, prompts: list[list[int]], requests: list[LoRARequest | None]
) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: list[Any] = engine.llm.generate(inputs, GREEDY, use_tqdm=False, lora_request=requests)
    return outputs


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def bits(output: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities to the last bit."""
    return [
        sorted((token, entry.logprob) for token, entry in step.items())
        for step in output.outputs[0].logprobs
    ]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"rank": 16, "targets": (*EVERY_LINEAR, *HEAD)}),
        ("llama", {"rank": 4, "alpha": 6, "use_rslora": True}),
        ("llama", {"rank": 8, "targets": (*ATTENTION[:1], *MLP[1:])}),
        *(pytest.param(arch, {"rank": 8}, marks=pytest.mark.wide) for arch in ("qwen2", "qwen3")),
    ],
)
def test_an_adapter_is_worth_its_merged_weights(
    engines: Engines, tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    engine = engines(arch, **LORA)
    # Cached blocks know the load of an adapter by its number.
    adapters, number = Adapters(engine, tmp_path), 40 + options["rank"]
    request = adapters(number, **options)
    prompts = make_prompts([1, 17, 130], seed=40)
    outputs = generate(engine, prompts, [request] * 3)
    merged = adapters.merged[request.lora_name]
    assert_equals_reference(engine, prompts, outputs, NUM_TOKENS, merged)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tokens([output]) != [adapters.expected(prompt, None)]
    assert worker(engine).remove_lora(number)


def test_a_batch_mixes_adapters_and_none(lora: Engine, engines: Engines, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    one, two = adapters(1, rank=16), adapters(2, rank=3, targets=ATTENTION)
    requests = [one, None, two, None]
    prompts = make_prompts([30, 31, 32, 70], seed=41)
    together = generate(lora, prompts, requests)
    for prompt, request, output in zip(prompts, requests, together, strict=True):
        assert tokens([output]) == [adapters.expected(prompt, request)]
        lora.llm.reset_prefix_cache()
        (alone,) = generate(lora, [prompt], [request])
        assert bits(alone) == bits(output)
    # What an engine without adapters answers, to the bit.
    plain = engines("llama").generate([prompts[1], prompts[3]], GREEDY)
    assert [bits(output) for output in plain] == [bits(together[1]), bits(together[3])]
    assert lora.total("rbln_recompiles_after_warmup_total") == 0


def test_prompts_are_scored_by_the_head_of_their_adapter(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    request = adapters(1, targets=(*ATTENTION[:1], *HEAD))
    (prompt,) = make_prompts([9], seed=46)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    inputs = [{"prompt_token_ids": prompt}] * 2
    loads = [request, None]
    outputs = lora.llm.generate(inputs, params, use_tqdm=False, lora_request=loads)
    paths = (adapters.merged[request.lora_name], lora.checkpoint)
    for path, output in zip(paths, outputs, strict=True):
        for position in range(1, len(prompt)):
            expected = reference_generate(path, prompt[:position], 1).logprobs[0, prompt[position]]
            found = output.prompt_logprobs[position][prompt[position]].logprob
            assert found == pytest.approx(float(expected), abs=1e-3)


def test_adapters_come_and_go_while_others_decode(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    kept, passing = adapters(1), adapters(2, rank=16)
    prompt, other = make_prompts([40, 41], seed=42)
    worker(lora).add_lora(kept)
    expected = {"a": adapters.expected(prompt, kept), "b": adapters.expected(other, None)}
    engine, finished = lora.llm.llm_engine, {}
    engine.add_request("a", {"prompt_token_ids": prompt}, GREEDY, lora_request=kept)
    engine.add_request("b", {"prompt_token_ids": other}, GREEDY)
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[output.request_id] = output
        number = 100 + step // 3
        request = LoRARequest(f"passing-{number}", number, passing.lora_path)
        if step % 3 == 0:
            worker(lora).stage_lora(request)
        elif step % 3 == 1:
            assert worker(lora).add_lora(request)
            assert set(worker(lora).lora_slots()) == {1, number}
        else:
            assert worker(lora).remove_lora(number)
        step += 1
    assert {name: tokens([output])[0] for name, output in finished.items()} == expected
    assert lora.total("rbln_recompiles_after_warmup_total") == 0
    for number in worker(lora).list_loras() - {1}:
        worker(lora).remove_lora(number)


def test_staging_tells_how_far_it_is(lora: Engine, tmp_path: Path) -> None:
    good = Adapters(lora, tmp_path)(5)
    worker(lora).stage_lora(["from-a-socket", 5, good.lora_path])
    bad = LoRARequest("bad", 6, str(tmp_path / "nowhere"))
    worker(lora).stage_lora(bad)
    while (state := worker(lora).staged_lora(6))[0] == "reading":
        pass
    assert worker(lora).staged_lora(5) == ("ready", "")
    assert state[0] == "failed"
    assert "has no adapter_config.json" in state[1]
    assert worker(lora).list_loras() == set()
    assert worker(lora).add_lora(good)
    assert not worker(lora).add_lora(good)
    assert worker(lora).list_loras() == {5}
    assert worker(lora).pin_lora(5)
    with pytest.raises(ValueError, match="no adapter with id 5 is staged"):
        worker(lora).staged_lora(5)
    assert worker(lora).remove_lora(6)
    assert not worker(lora).remove_lora(6)


def test_more_adapters_than_slots(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    requests = [adapters(number, rank=4) for number in (1, 2, 3)]
    prompts = make_prompts([20, 21, 22], seed=43)
    # Adapters come with requests: the third waits for a slot, and none is evicted.
    outputs = generate(lora, prompts, requests)
    expected = [adapters.expected(p, r) for p, r in zip(prompts, requests, strict=True)]
    assert tokens(outputs) == expected
    for number in worker(lora).list_loras():
        worker(lora).remove_lora(number)
    # What was added stays.
    for request in requests[:2]:
        worker(lora).add_lora(request)
    with pytest.raises(ValueError, match="--max-loras 2"):
        worker(lora).add_lora(requests[2])
    assert worker(lora).list_loras() == {1, 2}


def test_host_memory_keeps_the_adapters_used_last(engines: Engines, tmp_path: Path) -> None:
    """They are not read again when they come back to the only slot."""
    engine = engines.fresh("llama", **LORA | {"max_loras": 1, "max_cpu_loras": 2}, rbln=FEW)
    adapters = Adapters(engine, tmp_path)
    one, two, three = (adapters(number, rank=4) for number in (1, 2, 3))
    (prompt,) = make_prompts([20], seed=47)

    def answer(request: LoRARequest) -> list[int]:
        engine.llm.reset_prefix_cache()
        return tokens(generate(engine, [prompt], [request]))[0]

    expected = [adapters.expected(prompt, request) for request in (one, two, three)]
    assert [answer(request) for request in (one, two)] == expected[:2]
    for request in (one, two):
        shutil.copytree(three.lora_path, request.lora_path, dirs_exist_ok=True)
    # The second is used least recently when the third comes.
    assert [answer(request) for request in (two, one, three)] == [
        expected[1],
        expected[0],
        expected[2],
    ]
    assert answer(one) == expected[0]
    assert answer(two) == expected[2], "its files were read again"
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def test_a_slot_forgets_its_last_adapter(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    for number in (1, 2):
        worker(lora).add_lora(adapters(number, rank=16))
    for number in (1, 2):
        assert worker(lora).remove_lora(number)
    small = adapters(3, rank=2, targets=ATTENTION[:1])
    (prompt,) = make_prompts([20], seed=45)
    assert tokens(generate(lora, [prompt], [small])) == [adapters.expected(prompt, small)]


def test_a_full_engine_keeps_what_is_staged(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    for number in (1, 2):
        worker(lora).add_lora(adapters(number, rank=1))
    third = adapters(3, rank=1)
    worker(lora).stage_lora(third)
    with pytest.raises(ValueError, match="--max-loras 2"):
        worker(lora).add_lora(third)
    while worker(lora).staged_lora(3)[0] == "reading":
        pass
    assert worker(lora).remove_lora(1)
    assert worker(lora).add_lora(third)
    assert worker(lora).list_loras() == {2, 3}


def test_a_model_that_vllm_does_not_adapt_is_refused(engines: Engines) -> None:
    with pytest.raises(ValueError, match="LoRA adapters of models that vLLM does not adapt"):
        engines.fresh("gpt2", enable_lora=True)


def test_a_name_that_comes_again_does_not_meet_its_old_blocks(lora: Engine, tmp_path: Path) -> None:
    adapters = Adapters(lora, tmp_path)
    first, second = adapters(1), adapters(2)
    (prompt,) = make_prompts([100], seed=44)
    old = LoRARequest("tuned", 11, first.lora_path)
    new = LoRARequest("tuned", 12, second.lora_path)
    generate(lora, [prompt], [old])
    (again,) = generate(lora, [prompt], [old])
    assert again.num_cached_tokens == 96
    assert worker(lora).remove_lora(11)
    (output,) = generate(lora, [prompt], [new])
    assert output.num_cached_tokens == 0
    assert tokens([output]) == [adapters.expected(prompt, second)]


PREFIX = "base_model.model."
Q_PROJ = f"{PREFIX}model.layers.0.self_attn.q_proj"
BEYOND = f"{PREFIX}model.layers.77.mlp.up_proj.lora_A.weight"


def spoil(path: Path, change: Any) -> None:
    """Add tensors, take one away, set fields of the configuration, or replace a file."""
    match change:
        case str(name):
            file = path / "adapter_model.safetensors"
            save_file({n: t for n, t in load_file(file).items() if n != name}, file)
        case (name, bytes(data)):
            (path / name).write_bytes(data)
        case (name, Tensor() as tensor):
            file = path / "adapter_model.safetensors"
            save_file(load_file(file) | {name: tensor}, file)
        case dict(fields):
            file = path / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        case None:
            (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 32}, "r is 32, and --max-lora-rank is 16"),
        ({"use_dora": True}, "use_dora"),
        (
            (f"{PREFIX}model.layers.0.mlp.router.lora_A.weight", torch.zeros(8, 64)),
            "router' cannot be adapted in the served model, whose layers",
        ),
        (
            (f"{PREFIX}model.embed_tokens.lora_A.weight", torch.zeros(8, 64)),
            "embed_tokens' cannot be adapted",
        ),
        (
            (f"{PREFIX}lm_head.base_layer.weight", torch.zeros(8, 128)),
            r"the shape must be \[4096, 128\], got \[8, 128\]",
        ),
        ((BEYOND, torch.zeros(8)), "no module 'model.layers.77.mlp.up_proj'"),
        (
            (f"{Q_PROJ}.lora_A.weight", torch.zeros(8, 3)),
            r"q_proj.lora_A.weight': the shape must be \[8, \d+\], got \[8, 3\]",
        ),
        ((f"{Q_PROJ}.lora_magnitude_vector", torch.zeros(8)), "is neither a lora_A.weight"),
        *(
            (
                (f"{Q_PROJ}.lora_B.weight", torch.full((128, 8), value)),
                "q_proj' has NaN or infinite values",
            )
            for value in (float("nan"), float("inf"))
        ),
        ({"lora_alpha": 1e40}, "lora_B times lora_alpha / r has values beyond float32"),
        (f"{PREFIX}model.layers.0.self_attn.v_proj.lora_B.weight", "v_proj' has no lora_B"),
        (("adapter_model.safetensors", b"no"), "cannot be read"),
        (("adapter_config.json", b"{"), "cannot be read"),
        (None, "has no adapter_model.safetensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    lora: Engine, tmp_path: Path, change: Any, message: str
) -> None:
    folder = make_adapter(lora.checkpoint, tmp_path / "bad")
    spoil(folder, change)
    with pytest.raises(ValueError, match=message):
        worker(lora).add_lora(LoRARequest("bad", 9, str(folder)))
    assert worker(lora).list_loras() == set()


# ------------------------------------------------------------------------------------- lora pooling
def embed(
    engine: Engine, prompts: list[list[int]], adapters: list[LoRARequest | None]
) -> list[Tensor]:
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.encode(inputs, pooling_task="embed", use_tqdm=False, lora_request=adapters)
    return [output.outputs.data for output in outputs]


def test_vectors_are_those_of_merged_weights(engines: Engines, tmp_path: Path) -> None:
    engine = engines.fresh("qwen3", **EMBED, **LORA, rbln=ONE_CHUNK)
    prompts = make_prompts([1, 65, 66, 130], seed=45)
    adapters: list[LoRARequest | None] = [None, None, None, None]
    checkpoints = [engine.checkpoint] * len(prompts)
    for number, place in ((1, 1), (2, 3)):
        folder = make_adapter(engine.checkpoint, tmp_path / f"a{number}", rank=16, seed=number)
        adapters[place] = LoRARequest(f"a{number}", number, str(folder))
        checkpoints[place] = merge(engine.checkpoint, folder, tmp_path / f"merged-{number}")
    together = embed(engine, prompts, adapters)
    for prompt, path, actual in zip(prompts, checkpoints, together, strict=True):
        assert_close(actual, pooled(path, prompt, "LAST"), path.name)
    # The same prompt by another adapter is another vector, and its blocks are not shared.
    (plain,) = embed(engine, prompts[1:2], [None])
    assert_close(plain, pooled(engine.checkpoint, prompts[1], "LAST"), "without")
    assert not torch.allclose(plain, together[1], atol=1e-2)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0

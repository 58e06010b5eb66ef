"""Prompts are read by one engine and answered by another, which gets the KV over NIXL."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm import SamplingParams, envs
from vllm.v1.request import RequestStatus

from rbln_backend.errors import ConfigError, UnsupportedModelError
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, make_prompts
from tests.ports import free_port

# `make test-nixl` installs the package; elsewhere a double copies between engines of a process.
if importlib.util.find_spec("nixl") is None:
    sys.path.append(str(Path(__file__).parents[1] / "nixl_double"))

pytestmark = pytest.mark.engine

# The context is 256 tokens in blocks of 16.
LENGTHS = [1, 5, 16, 40, 130, 200]


def nixl(role: str, **more: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role, **more}}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(connectors)}
    names = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**names, "kv_connector_extra_config": extra}}


class Pair:
    """A prefill and a decode engine in this process."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    def offers(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Read the prompts in the prefill engine; return what a proxy passes on."""
        asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        params = SamplingParams(temperature=0.0, max_tokens=1, extra_args=asked)
        return [output.kv_transfer_params for output in self.prefill.generate(prompts, params)]

    def answers(self, prompts: list[list[int]], offers: list[dict[str, Any]], **params: Any) -> Any:
        """Answer the prompts in the decode engine with what was offered."""
        sampling = [
            SamplingParams(extra_args={"kv_transfer_params": dict(offer)}, **params)
            for offer in offers
        ]
        return self.decode.generate(prompts, sampling)

    def settle(self) -> None:
        """Step the prefill engine until nothing is kept for others."""
        for _ in range(200):
            if not self.prefill.core.scheduler.has_requests():
                return
            self.prefill.core.step_fn()
        raise AssertionError("the prefill engine keeps blocks")


def make_pair(engines: Engines, arch: str, **options: Any) -> Pair:
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for role in ("kv_producer", "kv_consumer"):
            # vLLM reads its variables once per process.
            envs.disable_envs_cache()
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
            made.append(engines.fresh(arch, **nixl(role), **options))
    return Pair(*made)


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Pair:
    return make_pair(engines, "llama")


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_tokens_are_those_of_one_engine(
    engines: Engines, pair: Pair, params: dict[str, Any]
) -> None:
    prompts = make_prompts(LENGTHS, seed=31)
    wanted = [
        list(output.outputs[0].token_ids)
        for output in engines("llama").generate(prompts, SamplingParams(**params))
    ]
    # The second time both engines have the prefixes.
    for _ in range(2):
        outputs = pair.answers(prompts, pair.offers(prompts), **params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        pair.settle()
    assert pair.prefill.used_blocks() == pair.decode.used_blocks() == 0


@pytest.mark.parametrize(
    ("arch", "options"),
    [("deepseek_v2", {"rbln": FEW}), ("llama", {"kv_cache_dtype": "fp8", "rbln": FEW})],
)
def test_latent_and_rounded_caches(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    prompts = make_prompts(LENGTHS, seed=33)
    params = SamplingParams(**GREEDY)
    alone = engines(arch, **options).generate(prompts, params)
    wanted = [list(output.outputs[0].token_ids) for output in alone]
    both = make_pair(engines, arch, **options)
    outputs = both.answers(prompts, both.offers(prompts), **GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert outputs[-1].num_cached_tokens == LENGTHS[-1], "blocks are read"
    both.settle()


def test_heads_of_blocks_that_were_read_are_hit(engines: Engines) -> None:
    (prompt,) = make_prompts([200], seed=8)
    shared = [prompt[:88] + prompt[150:160]]
    params = SamplingParams(**GREEDY)
    both = make_pair(engines, "llama", block_size=64, rbln=FEW)
    (first,) = both.answers([prompt], both.offers([prompt]), **GREEDY)
    (second,) = both.decode.generate(shared, params)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (200, 80)
    (alone,) = engines("llama").generate(shared, params)
    assert list(second.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    both.settle()


def step_all(engine: Engine, most_s: float = 60) -> list[Any]:
    """Step until no request is left; return what ended."""
    ended, end = [], time.monotonic() + most_s
    while engine.core.scheduler.has_requests() and time.monotonic() < end:
        ended += [out for out in engine.llm.llm_engine.step() if out.finished]
    assert not engine.core.scheduler.has_requests(), "it hangs"
    return ended


def transfer_worker(engine: Engine) -> Any:
    worker = engine.core.model_executor.driver_worker.worker
    return worker._transfer.connector.connector_worker


def test_blocks_are_read_into_own_blocks_only(pair: Pair) -> None:
    """Each block that is read is one that the decode side lacks; its prefix stays where it is."""
    (prompt,) = make_prompts([100], seed=77)
    assert pair.decode.core.scheduler.reset_prefix_cache()
    read = []
    worker = transfer_worker(pair.decode)
    record = worker.xfer_stats.record_transfer

    def note(result: Any) -> None:
        read.append(result.totalBytes)
        record(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.xfer_stats, "record_transfer", note)
        # All 7 blocks, then the last one: its last token is always computed.
        for _ in range(2):
            pair.answers([prompt], pair.offers([prompt]), **GREEDY)
    spec = pair.decode.core.scheduler.kv_cache_config.kv_cache_groups[0]
    size = spec.kv_cache_spec.page_size_bytes * len(spec.layer_names)
    assert read == [7 * size, size]
    pair.settle()


def test_a_prompt_of_another_offer_is_computed_here(engines: Engines, pair: Pair) -> None:
    first, second = make_prompts([60, 60], seed=5)
    wanted = engines("llama").generate([second], SamplingParams(**GREEDY))
    outputs = pair.answers([second], pair.offers([first]), **GREEDY)
    assert outputs[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
    pair.settle()


def test_requests_that_are_aborted_free_blocks(pair: Pair) -> None:
    prompts = make_prompts([90, 120, 130], seed=8)
    offers = pair.offers(prompts)
    engine = pair.decode.llm.llm_engine
    for number, (prompt, offer) in enumerate(zip(prompts, offers, strict=True)):
        params = SamplingParams(extra_args={"kv_transfer_params": offer}, **GREEDY)
        engine.add_request(f"a{number}", {"prompt_token_ids": prompt}, params)
    engine.abort_request(["a0"])
    engine.step()
    waiting = list(pair.decode.core.scheduler.requests.values())
    assert RequestStatus.WAITING_FOR_REMOTE_KVS in {request.status for request in waiting}
    engine.abort_request(["a1", "a2"])
    step_all(pair.decode)
    pair.settle()
    assert pair.prefill.used_blocks() == pair.decode.used_blocks() == 0


# vLLM waits for its answer, 5 s.
@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_peer_that_is_gone(pair: Pair, recomputes: bool) -> None:
    (prompt,) = make_prompts([70], seed=12)
    (offer,) = pair.offers([prompt])
    gone = {**offer, "remote_engine_id": f"gone-{recomputes}", "remote_port": free_port()}
    scheduler = pair.decode.core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "recompute_kv_load_failures", recomputes)
        (output,) = pair.answers([prompt], [gone], **GREEDY)
    ended = "length" if recomputes else "error"
    assert output.outputs[0].finish_reason == ended
    assert pair.decode.used_blocks() == 0
    pair.answers([prompt], [offer], **GREEDY)
    pair.settle()


def test_blocks_that_the_peer_does_not_have_are_not_read(pair: Pair) -> None:
    (prompt,) = make_prompts([70], seed=14)
    (offer,) = pair.offers([prompt])
    # The handshake contained the size of the peer's cache.
    pair.answers([prompt], [offer], **GREEDY)
    pair.decode.core.scheduler.reset_prefix_cache()
    (offer,) = pair.offers([prompt])
    wrong = {**offer, "remote_block_ids": [[1, 2, 3, 4, 1 << 20]]}
    (output,) = pair.answers([prompt], [wrong], **GREEDY)
    assert output.outputs[0].finish_reason == "error"
    pair.answers([prompt], [offer], **GREEDY)
    pair.settle()


def test_a_handshake_is_refused_with_what_differs(pair: Pair) -> None:
    worker = transfer_worker(pair.decode)
    (offer,) = pair.offers(make_prompts([20], seed=15))
    place = (offer["remote_host"], offer["remote_port"], 1, "another")
    with pytest.raises(RuntimeError, match="engine ID mismatch"):
        # The peer has restarted.
        worker._nixl_handshake(*place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_hash", worker._hash.replace("blocks of 16", "blocks of 32"))
        with pytest.raises(RuntimeError, match=r"blocks of 32 tokens.*blocks of 16 tokens"):
            worker._nixl_handshake(*place)
    pair.answers(make_prompts([20], seed=15), [offer], **GREEDY)
    pair.settle()


def test_a_port_that_is_taken_is_an_error(pair: Pair) -> None:
    side = pair.prefill.core.scheduler.connector.connector_scheduler
    with pytest.raises(ConfigError, match=f"PORT={side.side_channel_port}"):
        side.set_xfer_handshake_metadata({})


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("llama", nixl("kv_both", kv_connector_extra_config={"x": 1}), "'x' is none of"),
        ("llama", nixl("kv_both", kv_buffer_device="cuda"), "kv_buffer_device='cuda'"),
        ("llama", several({"kv_connector": "P2p"}), "NixlConnector and OffloadingConnector"),
        ("llama", {**nixl("kv_both"), "enable_lora": True}, "--enable-lora"),
        ("llama", {**nixl("kv_both"), "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("llama", {**nixl("kv_both"), "tensor_parallel_size": 4}, "4 above 2 heads"),
        ("mistral", nixl("kv_both"), "sliding window"),
        ("gemma3_text", nixl("kv_both"), "sliding window"),
        ("deepseek_v2", {**nixl("kv_both"), "tensor_parallel_size": 2}, "2 above 1 heads"),
    ],
)
def test_what_is_not_supported_is_refused(
    engines: Engines, arch: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError, ValidationError), match=message):
        engines.fresh(arch, **options)


def test_beside_tiers(engines: Engines, pair: Pair) -> None:
    """What was read from a peer comes back from the tier after the cache is emptied."""
    tiers: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    tiers["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 24}
    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        decode = engines.fresh("llama", **several({"kv_connector": "NixlConnector"}, tiers))
    (prompt,) = make_prompts([150], seed=21)
    both = Pair(pair.prefill, decode)
    (first,) = both.answers([prompt], both.offers([prompt]), **GREEDY)
    store = decode.core.scheduler._reuse.tiers._store
    end = time.monotonic() + 30
    while store._waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert decode.core.scheduler.reset_prefix_cache()
    (second,) = decode.generate([prompt], SamplingParams(**GREEDY))
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.num_cached_tokens == 144
    both.settle()

"""Prefixes come back from host memory and from files, over restarts, with the same tokens."""

import errno
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from rbln_backend.errors import ConfigError, UnsupportedModelError
from rbln_backend.kv_transfer.page_store import (
    FolderTier,
    MemoryTier,
    PageKeys,
    PageStore,
    new_page,
)
from rbln_backend.kv_transfer.tiering import make_tiering
from rbln_backend.reports.metrics import MetricsBoard
from tests.adapters import make_adapter
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, Stepped, make_prompts

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
# The context is 256 tokens; the last token of a prompt is always computed.
LENGTHS = [10, 50, 130, 200]


def offloading(folder: Path | None, memory: int = 0, **more: Any) -> dict[str, Any]:
    """vLLM's options for tiers in a folder and in memory."""
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory}
    if folder is not None:
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder), **more}]
    names = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**names, "kv_connector_extra_config": extra}}


def get_tokens(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each answer, and the cached tokens of each prompt."""
    outputs = engine.generate(prompts, GREEDY)
    written(engine)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def written(engine: Engine) -> None:
    store = engine.core.scheduler._reuse.tiers._store
    end = time.monotonic() + 30
    while store._waiting and time.monotonic() < end:
        time.sleep(0.005)
    assert not store._waiting


def is_clean(engine: Engine) -> bool:
    """Return whether nothing of ended requests is left in the tiers' books."""
    tiers = engine.core.scheduler._reuse.tiers
    return engine.used_blocks() == 0 and not (tiers._reading or tiers._looked_up or tiers._stored)


def restart(engine: Engine) -> None:
    """Forget all prefixes, and build the tiers as a new process of this configuration does."""
    scheduler = engine.core.scheduler
    reuse, board = scheduler._reuse, MetricsBoard(engine.run_dir, "restarted")
    reuse.tiers.close()
    assert scheduler.reset_prefix_cache()
    reuse.tiers = make_tiering(
        scheduler.vllm_config, scheduler.kv_cache_config, reuse.manager, board
    )


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.kv"))


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"block_size": 256, "rbln": FEW}),
        ("deepseek_v2", {"rbln": FEW}),
        pytest.param("llama", {}, marks=pytest.mark.wide),
        pytest.param("llama", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.wide),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.wide),
    ],
)
def test_a_restart_reads_prefixes_from_files(
    engines: Engines, tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    prompts = make_prompts(LENGTHS, seed=7)
    engine = engines.fresh(arch, **options, **offloading(tmp_path))
    wanted, _ = get_tokens(engine, prompts)
    restart(engine)
    tokens, cached = get_tokens(engine, prompts)
    assert tokens == wanted
    page = engine.core.scheduler._reuse.tiers._layout.tokens
    assert cached == [(length - 1) // page * page for length in LENGTHS]
    assert is_clean(engine)


def test_heads_of_blocks_that_files_gave_are_hit(engines: Engines, tmp_path: Path) -> None:
    """Within a block that is in no file any more."""
    (prompt,) = make_prompts([200], seed=8)
    shared = [prompt[:88] + prompt[150:160]]
    engine = engines.fresh("llama", block_size=64, rbln=FEW, **offloading(tmp_path))
    (wanted, _), alone = get_tokens(engine, [prompt]), get_tokens(engine, shared)[0]
    restart(engine)
    assert get_tokens(engine, [prompt]) == (wanted, [192])
    for file in stored(tmp_path):
        file.unlink()
    assert get_tokens(engine, shared) == (alone, [80])


@pytest.mark.parametrize("arch", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.wide)])
def test_windows_are_resumed_where_files_have_all_of_them(
    engines: Engines, tmp_path: Path, arch: str
) -> None:
    prompts = make_prompts(LENGTHS, seed=17)
    engine = engines.fresh(arch, **offloading(tmp_path))
    wanted, _ = get_tokens(engine, prompts)
    _, kept = get_tokens(engine, prompts)
    restart(engine)
    tokens, cached = get_tokens(engine, prompts)
    assert tokens == wanted
    page = engine.core.scheduler._reuse.tiers._layout.tokens
    assert cached == [tokens // page * page for tokens in kept]
    for number in range(5):
        restart(engine)
        chance = random.Random(number)
        for file in chance.sample(stored(tmp_path), 8):
            damage(file, chance)
        assert get_tokens(engine, prompts)[0] == wanted
    assert is_clean(engine)


@pytest.fixture(scope="module")
def tiered(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine with a checkpoint of its own, whose pages are in a folder alone."""
    folder = tmp_path_factory.mktemp("tier")
    own = shutil.copytree(engines.checkpoints("llama"), tmp_path_factory.mktemp("own") / "llama")
    options = {"num_gpu_blocks_override": 40, **offloading(folder)}
    return engines.fresh(checkpoint=own, **options), folder


def test_damaged_files_are_misses(tiered: tuple[Engine, Path]) -> None:
    engine, folder = tiered
    prompts, chance = make_prompts([150, 170, 199], seed=8), random.Random(8)
    wanted, _ = get_tokens(engine, prompts)
    damaged = found = 0.0
    for _ in range(10):
        restart(engine)
        for file in chance.sample(stored(folder), 12):
            damage(file, chance)
        assert get_tokens(engine, prompts)[0] == wanted
        damaged += engine.total("rbln_kv_tier_reads_total", result="damaged")
        found += engine.total("rbln_kv_tier_tokens_total")
    assert damaged > 10
    assert found > 10


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {}), ("llama", {"kv_cache_dtype": "fp8"}), ("deepseek_v2", {}), ("gemma3_text", {})],
)
def test_a_thousand_damaged_files_give_no_wrong_token(
    engines: Engines, tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    prompts, chance = make_prompts([150, 170, 199], seed=23), random.Random(23)
    engine = engines.fresh(arch, **options, **offloading(tmp_path))
    wanted, _ = get_tokens(engine, prompts)
    damaged, found, read = 0, 0.0, 0.0
    while damaged < 1000:
        restart(engine)
        for file in chance.sample(stored(tmp_path), 12):
            damage(file, chance)
            damaged += 1
        assert get_tokens(engine, prompts)[0] == wanted
        found += engine.total("rbln_kv_tier_reads_total", result="damaged")
        read += engine.total("rbln_kv_tier_tokens_total")
    assert found > 50
    assert read > 50


def damage(file: Path, chance: random.Random) -> None:
    """Change a bit, cut the file, lengthen it, or give it the content of another page."""
    # A file that was cut to nothing before may not have been read since.
    data = bytearray(file.read_bytes()) or bytearray(1)
    match chance.randrange(4):
        case 0:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1:
            del data[chance.randrange(len(data)) :]
        case 2:
            data += b"0"
        case 3:
            others = [other for other in file.parent.parent.glob("*/*.kv") if other != file]
            data[:] = chance.choice(others).read_bytes()
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("arch", "policy"), [("llama", "shortest"), ("llama", "fcfs"), ("gemma3_text", "shortest")]
)
def test_requests_that_come_and_go_have_their_own_tokens(
    engines: Engines, tiered: tuple[Engine, Path], tmp_path: Path, arch: str, policy: str
) -> None:
    """Random arrivals and aborts over few blocks, with prefixes in files and in the cache."""
    engine, _ = tiered
    if arch != "llama":
        # The log holds one longest prompt and little more.
        few = {"num_gpu_blocks_override": 40, "rbln": {"window_prefix_tokens": 64}}
        engine = engines.fresh(arch, **few, **offloading(tmp_path))
    scheduler, chance = engine.core.scheduler, random.Random(9)
    order = scheduler._order
    base = make_prompts([200], seed=9)[0]
    prompts = [[*base[: chance.randrange(20, 200)], n] for n in range(12)]
    alone = [get_tokens(engine, [prompt])[0][0] for prompt in prompts]
    restart(engine)
    if policy == "fcfs":
        scheduler._order = None
    queue = Stepped(engine)
    try:
        for number in range(60):
            which, name = chance.randrange(len(prompts)), str(number)
            queue.add(name, prompts[which], GREEDY)
            leaves = chance.random() < 0.2
            queue.step(chance.randrange(6))
            if leaves and name in queue.going:
                queue.abort(name)
            if chance.random() < 0.1:
                scheduler.reset_prefix_cache()
        queue.to_the_end()
    finally:
        scheduler._order = order
    assert 30 < len(queue.requests) < 60
    for name, (prompt, *_) in queue.requests.items():
        assert queue.tokens[name] == alone[prompts.index(prompt)]
    assert is_clean(engine)


def test_a_full_disk_and_a_closed_folder_cost_no_answer(
    tiered: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, folder = tiered
    prompts = make_prompts([90, 91], seed=10)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        wanted, _ = get_tokens(engine, prompts)
    assert engine.total("rbln_kv_tier_writes_total", result="failed") > 0
    assert not list(folder.glob("*/*/*.tmp"))
    restart(engine)
    assert get_tokens(engine, prompts) == (wanted, [0, 0])
    restart(engine)
    # As where the folder is mounted read-only.
    engine.core.scheduler._reuse.tiers._store._folder.is_read_only = True
    more = make_prompts([80], seed=11)
    before = len(stored(folder))
    get_tokens(engine, more)
    assert len(stored(folder)) == before
    assert get_tokens(engine, prompts)[0] == wanted


def test_pages_of_another_model_are_not_found(tiered: tuple[Engine, Path]) -> None:
    engine, folder = tiered
    prompts = make_prompts([100], seed=12)
    restart(engine)
    get_tokens(engine, prompts)
    restart(engine)
    assert get_tokens(engine, prompts)[1] == [96]
    weights = sorted(engine.checkpoint.glob("*.safetensors"))[0]
    original = weights.read_bytes()
    changed = bytearray(original)
    changed[-1] ^= 1
    try:
        weights.write_bytes(changed)
        restart(engine)
        assert get_tokens(engine, prompts)[1] == [0]
    finally:
        weights.write_bytes(original)
    assert len({file.parent.parent for file in stored(folder)}) == 2


def test_pages_of_adapters_come_back_by_their_weights(engines: Engines, tmp_path: Path) -> None:
    """After a restart, under other numbers and names; never those of other weights."""
    engine = engines.fresh("llama", **offloading(tmp_path / "tier"), **LORA)
    worker, prompts = engine.core.model_executor.driver_worker.worker, make_prompts([150], seed=22)
    paths = [make_adapter(engine.checkpoint, tmp_path / f"{n}", seed=n, rank=16) for n in range(2)]

    def answers(numbers: list[int]) -> list[tuple[list[int], int]]:
        """Return tokens and cached tokens with each adapter, under ``numbers``."""
        requests = [
            LoRARequest(f"a{path.name}", number, str(path))
            for path, number in zip(paths, numbers, strict=True)
        ]
        for request in requests:
            assert worker.add_lora(request)
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompts[0]}] * 2, GREEDY, use_tqdm=False, lora_request=requests
        )
        written(engine)
        for number in numbers:
            assert worker.remove_lora(number)
        return [(list(out.outputs[0].token_ids), out.num_cached_tokens) for out in outputs]

    (first, _), (second, _) = answers([1, 2])
    assert first != second
    restart(engine)
    # The numbers are swapped.
    assert answers([2, 1]) == [(first, 144), (second, 144)]
    restart(engine)
    # As an adapter that was trained again in its place.
    content = (paths[0] / "adapter_model.safetensors").read_bytes()
    (paths[1] / "adapter_model.safetensors").write_bytes(content)
    (paths[0] / "adapter_config.json").write_text(
        (paths[0] / "adapter_config.json").read_text() + " "
    )
    assert answers([1, 2]) == [(first, 0), (first, 0)]
    assert is_clean(engine)


def test_the_folder_stays_within_its_bytes(tmp_path: Path) -> None:
    keys = PageKeys({"model": "any"})
    tier = FolderTier(tmp_path, keys.folder_name, max_bytes=20_000)
    pages = {keys.key(bytes([n])): bytes([n]) * 1_000 for n in range(60)}
    evicted: set[bytes] = set()
    for key, page in pages.items():
        evicted.update(tier.write(key, memoryview(page)))
        used = sum(file.stat().st_size for file in stored(tmp_path))
        assert used <= 20_000
        assert used == tier.num_bytes
    left = set(FolderTier(tmp_path, keys.folder_name, max_bytes=20_000).known())
    assert left == pages.keys() - evicted
    assert list(pages)[-1] in left


def test_a_page_that_left_the_memory_is_stored_again() -> None:
    store = PageStore(MemoryTier(1_500), None)
    for key in (b"first", b"second"):
        store.write(key, new_page(1_000))
    store.close()
    assert [store.knows(key) for key in (b"first", b"second")] == [False, True]


def test_memory_keeps_prefixes_that_left_the_cache(engines: Engines) -> None:
    engine = engines.fresh("llama", num_gpu_blocks_override=18, kv_offloading_size=0.01)
    prompts = make_prompts([150, 151, 152, 153], seed=13)
    first, _ = get_tokens(engine, prompts)
    for prompt, wanted in zip(prompts, first, strict=True):
        # 17 blocks hold one of them.
        tokens, cached = get_tokens(engine, [prompt])
        assert (tokens, cached) == ([wanted], [144])
    assert engine.metric("rbln_kv_tier_reads_total", result="memory") >= 3 * 9
    assert engine.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert get_tokens(engine, prompts[:1]) == (first[:1], [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (offloading(None), "cpu_bytes_to_use"),
        (offloading(None, memory=-1), "cpu_bytes_to_use=-1"),
        (offloading(Path("/tmp"), block_size=3), "'block_size' is none of"),
        ({"kv_transfer_config": {"kv_connector": "P2pConnector", "kv_role": "kv_both"}}, "P2p"),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "lmcache"),
        ({**offloading(None, memory=9), "prefix_caching_hash_algo": "xxhash"}, "xxhash"),
    ],
)
def test_what_is_not_supported_is_refused(
    engines: Engines, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError, ValidationError), match=message):
        engines.fresh("llama", **options)


def test_windows_are_refused(engines: Engines) -> None:
    with pytest.raises(UnsupportedModelError, match="all have a sliding window"):
        engines.fresh("mistral", **offloading(None, memory=1 << 20))

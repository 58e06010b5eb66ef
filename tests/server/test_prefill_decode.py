"""Two servers, one that reads prompts and one that answers, with a router's two requests.

Needs the real nixl: two processes exchange memory. ``make test-nixl`` runs it.
"""

import contextlib
import importlib.util
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.ports import free_port
from tests.server.real_server import RealServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None, reason="needs nixl: make test-nixl"
    ),
]

LENGTHS = (2, 5, 16, 33, 64, 130, 190, 230)
BLOCK = 16
READ = "vllm:nixl_bytes_transferred_sum"


class Servers(NamedTuple):
    prefill: RealServer
    decode: RealServer


def start(checkpoint: Path, folder: Path, role: str, *flags: str) -> RealServer:
    folder.mkdir()
    config = f'{{"kv_connector": "NixlConnector", "kv_role": "{role}"}}'
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    options = ("--kv-transfer-config", config, *flags)
    return RealServer(checkpoint, folder, *options, environment=environment)


@pytest.fixture(scope="module")
def servers(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("s")
    llama = checkpoints("llama", dtype="float32")
    with (
        start(llama, folder / "prefill", "kv_producer") as prefill,
        start(llama, folder / "decode", "kv_consumer") as decode,
    ):
        prefill.until_ready()
        decode.until_ready()
        yield Servers(prefill, decode)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def offer(server: RealServer, request: dict[str, Any]) -> dict[str, Any]:
    """Have the prompt of ``request`` read; return what the server says about its KV."""
    asked = {**request, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = server.client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["kv_transfer_params"]
    return found


def make_prompts(seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 250) for _ in range(length)] for length in LENGTHS]


def forty_prompts() -> list[list[int]]:
    """Short prompts, some of several blocks, and continuations of both."""
    first = [*make_prompts(3), *make_prompts(4), *make_prompts(5)]
    more = [[*prompt[:150], 7, 8, 9, number] for number, prompt in enumerate(first[:16])]
    return first + more


def get_answer(servers: Servers, request: dict[str, Any]) -> list[int]:
    sent = {**request, "kv_transfer_params": offer(servers.prefill, request)}
    return tokens(servers.decode.client.post("/v1/completions", json=sent))


def answer_and_abort(servers: Servers, request: dict[str, Any]) -> list[int]:
    """As ``get_answer``, beside clients that leave each of the servers."""
    leaves = httpx.Timeout(5, read=0.02)
    asked = {**request, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    sent = {**request, "kv_transfer_params": offer(servers.prefill, request), "max_tokens": 20}
    for server, body_ in ((servers.prefill, asked), (servers.decode, sent)):
        with contextlib.suppress(httpx.ReadTimeout):
            server.client.post("/v1/completions", json=body_, timeout=leaves)
    return get_answer(servers, request)


@pytest.mark.timeout(600)
def test_forty_prompts_under_load_with_aborts(servers: Servers) -> None:
    """Eight clients at a time; greedy and seeded requests alternate."""
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    requests = [
        body(prompt, **(seeded if number % 2 else {}))
        for number, prompt in enumerate(forty_prompts())
    ]
    assert len(requests) == 40
    with ThreadPoolExecutor(8) as clients:
        alone = [{**request, "cache_salt": "x"} for request in requests]
        answers = [servers.decode.client.post("/v1/completions", json=one) for one in alone]
        wanted = [tokens(answer) for answer in answers]
        # The second round has prefix hits on both sides.
        for ask in (answer_and_abort, get_answer):
            assert list(clients.map(partial(ask, servers), requests)) == wanted
    until_free(servers.prefill, most_s=60)
    until_free(servers.decode)


@pytest.mark.timeout(600)
def test_tensor_parallel_ranks_on_either_side(
    checkpoints: CheckpointCache, tmp_path: Path, servers: Servers
) -> None:
    """One rank and two exchange heads; two and two exchange blocks."""
    llama, two = checkpoints("llama", dtype="float32"), ("--tensor-parallel-size", "2")
    requests = [body(prompt) for prompt in make_prompts(21)]
    salted = [{**request, "cache_salt": "x"} for request in requests]
    client = servers.decode.client
    wanted = [tokens(client.post("/v1/completions", json=one)) for one in salted]
    with (
        start(llama, tmp_path / "a", "kv_both", *two) as first,
        start(llama, tmp_path / "b", "kv_both", *two) as second,
    ):
        first.until_ready()
        second.until_ready()
        before = servers.decode.metric(READ)
        routes = [(servers.prefill, first), (first, servers.decode), (first, second)]
        for prefill, decode in routes:
            pair = Servers(prefill, decode)
            assert [get_answer(pair, request) for request in requests] == wanted
        blocks = sum(-(-length // BLOCK) for length in LENGTHS)
        assert servers.decode.metric(READ) - before == blocks * block_bytes(servers.decode)
        for server in (first, second, *servers):
            until_free(server)


def until_free(server: RealServer, most_s: float = 20) -> None:
    end = time.monotonic() + most_s
    while server.metric("vllm:kv_cache_usage_perc") and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 5}])
def test_tokens_and_bytes(servers: Servers, more: dict[str, Any]) -> None:
    """The second round finds all but the last block of each prompt on the decode side."""
    prompts = make_prompts(seed=len(more))
    # Another salt: the decode server computes all of it.
    wanted = [
        tokens(servers.decode.client.post("/v1/completions", json=body(p, cache_salt="x", **more)))
        for p in prompts
    ]
    before = servers.decode.metric(READ)
    for _ in range(2):
        found = []
        for prompt in prompts:
            request = body(prompt, **more)
            params = offer(servers.prefill, request)
            answer = {**request, "kv_transfer_params": params}
            found.append(tokens(servers.decode.client.post("/v1/completions", json=answer)))
        assert found == wanted
    blocks = sum(-(-length // BLOCK) + 1 for length in LENGTHS)
    sizes = (servers.decode.metric(READ) - before) / blocks
    assert sizes == block_bytes(servers.decode)
    until_free(servers.prefill)
    until_free(servers.decode)


def block_bytes(server: RealServer) -> int:
    """Return the bytes of a block of all layers."""
    page = server.client.get("/metrics").text.splitlines()
    line = next(x for x in page if x.startswith("vllm:cache_config_info"))
    blocks = int(line.split('num_gpu_blocks="')[1].split('"')[0])
    caches = [x for x in page if x.startswith("rbln_device_memory_bytes{") and 'kind="kv"' in x]
    size, rest = divmod(int(float(caches[0].split()[-1])), blocks)
    assert rest == 0
    return size


def test_server_info_describes_the_connector(servers: Servers) -> None:
    for server, role in zip(servers, ("kv_producer", "kv_consumer"), strict=True):
        section = server.client.get("/v1/server_info").json()["kv_transfer"]
        assert isinstance(section.pop("port"), int)
        assert section == {
            "connector": "NixlConnector",
            "role": role,
            "host": "localhost",
            "backends": ["UCX"],
            "lease_s": 30,
            "load_failure_policy": "fail",
        }


@pytest.mark.timeout(300)
def test_what_was_aborted_frees_blocks(servers: Servers) -> None:
    request = body(make_prompts(9)[-1], max_tokens=20, stream=True)
    for _ in range(3):
        params = offer(servers.prefill, {**request, "stream": False})
        sent = {**request, "kv_transfer_params": params}
        with servers.decode.client.stream("POST", "/v1/completions", json=sent) as stream:
            next(stream.iter_lines())
    until_free(servers.decode)
    until_free(servers.prefill)


def test_what_could_end_the_engine_is_refused(servers: Servers) -> None:
    request = body([5, 6, 7])
    params = offer(servers.prefill, request)
    for wrong in ({"remote_block_ids": [["a"]]}, {"remote_port": "x"}, {"unknown": 1}):
        answer = servers.decode.client.post(
            "/v1/completions", json={**request, "kv_transfer_params": {**params, **wrong}}
        )
        assert answer.status_code == 400, answer.text
    # A block that the peer does not have.
    sent = {**request, "kv_transfer_params": {**params, "remote_block_ids": [[1 << 30]]}}
    assert servers.decode.client.post("/v1/completions", json=sent).status_code == 500
    # Blocks of another prompt are not used.
    other = body([5, 6, 8])
    alone = tokens(servers.decode.client.post("/v1/completions", json=other))
    sent = {**other, "kv_transfer_params": params}
    assert tokens(servers.decode.client.post("/v1/completions", json=sent)) == alone


@pytest.mark.timeout(300)
def test_a_dead_peer_is_an_error_and_nothing_hangs(
    checkpoints: CheckpointCache, tmp_path: Path, servers: Servers
) -> None:
    request = body(make_prompts(11)[-1])
    with start(checkpoints("llama", dtype="float32"), tmp_path / "p", "kv_producer") as prefill:
        prefill.until_ready()
        first, second = (offer(prefill, request) for _ in range(2))
        sent = {**request, "kv_transfer_params": first}
        assert tokens(servers.decode.client.post("/v1/completions", json=sent))
        prefill.process.kill()
    sent = {**body(make_prompts(12)[-1]), "kv_transfer_params": second}
    sent = {**request, "cache_salt": None, "kv_transfer_params": second}
    began = time.monotonic()
    answer = servers.decode.client.post("/v1/completions", json=sent, timeout=120)
    assert answer.status_code == 500, answer.text
    assert time.monotonic() - began < 60
    assert tokens(servers.decode.client.post("/v1/completions", json=body([9, 9, 9])))
    until_free(servers.decode)

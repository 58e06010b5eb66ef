"""Adapters in a real server: loaded, used and unloaded while others stream; nothing compiles."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.adapters import make_adapter
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

LIST = "/v1/lora_adapters"
RANK = 8
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def root(checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = checkpoints("llama", dtype="float32")
    make_adapter(model, folder / "one", rank=4, seed=1)
    make_adapter(model, folder / "two", rank=RANK, seed=2, targets=("q_proj", "down_proj"))
    make_adapter(model, folder / "wide", rank=RANK + 1)
    make_adapter(model, folder / "other", base_model_name_or_path="gemma")
    return folder


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[RealServer]:
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)]
    flags += ["--lora-root", str(root), "--lora-modules", f"fixed={root / 'two'}"]
    with RealServer(
        checkpoints("llama", dtype="float32"), tmp_path_factory.mktemp("s"), *flags
    ) as up:
        up.until_ready()
        yield up


def load(server: RealServer, name: str, path: str, **more: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return server.client.post("/v1/load_lora_adapter", json=body)


def tokens(server: RealServer, model: str, length: int = 12) -> list[str]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return found


def test_adapters_answer_by_their_names(server: RealServer) -> None:
    base, fixed = tokens(server, "tiny"), tokens(server, "fixed")
    assert load(server, "one", "one").text.startswith("Success: LoRA adapter 'one' added")
    one = tokens(server, "one")
    assert base != fixed != one != base
    assert tokens(server, "tiny") == base
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "fixed", "one"]
    assert cards[1]["parent"] == "tiny"
    shown = server.client.get(f"{LIST}/fixed").json()
    assert (shown["static"], shown["rank"], shown["state"]) == (True, RANK, "ready")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for path, body in [
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "store": False}),
    ]:
        assert server.client.post(path, json={"model": "one", **body}).json()["model"] == "one"
    counted = server.client.post("/tokenize", json={"model": "one", "prompt": "hi"})
    assert counted.status_code == 200
    assert 'running_lora_adapters="one"' in server.client.get("/metrics").text

    # Another adapter under the same name: no block of the old one's prefix may be found.
    assert server.client.delete(f"{LIST}/one").status_code == 200
    assert load(server, "one", "two").status_code == 200
    assert tokens(server, "one") == fixed
    assert load(server, "one", "one", load_inplace=True).status_code == 409
    assert server.client.delete(f"{LIST}/one").status_code == 200
    answer = server.client.post("/v1/completions", json={"model": "one", "prompt": PROMPT})
    assert answer.json()["error"]["code"] == "model_not_found"


def test_what_does_not_fit_is_refused_before_the_engine(server: RealServer) -> None:
    for path, words in [
        ("wide", f"r is {RANK + 1}, and --max-lora-rank is {RANK}"),
        ("other", "base_model_name_or_path is 'gemma'"),
        ("../..", "does not lie below --lora-root"),
    ]:
        answer = load(server, "x", path)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_adapter"
        assert words in answer.json()["error"]["message"]
    assert server.metric('rbln_lora_loads_total{result="refused"') >= 3


def test_a_stream_outlives_the_name_of_its_adapter(server: RealServer) -> None:
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    answers, codes, texts = [], [], set()
    for _ in range(5):
        assert load(server, "one", "one").status_code == 200
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            heard = [next(lines)]
            with httpx.Client(base_url=server.url, timeout=60) as other:
                answers.append(other.delete(f"{LIST}/one?wait=false").status_code)
                gone = {"model": "one", "prompt": "x"}
                codes.append(other.post("/v1/completions", json=gone).status_code)
                held = other.get(LIST).json()["data"]
            heard += list(lines)
        assert heard[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in heard if "{" in line]
        texts.add("".join(chunk["choices"][0]["text"] for chunk in chunks))
        until_gone(server, "one")
    # A stream may be over before the unload has arrived, but hardly five times.
    assert 202 in answers, (answers, held)
    assert codes == [404] * 5
    assert len(texts) == 1


def until_gone(server: RealServer, name: str) -> None:
    deadline = time.monotonic() + 30
    while server.client.get(f"{LIST}/{name}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Streaming(threading.Thread):
    """Streams completions one after another; notes the tokens and the gaps between them."""

    def __init__(self, server: RealServer, model: str, length: int) -> None:
        super().__init__()
        self._url = server.url
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0}
        self._body |= {"stream": True, "ignore_eos": True}
        self.enough = threading.Event()
        self.texts: list[str] = []
        self.gaps: list[float] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self.enough.is_set():
                self.texts.append(self._one(client))

    def _one(self, client: httpx.Client) -> str:
        texts: list[str] = []
        last = 0.0
        with client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if last:
                        self.gaps.append(now - last)
                    last = now
        return "".join(texts)


def churn(server: RealServer, times: int) -> list[int]:
    """Load, use and unload beside two streams; return the resident bytes after every tenth."""
    compiled = server.metric("rbln_recompiles_after_warmup_total")
    processes = [psutil.Process(server.process.pid), psutil.Process(server.engine_pid())]
    streams = [Streaming(server, model, 100) for model in ("tiny", "fixed")]
    for stream in streams:
        stream.start()
    resident = []
    try:
        for turn in range(times):
            path = ("one", "two")[turn % 2]
            assert load(server, "churned", path).status_code == 200
            if turn % 5 == 0:
                tokens(server, "churned", 4)
            assert server.client.delete(f"{LIST}/churned").status_code == 200
            if turn % 10 == 9:
                resident.append(sum(process.memory_info().rss for process in processes))
    finally:
        for stream in streams:
            stream.enough.set()
        for stream in streams:
            stream.join(60)
    for stream in streams:
        # Another slot was written again and again meanwhile; what these compute stays the same.
        assert len(set(stream.texts)) == 1, stream.texts
        gaps = sorted(stream.gaps)
        print(f"gaps: median {gaps[len(gaps) // 2]:.4f} s, longest {gaps[-1]:.4f} s")  # noqa: T201
    assert server.metric("rbln_recompiles_after_warmup_total") == compiled
    assert [a["name"] for a in server.client.get(LIST).json()["data"]] == ["fixed"]
    return resident


def test_loads_and_unloads_beside_streams(server: RealServer) -> None:
    churn(server, 30)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_loads_leave_memory_flat(server: RealServer) -> None:
    resident = churn(server, 1000)
    half = len(resident) // 2
    assert max(resident[half:]) - max(resident[:half]) < 8 * 2**20, resident

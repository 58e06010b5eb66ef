"""What the server's own settings become in the engine's configuration."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.engine import async_llm

from rbln_backend.errors import ConfigError
from server.engine.config import engine_config
from server.engine.launch import StartParts
from server.engine.process import engine_first
from server.engine.weight_files import WeightFiles, check_weight_files, refuse_damaged_weights
from server.frontend import LaunchError
from server.host.files import run_folder
from server.settings import ServerSettings
from tests.checkpoints import CheckpointCache
from tests.hub_server import HubServer
from tests.server.real_server import FLAGS, RealServer
from tests.server.test_real_server_end import kill


def configured(model: Path, run_dir: Path, *flags: str, **settings: Any) -> Any:
    from server.vllm.flags import parse_arguments

    ours = ServerSettings(**settings)
    return engine_config(parse_arguments([str(model), *FLAGS, *flags], ours), ours, run_dir)[1]


BACKLOGS: list[tuple[tuple[str, ...], dict[str, Any], int | None]] = [
    ((), {}, 16384),
    # What all sequences can hold: eight prompts of 8,000 tokens at once are all taken.
    (("--max-num-seqs", "100", "--max-num-batched-tokens", "128"), {}, 100 * 256),
    (("--max-num-seqs", "100", "--max-num-batched-tokens", "128", "-dp", "2"), {}, 2 * 100 * 256),
    ((), {"max_queued_tokens": 100}, 100),
    (("--max-num-queued-tokens", "200"), {}, 200),
    (("--max-num-queued-tokens", "200"), {"max_queued_tokens": 200}, 200),
    (("--runner", "pooling"), {}, None),
]


@pytest.mark.parametrize(("flags", "settings", "expected"), BACKLOGS)
def test_the_backlog_of_prompt_tokens_is_bounded(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    flags: tuple[str, ...],
    settings: dict[str, Any],
    expected: int | None,
) -> None:
    config = configured(checkpoints("llama"), tmp_path, *flags, **settings)
    assert config.scheduler_config.max_num_queued_tokens == expected


def test_one_limit_is_not_given_twice(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    flags = ("--max-num-queued-tokens", "200")
    with pytest.raises(LaunchError, match="give one of them") as caught:
        configured(checkpoints("llama"), tmp_path, *flags, max_queued_tokens=100)
    assert caught.value.exit_code == 2


def test_the_order_of_prompts_is_one_setting(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    model = checkpoints("llama")
    config = configured(model, tmp_path, prefill_policy="shortest", max_num_partial_prefills=2)
    assert config.additional_config.rbln.prefill_policy == "shortest"
    assert config.additional_config.rbln.max_num_partial_prefills == 2
    config = configured(model, tmp_path, prefill_policy="fcfs")
    assert config.additional_config.rbln.prefill_policy == "fcfs"
    with pytest.raises(LaunchError, match="has no effect with --prefill-policy fcfs"):
        configured(model, tmp_path, prefill_policy="fcfs", max_num_partial_prefills=2)
    with pytest.raises(LaunchError, match="no effect on a pooling model"):
        configured(model, tmp_path, "--runner", "pooling", prefill_policy="shortest")
    flags = ("--additional-config", '{"rbln": {"prefill_policy": "shortest"}}')
    with pytest.raises(LaunchError, match="give one of them") as caught:
        configured(model, tmp_path, *flags, prefill_policy="fcfs")
    assert caught.value.exit_code == 2


def test_a_chat_template_that_would_be_waited_for_is_refused(tmp_path: Path) -> None:
    from server.vllm.flags import parse_arguments

    os.mkfifo(pipe := tmp_path / "template.jinja")
    with pytest.raises(LaunchError, match=r"--chat-template: .* is not a regular file") as caught:
        parse_arguments([str(tmp_path), "--chat-template", str(pipe)], ServerSettings())
    assert caught.value.exit_code == 2


def test_the_scheduler_is_told_how_long_requests_may_wait(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    config = configured(checkpoints("llama"), tmp_path, max_queue_s=1.5)
    assert config.additional_config.rbln.max_queue_ms == 1500
    assert config.additional_config.rbln.run_dir == str(tmp_path)


@pytest.mark.parametrize("connectors", [[1], "NixlConnector", [{"kv_connector": "P2p"}], None])
def test_a_wrong_list_of_connectors_is_refused(
    checkpoints: CheckpointCache, tmp_path: Path, connectors: object
) -> None:
    extra = {} if connectors is None else {"connectors": connectors}
    names = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    option = json.dumps({**names, "kv_connector_extra_config": extra})
    with pytest.raises(ConfigError, match=r"^connectors.*NixlConnector and OffloadingConnector"):
        configured(checkpoints("llama"), tmp_path, "--kv-transfer-config", option)


# --------------------------------------------------------------------------------- documented flags
DEFAULT_BUCKETS: tuple[str, tuple[int, ...]] = ("exponential", ())


def buckets(config: Any) -> tuple[str, tuple[int, ...]]:
    rbln = config.additional_config.rbln
    return rbln.decode_batch_bucket_strategy, rbln.decode_batch_bucket_manual_buckets


def test_the_documented_command_line_is_taken(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    flags = "--max-model-len 256 --max-num-seqs 8 --block-size 1024"
    more = "--enable-chunked-prefill --max-num-batched-tokens 128"
    config = configured(checkpoints("llama"), tmp_path, *flags.split(), *more.split())
    assert config.cache_config.block_size == 1024
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.scheduler_config.max_num_seqs == 8
    assert config.scheduler_config.enable_chunked_prefill


@pytest.mark.parametrize(
    "flags",
    [
        ("-O3",),
        ("-O", "3"),
        ("-O=3",),
        ("-O2",),
        ("-cc", '{"mode": 3, "cudagraph_mode": "NONE"}'),
        ("-cc.mode=3",),
        ("--no-async-scheduling",),
        ("--async-scheduling",),
        ("--kv-cache-dtype", "auto"),
        ("--kv-cache-dtype", "bfloat16", "--dtype", "bfloat16"),
    ],
)
def test_what_is_done_anyway_may_be_asked_for(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = configured(checkpoints("llama"), tmp_path, *flags)
    assert buckets(config) == DEFAULT_BUCKETS
    assert config.compilation_config.mode.name == "NONE"


# FLAGS of the real server allow four requests.
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--compilation-config", '{"mode": 3, "compile_sizes": [1]}'), (1, 4)),
        (('--compilation-config={"compile_sizes": [3, 4, 232, 256]}',), (3, 4)),
        (("-cc", '{"compile_sizes": [2, 1]}'), (1, 2, 4)),
        (("-cc", '{"compile_sizes": [2]}'), (2, 4)),
    ],
)
def test_sizes_to_compile_become_decode_buckets(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    config = configured(checkpoints("llama"), tmp_path, *flags)
    assert buckets(config) == ("manual", expected)


def test_stages_of_a_pipeline_share_the_largest_bucket(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    flags = ("-cc", '{"compile_sizes": [1, 4]}', "--pipeline-parallel-size", "2")
    assert buckets(configured(checkpoints("llama"), tmp_path, *flags)) == ("manual", (1, 2))


BUCKETS = json.dumps({"rbln": {"decode_batch_bucket_step": 3}})
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--enforce-eager",), "--enforce-eager is not supported: there is no eager path"),
    (("-O0",), r"--optimization-level 0 \(-O0\) is not supported: there is no eager path"),
    (("-cc.mode=0",), r"mode must be 3, got 0 \(NONE\)"),
    (("-cc.mode=1",), r"mode must be 3, got 1 \(STOCK_TORCH_COMPILE\)"),
    (("-cc", '{"backend": "inductor"}'), "backend='inductor' is not supported"),
    (
        ("--cudagraph-capture-sizes", "1", "2"),
        r"--compilation-config: cudagraph_capture_sizes=\[1, 2\] is not supported",
    ),
    (
        ("-cc", '{"compile_sizes": ["cudagraph_capture_sizes"]}'),
        r"compile_sizes must be integers above 0, got \['cudagraph_capture_sizes'\]",
    ),
    (
        ("-cc", '{"compile_sizes": [2]}', "--additional-config", BUCKETS),
        "decode_batch_bucket_step of --additional-config both set the decode buckets",
    ),
    (("--device-ids", "0"), "--device-ids: the emulated device has no numbers"),
    (
        ("--kv-cache-dtype", "fp8_e5m2"),
        "--kv-cache-dtype fp8_e5m2: a KV cache in this dtype: not supported",
    ),
    (("--kv-cache-dtype", "float16"), "--kv-cache-dtype float16: a KV cache in this dtype"),
    (
        ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"),
        "--kv-cache-dtype-skip-layers: a KV cache in this dtype",
    ),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_is_not_done_is_refused_by_name(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises((LaunchError, ValueError), match=said):
        configured(checkpoints("llama"), tmp_path, *flags)


def test_latent_attention_keeps_what_the_model_computes(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    with pytest.raises((LaunchError, ValueError), match="fp8: a KV cache in this dtype"):
        configured(checkpoints("deepseek_v2"), tmp_path, "--kv-cache-dtype", "fp8")


def test_python_asks_in_the_same_words(checkpoints: CheckpointCache) -> None:
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.engine.arg_utils import AsyncEngineArgs

    def config(**options: Any) -> Any:
        args = {"model": str(checkpoints("llama")), "max_num_seqs": 4, "max_model_len": 256}
        return AsyncEngineArgs(**args, **options).create_engine_config()

    asked = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, compile_sizes=[1])
    assert buckets(config(compilation_config=asked)) == ("manual", (1, 4))
    with pytest.raises(ValueError, match="--enforce-eager is not supported"):
        config(enforce_eager=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_inc"):
        config(kv_cache_dtype="fp8_inc")


# ------------------------------------------------------------------------------------- engine first
CONFIG: Any = SimpleNamespace()


class OfVllm:
    """vLLM's two functions that AsyncLLM calls, which note the order of what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.events: list[str] = []
        self.fails = fails
        self._is_rendered = threading.Event()
        monkeypatch.setattr(async_llm, "renderer_from_config", self.renderer_from_config)
        monkeypatch.setattr(async_llm, "EngineCoreClient", self)
        monkeypatch.setattr(async_llm.Executor, "get_class", lambda config: object)
        monkeypatch.setattr(async_llm, "load_stat_logger_plugin_factories", list)

    def renderer_from_config(self, config: Any) -> Any:
        self.events.append("tokenizer")
        self._is_rendered.set()
        return SimpleNamespace(start_mm_warmup_in_background=lambda: self.events.append("media"))

    def make_async_mp_client(self, *, renderer: Any, **options: Any) -> Any:
        if self.fails:
            raise RuntimeError("no engine")
        self.events.append("engine")
        renderer.start_mm_warmup_in_background()
        # The engine answers only after the tokenizer was loaded beside it.
        assert self._is_rendered.wait(10)
        return SimpleNamespace(**options)


def made(log_stats: bool = True) -> Any:
    """Call vLLM's functions in AsyncLLM's order; return the client."""
    renderer = async_llm.renderer_from_config(CONFIG)
    return async_llm.EngineCoreClient.make_async_mp_client(
        vllm_config=CONFIG,
        executor_class=object,
        log_stats=log_stats,
        client_addresses=None,
        client_count=1,
        client_index=0,
        renderer=renderer,
    )


def test_the_engine_starts_first_and_loads_while_the_tokenizer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = OfVllm(monkeypatch)
    with engine_first(CONFIG, log_stats=True):
        client = made()
    assert vllm.events == ["engine", "tokenizer", "media"]
    assert client.vllm_config is CONFIG
    assert async_llm.EngineCoreClient is vllm


def test_an_engine_that_does_not_start_is_an_error_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OfVllm(monkeypatch, fails=True)
    with engine_first(CONFIG, log_stats=True), pytest.raises(RuntimeError, match="no engine"):
        made()


def test_a_tokenizer_that_cannot_be_read_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = OfVllm(monkeypatch)
    # Other tests of this process have children, too, which are to live.
    children = multiprocessing.active_children
    others = children()
    monkeypatch.setattr(
        multiprocessing, "active_children", lambda: [x for x in children() if x not in others]
    )
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))

    def fail(config: Any) -> Any:
        engine.start()
        vllm.renderer_from_config(config)
        raise OSError("tokenizer.json")

    monkeypatch.setattr(async_llm, "renderer_from_config", fail)
    with pytest.raises(OSError, match="tokenizer"), engine_first(CONFIG, log_stats=True):
        made()
    assert not engine.is_alive()


def test_an_engine_of_other_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    OfVllm(monkeypatch)
    with engine_first(CONFIG, log_stats=True), pytest.raises(LaunchError, match="another AsyncLLM"):
        made(log_stats=False)


# --------------------------------------------------------------------------------------- run folder
_HOLD = """
import sys
from pathlib import Path
from server.host.files import run_folder
with run_folder(Path(sys.argv[1])) as folder:
    (folder / "url").write_text("http://127.0.0.1:1")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holding(top: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a run directory in ``top``."""
    command = [sys.executable, "-c", _HOLD, str(top)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def end(holder: subprocess.Popen[str], number: signal.Signals) -> None:
    holder.send_signal(number)
    holder.communicate(timeout=10)


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead, left = holding(tmp_path)
    end(dead, signal.SIGKILL)
    assert (left / "url").exists()
    with run_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_nobody_elses_directory_is_touched(tmp_path: Path) -> None:
    live, held = holding(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "rbln-serve-link").symlink_to(elsewhere)
    (tmp_path / "rbln-serve-checkout").mkdir()
    (piped := tmp_path / "rbln-serve-pipe").mkdir()
    os.mkfifo(piped / "lock")
    (linked := tmp_path / "rbln-serve-linked").mkdir()
    (linked / "lock").symlink_to(elsewhere / "lock")
    (tmp_path / "rbln-serve-file").touch()
    before = set(tmp_path.rglob("*"))
    with run_folder(tmp_path) as folder:
        assert {p for p in tmp_path.rglob("*") if folder not in (p, *p.parents)} == before
    end(live, signal.SIGKILL)
    with run_folder(tmp_path):
        assert not held.exists()
        assert linked.exists()


# -------------------------------------------------------------------------------------- start parts
def test_parts_follow_one_another() -> None:
    times = iter([10.0, 11.5, 12.0])
    parts = StartParts(lambda: next(times))
    parts.end("imports")
    parts.end("engine")
    line = parts.line({"engine": {"load": 0.25, "compile": 0.125}})
    assert line == "imports 1.50 s, engine 0.50 s (load 0.25, compile 0.12)"


# ------------------------------------------------------------------------------------- weight files
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = {f"model-{i}.safetensors": f"layer.{i}" for i in (1, 2)}
    for name, tensor in names.items():
        save_file({tensor: torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / name)
    index = {"weight_map": {tensor: name for name, tensor in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def found(folder: Path, dtype: str = "bfloat16") -> WeightFiles:
    return check_weight_files(str(folder), dtype)


def test_whole_files_are_no_problem(folder: Path) -> None:
    assert found(folder) == WeightFiles([], [], "bfloat16")
    assert check_weight_files("some-org/some-model", "bfloat16") == WeightFiles()


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    (problem,) = found(folder).problems
    assert "2 files, of which 1 are missing: model-2.safetensors; fetch them" in problem


def test_a_download_that_was_cut_off(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-16])
    (problem,) = found(folder).problems
    assert f"{len(data) - 16:,} bytes, its header says {len(data):,}" in problem


def test_a_hole_of_the_right_length(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    save_file({"layer.2": torch.ones(1 << 10, 1 << 10, dtype=torch.bfloat16)}, path)
    size = path.stat().st_size
    assert found(folder).problems == []
    os.truncate(path, size // 2)
    os.truncate(path, size)
    (problem,) = found(folder).problems
    assert "model-2.safetensors has no data from byte " in problem


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file({"layer.1": torch.zeros(8, 8)}, folder / "model-2.safetensors")
    (problem,) = found(folder).problems
    assert problem.startswith("layer.1 is in model-1.safetensors and in model-2.safetensors")


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_header_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "model-1.safetensors").write_bytes(content)
    (problem,) = found(folder).problems
    assert problem.startswith("model-1.safetensors is damaged: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [8, 9]}, "invalid shape, data type, or offset"),
        ({"data_offsets": [-5, 128]}, "-5"),
        ({"dtype": "B7"}, "B7"),
    ],
)
def test_a_header_that_means_nothing(folder: Path, change: dict[str, Any], words: str) -> None:
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["layer.1"] |= change
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    (problem,) = found(folder).problems
    assert problem.startswith("model-1.safetensors is damaged: ")
    assert words in problem


def test_damaged_weights_are_refused_before_an_engine_is_built(folder: Path) -> None:
    refuse_damaged_weights(str(folder), "auto")
    for name in ("model-1", "model-2"):
        (folder / f"{name}.safetensors").write_bytes(b"\x93NUMPY" + b"x" * 200)
    with pytest.raises(LaunchError, match=r"^model-1.* do.* begin .*; model-2.*; fetch it again$"):
        refuse_damaged_weights(str(folder), "auto")
    refuse_damaged_weights(str(folder), "dummy")


def test_an_index_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    (problem,) = found(folder).problems
    assert "cannot be read" in problem


def test_a_conversion_and_a_folder_without_weights_are_warned_of(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (warning,) = found(folder, "float32").warnings
    assert "stored as bfloat16 and converted to float32" in warning
    (warning,) = found(tmp_path_factory.mktemp("empty")).warnings
    assert "has no weights" in warning


# ---------------------------------------------------------------------------------------- hub model
def answers_while_it_starts(server: RealServer) -> None:
    """The imports of vLLM, a dozen seconds, have just begun."""
    assert server.client.get("/livez").status_code == 200
    starting = server.client.get("/readyz")
    assert (starting.status_code, starting.json()["status"]) == (503, "starting")
    assert "retry-after" in starting.headers
    hi = [{"role": "user", "content": "hi"}]
    refused = server.client.post("/v1/chat/completions", json={"messages": hi})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "rbln_serve_phase" in server.client.get("/metrics").text


@pytest.mark.engine
def test_a_model_of_a_hub_is_served_and_nothing_survives_a_kill(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    hub = HubServer()
    hub.add("org/tiny", checkpoints("llama"))
    with hub.running():
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        with RealServer(
            Path("org/tiny"), tmp_path, environment=environment, own_imports=True
        ) as server:
            answers_while_it_starts(server)
            server.until_ready()
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
            answer = server.client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 4
            root = server.client.get("/v1/models").json()["data"][0]["root"]
            abandoned = kill(server, tmp_path)
    snapshot = tmp_path / "hub/models--org--tiny/snapshots" / hub.commit("org/tiny", "main")
    assert root == str(snapshot)
    assert hub.ranges("model.safetensors") == [None]
    with RealServer(snapshot, tmp_path):
        assert not abandoned.exists()

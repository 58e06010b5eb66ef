"""The command line and the settings: fast, clear, and without the engine's libraries."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from vllm import envs

import server
from rbln_backend.api import refuse_second_plugin
from rbln_backend.errors import PlatformError
from server.commands import cli, flags
from server.commands.flags import UnknownFlagError, nearest, require_known, vllm_flags
from server.settings import ServerSettings, SettingsError, load_settings
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.graph_cache import graph_cache
from tests.server.real_server import FLAGS
from tests.warm_process import ForkedProcess, warm_process

HEAVY = "{'torch', 'vllm', 'transformers', 'numpy'}"


def rbln_serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
        check=False,
    )


@pytest.fixture
def status_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command line that starts nothing, in this process, and return its exit code."""
    for module in (cli, flags):
        monkeypatch.setattr(module, "configure", lambda *_: None)

    def status(*args: str) -> int:
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.main(args))
        return int(ended.value.code or 0)

    return status


def test_nothing_heavy_is_imported_before_listening() -> None:
    code = (
        "import sys, uvloop, server.commands.cli, server.service\n"
        "import server.engine.launch, server.engine.process\n"
        "import server.commands.check\n"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "check"])
def test_nothing_heavy_is_imported_before_flags_are_checked(command: str) -> None:
    code = (
        "import sys\nfrom server.commands.cli import main\n"
        "try:\n    code = main([sys.argv[1], 'm', '--max-num-seqz', '1'])\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print(code, sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "2 []"
    assert "--max-num-seqz: unknown flag" in done.stderr


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_lists_every_setting(
    status_of: Callable[..., int], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert status_of(command, "--help") == 0
    shown = capsys.readouterr().out
    for name in ServerSettings.model_fields:
        assert "--" + name.replace("_", "-") in shown
        assert f"RBLN_SERVE_{name.upper()}" in shown.replace("\n", "").replace(" ", "")
    # In groups, with the kind of value and the default of each.
    assert "\nLimits of concurrent work and of the size of a request:\n" in shown
    assert "--port PORT" in shown
    assert "--unknown-fields {reject,warn}" in shown
    assert "--drain-timeout-s SECONDS" in shown
    assert "default: 8000;" in shown
    assert " X " not in shown


def test_version_and_bare_help(
    status_of: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rbln_serve("--version").stdout.startswith("rbln-serve ")
    assert status_of("--help") == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "check" in shown
    assert status_of() == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve"], "MODEL is missing"),
        (["check"], "MODEL is missing"),
        (["check", "m", "--port", "abc"], "--port (RBLN_SERVE_PORT)"),
        (["serve", "m", "--port", "abc"], "--port (RBLN_SERVE_PORT)"),
        (["serve", "m", "--port", "70000"], "65535"),
        (["serve", "m", "--unknown-fields", "maybe"], "'reject' or 'warn'"),
        (["serve", "m", "--ssl-keyfile", "k"], "--ssl-certfile"),
        (["serve", "m", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["serve", "m", "--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["serve", "m", "--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"], "/nowhere"),
        (["serve", "m", "--ssl_cert_reqs", "2"], "--ssl-ca-certs"),
        (["serve", "m", "--root-path", "llm"], "--root-path (RBLN_SERVE_ROOT_PATH)"),
        (["bogus"], "bogus"),
        (["serv"], "did you mean serve?"),
        (["serve", "m", "--max-num-seqz", "1"], "did you mean --max-num-seqs?"),
        (["serve", "m", "--max_num_seqz=1"], "did you mean --max-num-seqs?"),
        (["check", "m", "--drain-timeout", "1"], "did you mean --drain-timeout-s?"),
        (["cache", "list", "--jsn"], "did you mean --json?"),
        (["cache", "export", "f", "--no-kernel"], "did you mean --no-kernels?"),
        (["fetch", "org/repo", "--revison", "x"], "did you mean --revision?"),
        (["fetch", "smollm2", "--revision", "x"], "for models of a hub"),
        (["fetch", "org/repo/x"], "ORG/REPO, FILE.gguf OUT can"),
        (["fetch", "org/repo", "out"], "no other MODEL takes one"),
        (["fetch", "x.gguf"], "needs a folder OUT"),
        (["fetch", "nowhere.gguf", "out"], "there is no file 'nowhere.gguf'"),
        (["collect-env", "--vlm"], "did you mean --vllm?"),
        (["batch", "in.jsonl", "--model", "m"], "-o OUT and --model MODEL are needed"),
        (["batch", "none.jsonl", "-o", "out", "--model", "m"], "none.jsonl is no file"),
    ],
)
def test_usage_errors_end_with_2_and_name_the_flag(
    status_of: Callable[..., int], capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert status_of(*args) == 2
    assert words in capsys.readouterr().err


_HIDE = """
import sys
from pathlib import Path
from server.commands.cli import hide_secrets
hide_secrets(sys.argv[2:])
print(Path("/proc/self/cmdline").read_text(), Path("/proc/self/comm").read_text())
"""


CREDENTIALS = ("api_key", "admin_key", "api_key_file", "admin_key_file")


@pytest.mark.parametrize("name", CREDENTIALS)
def test_an_empty_credential_opens_no_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, variable = f"--{name.replace('_', '-')}", f"RBLN_SERVE_{name.upper()}"
    words = re.escape(f"{flag} ({variable}): an empty")
    for empty in ("", "  ", ["one", ""]) if name in ("api_key", "admin_key") else ("", "  "):
        with pytest.raises(SettingsError, match=words):
            load_settings({name: empty}, {})
        with pytest.raises(SettingsError, match=words):
            load_settings({}, {name: empty})
    monkeypatch.setenv(variable, "")
    with pytest.raises(SettingsError, match=words):
        load_settings({}, {})


def test_an_empty_key_ends_the_start_with_2(
    status_of: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for args, env in (
        (["--api-key", ""], {}),
        ([], {"RBLN_SERVE_ADMIN_KEY": ""}),
        ([], {"VLLM_API_KEY": ""}),
        (["--admin-key", "root="], {}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert status_of("serve", "m", *args) == 2
        said = capsys.readouterr().err
        assert "empty" in said
        assert [*args, *env][0] in said


def test_secrets_are_taken_off_the_process_title() -> None:
    flags = ["--api-key", "sk-one", "--admin_key=sk-two", "--port", "1"]
    done = subprocess.run(
        [sys.executable, "-c", _HIDE, "serve", "m", *flags],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rbln-serve serve m --api-key *** --admin_key=*** --port 1" in done.stdout
    assert "sk-" not in done.stdout


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--hf-token", "hf_x"], ["--hf-token", "***"]),
        (["--hf_token=hf_x"], ["--hf_token=***"]),
        (["--hf-tok", "hf_x", "-tp", "2"], ["--hf-tok", "***", "-tp", "2"]),
        (["--hf-tok=hf_x"], ["--hf-tok=***"]),
        (["--api-k", "sk-x"], ["--api-k", "***"]),
        # The token's value is optional.
        (["--hf-token", "--port", "1"], ["--hf-token", "--port", "1"]),
        (["m", "--hf-overrides", "{}", "--", "x"], ["m", "--hf-overrides", "{}", "--", "x"]),
        (["--api-server-count", "1", "-h", "x"], ["--api-server-count", "1", "-h", "x"]),
    ],
)
def test_secrets_of_vllms_flags_and_of_shortened_ones_are_hidden(
    given: list[str], shown: list[str]
) -> None:
    from server.commands.cli import hidden_secrets

    assert hidden_secrets(given) == shown


def test_parity_is_the_command_of_its_own() -> None:
    done = rbln_serve("parity", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: rbln-parity")
    done = rbln_serve("parity", "--modle", "m")
    assert done.returncode == 2
    assert "did you mean --model?" in done.stderr


def test_a_port_in_use_is_reported() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = rbln_serve("serve", "m", "--host", "127.0.0.1", "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_precedence_of_flags_environment_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_SERVE_PORT", "1001")
    file = {"port": 1002, "host": "from-file"}
    assert load_settings({}, {}).host == "0.0.0.0"
    assert load_settings({}, file).host == "from-file"
    assert load_settings({}, file).port == 1001
    assert load_settings({"port": "1000"}, file).port == 1000


def test_an_unknown_variable_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_SERVE_PROT", "1")
    with pytest.raises(SettingsError, match="did you mean RBLN_SERVE_PORT"):
        load_settings({}, {})


def test_settings_are_frozen_and_described() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ServerSettings().port = 1  # type: ignore[misc]
    assert all(field.description for field in ServerSettings.model_fields.values())


def test_the_config_file_of_vllm_may_hold_the_address(tmp_path: Path) -> None:
    from server.commands.flags import config_file

    path = tmp_path / "serve.yaml"
    path.write_text("port: 1234\nssl-keyfile: k\nmax-model-len: 5\n")
    assert config_file(["m", "--config", str(path)]) == {"port": 1234, "ssl_keyfile": "k"}


@pytest.mark.parametrize(
    "words",
    [["--shutdown-timeout", "90"], ["--shutdown_timeout=90"], ["--config", "{}"]],
    ids=["flag", "underscores", "file"],
)
def test_vllms_names_of_our_settings_are_read(words: list[str], tmp_path: Path) -> None:
    from server.commands.flags import model_flags

    path = tmp_path / "serve.yaml"
    path.write_text("shutdown-timeout: 90\nh11-max-incomplete-event-size: 2048\n")
    _, settings = model_flags(["m", *(word.format(path) for word in words)])
    assert settings.drain_timeout_s == 90
    assert settings.max_header_bytes == (2048 if "--config" in words else 65536)


# -------------------------------------------------------------------------------------------- batch
LINES = 80


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [3 + number % 40, 7], "max_tokens": 24, "temperature": 0}
    body |= {"ignore_eos": True}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body} | (
        fields
    )


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def started(checkpoint: Path, tmp_path: Path) -> ForkedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
    command = ["batch", str(tmp_path / "in.jsonl")]
    command += ["-o", str(tmp_path / "out.jsonl"), "--model", str(checkpoint), *FLAGS]
    command += ["--min-free-bytes", "0", "--run-root", str(tmp_path)]
    environ = {**kept, "VLLM_CACHE_ROOT": str(graph_cache()), "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("wb") as log:
        return warm_process().start(*command, environ=environ, output=log, errors=log)


@pytest.mark.engine
def test_it_goes_on_where_it_was_killed(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    lines = [line(number) for number in range(LINES)]
    lines[5]["body"]["max_tokens"] = -1
    write(tmp_path / "in.jsonl", lines)
    first = started(checkpoints("llama"), tmp_path)
    parts = tmp_path / "out.jsonl.partial" / "parts"
    deadline = time.monotonic() + 240
    while not any(part.stat().st_size > 2000 for part in parts.glob("*.output")):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    first.wait(60)
    assert not (tmp_path / "out.jsonl").exists()
    second = started(checkpoints("llama"), tmp_path)
    status = second.wait(240)
    errors = (tmp_path / "log").read_text()
    assert status == 0, errors
    assert f"lines {LINES}/{LINES}, 1 failed" in errors
    found = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert [one["custom_id"] for one in found] == [f"c{number}" for number in range(LINES)]
    assert found[5]["response"]["body"]["error"]["param"] == "max_tokens"
    texts = [one["response"]["body"]["choices"][0]["text"] for n, one in enumerate(found) if n != 5]
    # Forty prompts in turn: equal prompts have equal answers.
    assert texts[0] == texts[39]
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.engine
def test_wrong_lines_are_reported(tmp_path: Path) -> None:
    wrong = [line(1), line(2, method="GET"), line(3, url="/v1/embeddings"), line(1)]
    write(tmp_path / "in.jsonl", wrong)
    # A folder without a model: lines are checked before the engine reads it.
    process = started(tmp_path, tmp_path)
    assert process.wait(60) == 1
    errors = (tmp_path / "log").read_text()
    assert "line 2: 'method' must be 'POST'" in errors
    assert "got '/v1/embeddings'" in errors and "line 3: 'url' must be" in errors
    assert "line 4: 'custom_id' 'c1' is that of an earlier line" in errors
    assert "model" not in errors


@pytest.mark.engine
def test_lines_of_unknown_endpoints_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line(1, url="/v1/none")])
    process = started(tmp_path, tmp_path)
    assert process.wait(60) == 1
    errors = (tmp_path / "log").read_text()
    assert "url of the first line: must be one of /v1/chat/completions" in errors
    assert "got '/v1/none'" in errors


# -------------------------------------------------------------------------------------- collect env
HEAVY_MODULES = "{'torch', 'vllm', 'transformers'}"


def test_the_report_has_versions_and_hides_secrets() -> None:
    variables = {
        "RBLN_SERVE_API_KEY": "name=sk-1",
        "HF_TOKEN": "hf-2",
        "HF_ENDPOINT": "https://user:pass-3@mirror.example",
        "VLLM_CACHE_ROOT": "/nowhere/cache",
        "HOME_SECRET": "unlisted-4",
    }
    code = (
        "import sys\nfrom server.commands.cli import main\nmain(['collect-env', '--json'])\n"
        f"print(sorted({HEAVY_MODULES} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    assert done.stderr.strip() == "[]"
    found = json.loads(done.stdout)
    assert found["rbln-serve"]["version"] == server.__version__
    assert found["packages"]["vllm"]
    assert found["hardware"]["kernels"].endswith("portable")
    assert found["cache"]["root"] == "/nowhere/cache"
    shown = found["variables"]
    assert shown["RBLN_SERVE_API_KEY"] == shown["HF_TOKEN"] == "***"
    assert shown["HF_ENDPOINT"] == "https://***@mirror.example"
    assert not {"sk-1", "hf-2", "pass-3", "unlisted-4"} & set(done.stdout.replace('"', " ").split())
    assert "pass-3" not in done.stdout


def test_the_text_has_the_same_sections() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "collect-env"], capture_output=True, text=True, check=True
    )
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == ["rbln-serve:", "hardware:", "packages:", "cache:", "variables:"]


# --------------------------------------------------------------------------------------- flag names
KNOWN = {"--max-num-seqs", "--max-num-batched-tokens", "--hf-overrides", "--no-async", "-tp", "-cc"}


def test_the_list_is_that_of_the_installed_vllm() -> None:
    from server.vllm.flags import serve_parser

    assert vllm_flags() == set(serve_parser()._option_string_actions), "run `make flags`"


@pytest.mark.parametrize(
    "words",
    [
        "m --max-num-seqs 4",
        "m --max_num_seqs=4",
        # A prefix of one flag alone, which vLLM's parser accepts.
        "m --max-num-s 4",
        "m --hf-overrides.rope.theta 1 --hf-overrides.archs+ x",
        "m --no-async -tp2 -tp=2 -O3 -O.mode 3 -cc.mode 3",
        "m --max-num-seqs -1 -- --anything",
    ],
)
def test_what_vllm_accepts_is_known(words: str) -> None:
    require_known(words.split(), KNOWN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("m --max-num-sequs 4", "--max-num-sequs: unknown flag; did you mean --max-num-seqs?"),
        ("m --max-num 4", "--max-num: ambiguous flag; could be --max-num-batched-tokens, --max-"),
        ("m --ours-too 4", "did you mean --ours-two?"),
        ("m --zzz", "--zzz: unknown flag; --help lists the flags"),
        ("m -x 3", "-x: unknown flag"),
    ],
)
def test_what_it_does_not_accept_is_refused(words: str, message: str) -> None:
    with pytest.raises(UnknownFlagError) as refused:
        require_known(words.split(), KNOWN, ["--ours-two"])
    assert message in str(refused.value)


def test_values_with_spaces_are_no_flags() -> None:
    require_known(["m", "--hf-overrides", "--not a flag"], KNOWN)


def test_the_nearest_word_or_nothing() -> None:
    assert nearest("srve", ["serve", "check"]) == "; did you mean serve?"
    assert nearest("xyz", ["serve", "check"]) == ""


# ------------------------------------------------------------------------------------ second plugin
REASON = "two platform plug-ins are called 'rbln': second_plugin:register of vllm-second"
SECOND = """
import sys

def register():
    return "second_plugin.SecondPlatform"

def __getattr__(name):
    # vLLM asks for the class only when it has chosen this platform.
    print("SECOND CHOSEN", name, file=sys.stderr)
    from vllm.platforms.cpu import CpuPlatform
    return type("SecondPlatform", (CpuPlatform,), {})
"""


def distribution(folder: Path, name: str, value: str) -> Path:
    dist = folder / f"{name}-9.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    points = f"[vllm.platform_plugins]\nrbln = {value}\n"
    if name == "rbln-serve":
        points += "[vllm.general_plugins]\nrbln = rbln_backend.api:refuse_second_plugin\n"
    (dist / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(
    params=[pytest.param("ours is found first", marks=pytest.mark.wide), "ours is found last"]
)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return PYTHONPATH; a distribution counts where its name is found first."""
    second = distribution(tmp_path / "second", "vllm-second", "second_plugin:register")
    (second / "second_plugin.py").write_text(SECOND)
    ours = distribution(tmp_path / "ours", "rbln-serve", "rbln_backend:register")
    folders = [ours, second] if request.param == "ours is found first" else [second, ours]
    return os.pathsep.join(map(str, [*folders, ROOT]))


@pytest.mark.engine
def test_check_refuses_it(path: str, checkpoints: CheckpointCache) -> None:
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": "rbln"}
    done = warm_process().run("check", str(checkpoints("llama")), environ=environ)
    assert done.returncode == 2
    assert REASON in done.stderr
    assert "uninstall vllm-second" in done.stderr
    assert not done.stdout


@pytest.mark.engine
def test_serve_refuses_it(path: str, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    flags = ("--host", "127.0.0.1", "--port", "0", "--run-root", str(tmp_path))
    environ = {**os.environ, "PYTHONPATH": path}
    done = warm_process().run("serve", str(checkpoints("llama")), *flags, environ=environ)
    assert done.returncode == 1
    assert REASON in done.stderr


@pytest.mark.engine
@pytest.mark.wide
def test_python_refuses_it(path: str, checkpoints: CheckpointCache) -> None:
    code = "from vllm import EngineArgs; EngineArgs(model={!r}).create_engine_config()"
    done = subprocess.run(
        [sys.executable, "-c", code.format(str(checkpoints("llama")))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 1
    assert f"PlatformError: {REASON}" in done.stderr


@pytest.mark.engine
@pytest.mark.parametrize(("plugins", "refused"), [("", False), ("rbln", True)])
def test_an_unselected_plugin_is_not_second(
    path: str, monkeypatch: pytest.MonkeyPatch, plugins: str, refused: bool
) -> None:
    for folder in reversed(path.split(os.pathsep)):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    with pytest.raises(PlatformError) if refused else nullcontext():
        refuse_second_plugin()

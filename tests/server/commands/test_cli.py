"""The command line and the settings: fast, clear, and without the engine's libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.settings import ServerSettings, SettingsError, load_settings

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
def test_help_lists_every_setting_and_is_fast(command: str) -> None:
    started = time.monotonic()
    done = rbln_serve(command, "--help")
    seconds = time.monotonic() - started
    assert done.returncode == 0
    for name in ServerSettings.model_fields:
        assert "--" + name.replace("_", "-") in done.stdout
        assert f"RBLN_SERVE_{name.upper()}" in done.stdout.replace("\n", "").replace(" ", "")
    assert seconds < 5
    # In groups, with the kind of value and the default of each.
    assert "\nLimits of concurrent work and of the size of a request:\n" in done.stdout
    assert "--port PORT" in done.stdout
    assert "--unknown-fields {reject,warn}" in done.stdout
    assert "--drain-timeout-s SECONDS" in done.stdout
    assert "default: 8000;" in done.stdout
    assert " X " not in done.stdout


def test_version_and_bare_help() -> None:
    assert rbln_serve("--version").stdout.startswith("rbln-serve ")
    assert "serve" in rbln_serve("--help").stdout
    assert "check" in rbln_serve("--help").stdout
    assert rbln_serve().returncode == 2


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
        (["parity", "--modle", "m"], "did you mean --model?"),
        (["collect-env", "--vlm"], "did you mean --vllm?"),
    ],
)
def test_usage_errors_end_with_2_and_name_the_flag(args: list[str], words: str) -> None:
    done = rbln_serve(*args)
    assert done.returncode == 2
    assert words in done.stderr


_HIDE = """
import sys
from pathlib import Path
from server.commands.serving import hide_secrets
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


def test_an_empty_key_ends_the_start_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for args, env in (
        (["--api-key", ""], {}),
        ([], {"RBLN_SERVE_ADMIN_KEY": ""}),
        ([], {"VLLM_API_KEY": ""}),
        (["--admin-key", "root="], {}),
    ):
        done = rbln_serve("serve", "m", *args, **env)
        assert done.returncode == 2
        assert "empty" in done.stderr
        assert [*args, *env][0] in done.stderr


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
    from server.commands.serving import hidden_secrets

    assert hidden_secrets(given) == shown


def test_parity_is_the_command_of_its_own() -> None:
    done = rbln_serve("parity", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: rbln-parity")


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

"""The image's scripts, run here one by one; the costly ones run in test_image.py."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import service
from server.commands.cli import COMMANDS
from server.service import local_url
from server.settings import ServerSettings
from tests.architecture.source_tree import ROOT
from tests.server.certificates import make_authority
from tests.server.scripted import ScriptedLauncher, running

SCRIPTS = ROOT / "deploy" / "scripts"


def run(
    script: str, *arguments: str, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=check,
    )


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        (("/models/a", "--port", "1"), "serve /models/a --port 1"),
        *(((command, "/models/a"), f"{command} /models/a") for command in COMMANDS),
        (("./compile",), "serve ./compile"),
        (("--version",), "--version"),
        ((), "serve"),
        (("vllm", "serve", "/models/a"), "serve /models/a"),
        (("vllm", "--version"), "--version"),
    ],
)
def test_a_container_serves_unless_told_otherwise_and_shares_its_files(
    tmp_path: Path, arguments: tuple[str, ...], passed_on: str
) -> None:
    command = tmp_path / "rbln-serve"
    command.write_text('#!/bin/sh\necho "$@"\numask\necho $HF_HUB_OFFLINE\n')
    command.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run("container_start.sh", *arguments, PATH=path, HF_HUB_OFFLINE="1")
    # A download alone uses the network.
    offline = "0" if passed_on.startswith("fetch") else "1"
    assert done.stdout.splitlines() == [passed_on, "0002", offline]


def test_the_images_vllm_serves_by_ours_and_runs_its_other_commands(tmp_path: Path) -> None:
    for name in ("python", "rbln-serve"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "vllm").symlink_to(SCRIPTS / "container_start.sh")
    for words, expected in (
        ("serve /models/a", "rbln-serve serve /models/a\n"),
        ("bench serve", "python -m vllm.entrypoints.cli.main bench serve\n"),
    ):
        command = [str(tmp_path / "vllm"), *words.split()]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def test_trimming_keeps_what_runs(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    # pip is there for `fetch NAME`.
    kept = "torch/bin/torch_shm_manager torch/lib/libtorch.so vllm/_moe.py pip/a.py".split()
    gone = "torch/bin/protoc torch/include/a.h torch/test/t vllm/_C.abi3.so vllm/_C_AVX2.abi3.so"
    for name in (*kept, *gone.split()):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    library = packages / "torch/lib/libtorch_cpu.so"
    (source := tmp_path / "a.c").write_text(
        "static int used(int a) { return a; }\nint (*f)(int) = used;"
    )
    command = ["gcc", "-g", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    before = library.stat().st_size
    run("trim_image.sh", str(tmp_path))
    left = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert left == {*kept, "torch/lib/libtorch_cpu.so"}
    assert library.stat().st_size < before
    # The same files make the same layer.
    assert {path.stat().st_mtime for path in packages.rglob("*")} == {0}


def make_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)


@pytest.mark.slow
def test_a_file_that_is_not_the_locked_one_is_not_installed(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    run("install.sh", str(environment), PYTHON=sys.executable)
    make_wheel(tmp_path, "locked", "1.0")
    wheel = next(tmp_path.glob("*.whl"))
    lock = tmp_path / "test.lock"
    options = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "HOME": str(tmp_path)}

    def install(line: str) -> subprocess.CompletedProcess[str]:
        lock.write_text(f"{line}\n")
        return run("install.sh", str(environment), str(lock), check=False, **options)

    pinned = f"locked==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    locked = wheel.read_bytes()
    wheel.write_bytes(locked + b"tampered with")
    refused = install(pinned)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    unpinned = install("locked==1.0")
    assert unpinned.returncode != 0
    assert "Hashes are required" in unpinned.stderr
    packages = environment / "lib" / "python3.11" / "site-packages"
    assert not list(packages.glob("locked*"))
    wheel.write_bytes(locked)
    assert install(pinned).returncode == 0
    assert (packages / "locked-1.0.dist-info").is_dir()


def _install_sdk(wheels: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    config = wheels / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n# s3cret\n")
    return run("install_sdk.sh", str(environment), str(config), check=False, HOME=str(wheels))


@pytest.mark.wide
def test_the_sdk_comes_from_the_secrets_index_and_moves_no_locked_version(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    run("install.sh", str(environment), PYTHON=sys.executable)
    packages = environment / "lib" / "python3.11" / "site-packages"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "rebel-compiler", "0.12.0", "torch==2.9.0")
    make_wheel(wheels, "torch", "2.9.0")
    make_wheel(wheels, "torch-rbln", "0.12.3")
    refused = _install_sdk(wheels, environment)
    assert refused.returncode != 0
    assert "rebel-compiler 0.12.0 depends on torch==2.9.0" in refused.stdout
    assert not list(packages.glob("torch*"))
    for version in ("0.12.0", "0.12.1"):
        make_wheel(wheels, "rebel-compiler", version)
    done = _install_sdk(wheels, environment)
    assert done.returncode == 0, done.stderr
    assert (packages / "rebel_compiler-0.12.0.dist-info").is_dir()
    assert (packages / "torch_rbln-0.12.3.dist-info").is_dir()
    left = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in left if b"s3cret" in path.read_bytes()]


async def _healthy(run_root: Path, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-IS", str(SCRIPTS / "container_health.py")]
    env = {"RBLN_SERVE_RUN_ROOT": str(run_root), **environment}
    options: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "check": False}
    done = await asyncio.to_thread(subprocess.run, command, **options)
    return done.returncode, done.stdout.strip()


async def test_health_follows_the_server_to_its_port_and_its_readiness(tmp_path: Path) -> None:
    assert await _healthy(tmp_path) == (
        1,
        f"no server has listened yet: no rbln-serve-*/url in {tmp_path}",
    )
    stale = tmp_path / "rbln-serve-killed"
    stale.mkdir()
    (stale / "url").write_text("http://127.0.0.1:1")
    os.utime(stale / "url", (1, 1))
    run_dir = tmp_path / "rbln-serve-now"
    run_dir.mkdir()
    launcher = ScriptedLauncher()
    async with running(run_dir, launcher) as service:
        assert await _healthy(tmp_path) == (1, "HTTP/1.1 503 Service Unavailable")
        launcher.launched.set()
        await service.until_ready()
        assert await _healthy(tmp_path) == (0, "HTTP/1.1 200 OK")
    assert (await _healthy(tmp_path))[0] == 1


async def test_health_follows_the_server_to_tls(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    certificate, key = authority.sign(tmp_path / "server")
    run_dir = tmp_path / "rbln-serve-now"
    run_dir.mkdir()
    both = tmp_path / "client.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(both)
    settings = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": authority.file}
    async with running(run_dir, client_context=context, **settings, ssl_cert_reqs="required"):
        assert (await _healthy(tmp_path))[0] == 1
        assert await _healthy(tmp_path, HEALTH_CERTFILE=str(both)) == (0, "HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("0.0.0.0", 80), "http://127.0.0.1:80"),
        (("10.1.2.3", 8000), "http://10.1.2.3:8000"),
        (("::", 8000, 0, 0), "http://[::1]:8000"),
        (("fe80::1", 1, 0, 0), "http://[fe80::1]:1"),
    ],
)
def test_the_server_says_where_programs_beside_it_reach_it(
    address: tuple[object, ...], url: str
) -> None:
    assert local_url("http", address) == url


def test_tests_that_miss_a_tool_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_tools.py").write_text(
        "import pytest\n"
        "from tests.debian_tools import debian_tool\n"
        "@pytest.mark.parametrize('name', ['no-such-tool', 'no-such-tool', 'another', 'sh'])\n"
        "def test_runs_a_program(name):\n"
        "    debian_tool(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.debian_tools", "test_tools.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed, 3 skipped" in done.stdout
    line = "3 tests skipped for missing programs (another, no-such-tool): make test-tools"
    assert line in done.stdout.splitlines()


# --------------------------------------------------------------------------------------- dockerfile
def words_of(name: str) -> list[str]:
    """The words of every instruction of a kind, with lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return re.findall(rf"^{name}\s+(.+)$", joined, re.MULTILINE)


def test_kernels_are_built_from_what_their_stage_copies(tmp_path: Path) -> None:
    """A change elsewhere repeats no compilation."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(r"^FROM packages AS kernels\n(.*?)^RUN", text, re.M | re.S)
    for words in re.findall(r"^COPY (.+)$", stage, re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            place = (
                tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            )
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            place.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / source, place)
    done = subprocess.run(
        [sys.executable, "-m", "rbln_backend.devices.emulated.build", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ compose
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = ("rbln-serve", "rbln-serve-npu")


def _plain(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def _mounts(name: str) -> dict[str, str]:
    """Target -> source of a service's volumes, variables by their defaults."""
    plain = [_plain(volume).split(":") for volume in SERVICES[name]["volumes"]]
    return {parts[1]: parts[0] for parts in plain}


def test_the_files_follow_the_compose_specification() -> None:
    files = ("docker-compose.yml", "deploy/compose/keys.yml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "profile"), [("rbln-serve", "emulated"), ("rbln-serve-npu", "npu")]
)
def test_a_stop_waits_for_the_drain_and_plain_up_is_emulated(name: str, profile: str) -> None:
    drain_s = ServerSettings.model_fields["drain_timeout_s"].default
    (seconds,) = re.fullmatch(r"(\d+)s", SERVICES[name]["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert int(seconds) >= drain_s + service._ENGINE_STOP_S + 5
    assert SERVICES[name]["profiles"] == [profile]
    assert "COMPOSE_PROFILES=emulated" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_may_more_than_it_needs(name: str) -> None:
    one = SERVICES[name]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    for port in one["ports"]:
        assert _plain(port).startswith("127.0.0.1:")
    for source in _mounts(name).values():
        if source.startswith("./"):
            assert (ROOT / source).is_dir(), source
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVERS)
def test_servers_run_the_image_as_the_dockerfile_means_it(name: str) -> None:
    one = SERVICES[name]
    stages = {words.split(" AS ")[1] for words in words_of("FROM")}
    assert one["build"]["target"] in stages
    (command,) = words_of("CMD")
    assert [_plain(word) for word in one["command"]] == json.loads(command)
    (check,) = words_of("HEALTHCHECK")
    health = one["healthcheck"]
    assert health["test"] == ["CMD", *json.loads(check.partition(" CMD ")[2])]
    for option in ("interval", "timeout", "start_period", "retries"):
        assert f"--{option.replace('_', '-')}={health[option]}" in check
    (volumes,) = words_of("VOLUME")
    assert set(json.loads(volumes)) == set(_mounts(name))
    assert words_of("EXPOSE") == [_plain(one["ports"][0]).rpartition(":")[2]]
    assert one["tmpfs"][0].startswith("/tmp:")


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_other_peoples_images_are_pinned(name: str) -> None:
    assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", SERVICES[name]["image"])


def test_prometheus_finds_its_rules_and_the_server() -> None:
    folder = _mounts("prometheus")["/etc/prometheus"]
    config = yaml.safe_load((ROOT / folder / "prometheus.yml").read_text(encoding="utf-8"))
    assert all((ROOT / folder / rule).is_file() for rule in config["rule_files"])
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "rbln-serve")
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host == "rbln-serve"
    assert host in SERVICES["rbln-serve-npu"]["networks"]["default"]["aliases"]
    assert port == _plain(SERVICES["rbln-serve"]["ports"][0]).rpartition(":")[2]


def test_grafana_finds_its_dashboards_and_prometheus() -> None:
    mounts = _mounts("grafana")
    folder = ROOT / mounts["/etc/grafana/provisioning"]
    provider = yaml.safe_load((folder / "dashboards" / "rbln-serve.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert list((ROOT / mounts[path]).glob("*.json"))
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())
    host, port = source["datasources"][0]["url"].removeprefix("http://").split(":")
    assert SERVICES[host]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_keys_are_a_secret_that_the_server_reads() -> None:
    overlay = yaml.safe_load((ROOT / "deploy/compose/keys.yml").read_text(encoding="utf-8"))
    for name in SERVERS:
        added = overlay["services"][name]
        for variable in added["environment"]:
            field = variable.removeprefix("RBLN_SERVE_").lower()
            assert field in ServerSettings.model_fields
        (secret,) = added["secrets"]
        assert added["environment"]["RBLN_SERVE_API_KEY_FILE"] == f"/run/secrets/{secret}"
        assert secret in overlay["secrets"]

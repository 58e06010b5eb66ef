"""The image, built from the Dockerfile and run as nobody in particular; takes an hour.

Needs root, buildah, debootstrap, runc, nsenter, unshare and ip. `--image-folder` names a folder in
which build_image.sh has built already, to try again without the build.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT
from tests.image.container import Container, Image
from tests.image.test_scripts import make_wheel

_TOOLS = ("buildah", "debootstrap", "runc", "nsenter", "unshare", "ip", "curl")
_MISSING = [tool for tool in _TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(os.geteuid() != 0, reason="builds and runs containers: needs root"),
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
]

TAG = "localhost/rbln-serve:test"
URL = "http://127.0.0.1:8000"
READY_WITHIN_S = 1200


@pytest.fixture(scope="module")
def storage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    if given := request.config.getoption("--image-folder"):
        yield Path(given)
        return
    folder = tmp_path_factory.mktemp("image")
    build(folder, TAG)
    yield folder
    shutil.rmtree(folder)


def build(folder: Path, tag: str, *arguments: str, context: Path = ROOT) -> str:
    done = subprocess.run(
        [str(Path(__file__).with_name("build_image.sh")), str(folder), tag, *arguments],
        env={**os.environ, "CONTEXT": str(context)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def image(storage: Path) -> Iterator[Image]:
    with Image.opened(storage, TAG) as opened:
        yield opened


@pytest.fixture(scope="module")
def volumes(image: Image, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Empty volumes as an engine makes them: with the owner and the mode of the image's folder."""
    folder = tmp_path_factory.mktemp("volumes")
    made = {}
    for target in image.config["Volumes"]:
        made[target] = folder / target.strip("/")
        made[target].mkdir()
        wanted = (image.root / target.strip("/")).stat()
        os.chown(made[target], wanted.st_uid, wanted.st_gid)
        made[target].chmod(wanted.st_mode & 0o7777)
    return made


Start = Callable[..., Container]


@pytest.fixture(scope="module")
def start(
    image: Image, volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """Make a container under a user id that no other container of this run has."""
    place = tmp_path_factory.mktemp("containers")

    def make(*arguments: str, network: Path | None = None) -> Container:
        user = 100_000 + secrets.randbelow(2**20)
        return Container(image, place, *arguments, user=user, volumes=volumes, network=network)

    return make


@pytest.fixture(scope="module")
def served(start: Start) -> Iterator[Container]:
    """A cold start of the image's own command, ready."""
    with start() as container:
        said = wait_until_healthy(container)
        assert said[-2:] == ["HTTP/1.1 503 Service Unavailable\n", "HTTP/1.1 200 OK\n"]
        yield container


def wait_until_healthy(container: Container) -> list[str]:
    """Return what the health check said, one check a second."""
    deadline = time.monotonic() + READY_WITHIN_S
    said = []
    while (health := container.check_health()).returncode != 0:
        said.append(health.stdout)
        assert container.process.poll() is None, container.log.read_text()[-3000:]
        assert time.monotonic() < deadline, health.stdout + container.log.read_text()[-3000:]
        time.sleep(1)
    return [*said, health.stdout]


def get(container: Container, path: str) -> Any:
    return json.loads(_curl(container, path))


def _curl(container: Container, path: str, *arguments: str) -> str:
    command = container.from_outside("curl", "-sS", "--fail-with-body", *arguments, URL + path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _chat(**fields: object) -> tuple[str, ...]:
    body = {"model": "default-model", "messages": [{"role": "user", "content": "Hello!"}]}
    body |= {"ignore_eos": True, **fields}
    return ("-H", "Content-Type: application/json", "-d", json.dumps(body))


def test_an_unknown_user_gets_an_answer(served: Container) -> None:
    answer = json.loads(_curl(served, "/v1/chat/completions", *_chat(max_tokens=16)))
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["message"]["content"]


def test_it_may_write_into_its_volumes_and_tmp_alone(served: Container) -> None:
    identity = served.run("id", "-u").stdout.strip(), served.run("id", "-g").stdout.strip()
    assert identity == (str(served.user), "0")
    assert str(served.user) not in served.run("cat", "/etc/passwd").stdout
    for folder in ("/", "/opt", "/opt/venv/bin", "/home/rbln", "/etc", "/var/tmp"):
        refused = served.run("touch", f"{folder}/file")
        assert "Read-only file system" in refused.stderr, folder
    for folder in ("/cache", "/models", "/adapters", "/data", "/tmp"):
        assert served.run("touch", f"{folder}/file").returncode == 0, folder
    assert "CapEff:\t0000000000000000" in served.run("cat", "/proc/1/status").stdout


def test_it_has_an_init_and_no_network(served: Container) -> None:
    assert served.run("cat", "/proc/1/comm").stdout == "tini\n"
    interfaces = served.run("cat", "/proc/net/dev").stdout.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


def test_its_kernels_were_built_with_the_image(served: Container) -> None:
    device = get(served, "/v1/server_info")["device"]
    assert device["kernels"] == "native"
    # Of the path, a client without an admin key sees the name alone.
    assert device["reason"].startswith("built ahead for CPUs with ")
    assert served.run("sh", "-c", "command -v g++").returncode != 0


@pytest.fixture(scope="module")
def next_served(image: Image, served: Container, start: Start) -> Iterator[Container]:
    """The next container over the same volumes, under another user id, ready."""
    # However busy the machine is, a stream ends within this.
    drain = ("--drain-timeout-s", str(READY_WITHIN_S))
    with start(*image.config["Cmd"], *drain) as container:
        assert container.user != served.user
        wait_until_healthy(container)
        yield container


def test_the_next_user_starts_with_what_the_first_has_compiled(next_served: Container) -> None:
    graphs = get(next_served, "/v1/server_info")["graphs"]
    assert {graph["result"] for graph in graphs} == {"loaded"}
    # It may also add to what belongs to the first.
    assert next_served.run("find", "/cache", "-type", "d", "!", "-writable").stdout == ""


def test_a_stop_lets_streams_end(next_served: Container) -> None:
    tokens = 1500
    fields = _chat(max_tokens=tokens, stream=True, stream_options={"include_usage": True})
    command = next_served.from_outside("curl", "-sSN", *fields, f"{URL}/v1/chat/completions")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stream:
        assert stream.stdout is not None
        before = [stream.stdout.readline() for _ in range(8)]
        next_served.signal("TERM")
        lines = [line for line in (*before, *stream.stdout) if line.startswith("data: ")]
    assert next_served.process.wait(READY_WITHIN_S) == 0
    log = next_served.log.read_text()
    assert "SIGTERM: draining 1 requests" in log
    assert "cut off" not in log
    assert lines[-1] == "data: [DONE]\n"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == tokens


def test_its_other_commands_are_there(start: Start) -> None:
    with start("--version") as container:
        assert container.process.wait(READY_WITHIN_S) == 0, container.log.read_text()
    assert container.log.read_text().startswith("rbln-serve ")


# It serves a folder until its standard input ends, and prints its address first.
_HUB = """
import sys
from pathlib import Path
from tests.hub_server import HubServer
hub = HubServer()
hub.add("org/tiny", Path("default_model/checkpoint"))
with hub.running():
    print(hub.url, flush=True)
    sys.stdin.read()
"""


def test_a_model_is_fetched_by_one_container_and_run_over_a_batch_by_another(
    start: Start, volumes: dict[str, Path]
) -> None:
    """The hub is a stand-in, which alone is in the network of the first container."""
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]
    with subprocess.Popen(
        [*alone, sys.executable, "-c", _HUB],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as hub:
        assert hub.stdin is not None and hub.stdout is not None
        endpoint = ("--endpoint", hub.stdout.readline().strip())
        network = Path(f"/proc/{hub.pid}/ns/net")
        with start("fetch", "org/tiny", *endpoint, network=network) as container:
            assert container.process.wait(READY_WITHIN_S) == 0, container.log.read_text()
        hub.stdin.close()
    assert "/models/hub/models--org--tiny/snapshots/" in container.log.read_text()
    fixed = {"model": "org/tiny", "max_tokens": 8, "ignore_eos": True}
    bodies = [{**fixed, "prompt": prompt} for prompt in ("One", "Two")]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    requests, answers = (volumes["/data"] / name for name in ("requests.jsonl", "answers.jsonl"))
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ("/data/requests.jsonl", "-o", "/data/answers.jsonl")
    with start("batch", *files, "--model", "org/tiny") as container:
        assert container.process.wait(READY_WITHIN_S) == 0, container.log.read_text()[-3000:]
    found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in found]
    assert tokens == [8, 8]


def test_a_changed_line_replaces_megabytes(image: Image, storage: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in ("Dockerfile", ".dockerignore", *(rule[1:] for rule in rules if rule[0] == "!")):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    with (context / "server/__init__.py").open("a", encoding="utf-8") as file:
        file.write("# A line more.\n")
    build(storage, f"{TAG}-changed", context=context)
    with Image.opened(storage, f"{TAG}-changed") as after:
        new = {digest: size for digest, size in after.layers.items() if digest not in image.layers}
        assert (after.root / "opt/venv/bin/python").is_symlink()
    # That of /opt/rbln-serve; the packages have 1.2 GB.
    assert len(new) == 1
    assert sum(new.values()) < 16e6 < sum(after.layers.values())


_WRITTEN = ("etc", "home", "opt", "root", "run", "tmp", "var")


def test_the_sdk_comes_through_the_secret_and_leaves_nothing_of_it(
    storage: Path, tmp_path: Path
) -> None:
    """The vendor's packages are stand-ins: empty wheels of their names."""
    make_wheel(tmp_path, "rebel-compiler", "0.12.0")
    make_wheel(tmp_path, "torch-rbln", "0.12.3")
    secret = tmp_path / "pip.conf"
    secret.write_text("[global]\nno-index = true\nfind-links = /sdk\n# s3cret\n")
    tag = f"{TAG}-npu"
    # Its first stages are those that the image of the emulated device has been built from.
    options = ["--target", "npu", "-v", f"{tmp_path}:/sdk:ro"]
    said = build(storage, tag, *options, "--secret", f"id=pip.conf,src={secret}")
    assert "Successfully installed rebel-compiler-0.12.0 torch-rbln-0.12.3" in said
    with Image.opened(storage, tag) as npu:
        packages = npu.root / "opt/venv/lib/python3.11/site-packages"
        assert (packages / "rebel_compiler-0.12.0.dist-info").is_dir()
        assert not (npu.root / "src").exists()
        found = ["grep", "-rlI", "-e", "s3cret", *(str(npu.root / name) for name in _WRITTEN)]
        assert subprocess.run(found, capture_output=True, check=False).stdout == b""
        assert "s3cret" not in json.dumps(npu.config)

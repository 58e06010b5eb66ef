"""A roll under load: two replicas of the rendered pod behind nginx, replaced one after the other.

No request is lost, every new replica starts without compiling, from a bundle, and what the chart
allows for covers what the processes took.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.hub_server import HubServer
from tests.kernel_cache import share_kernels
from tests.kubernetes.chart import Document, Server, of_kind, render, server
from tests.kubernetes.nginx_process import Nginx
from tests.kubernetes.pod_process import PodProcess
from tests.kubernetes.steady_load import SteadyLoad
from tests.kubernetes.value_sets import DOWNLOAD
from tests.ports import free_port
from tests.server.real_server import FLAGS

CLIENTS, TOKENS = 8, 150


def _rendered(checkpoint: Path, cache_import: dict[str, object] | None = None) -> Server:
    # FLAGS begin with the served name, which the chart says itself.
    return server(
        {
            "model": {"path": str(checkpoint), "servedNames": ["tiny"]},
            "engine": {"args": list(FLAGS[2:])},
            "settings": {"host": "127.0.0.1"},
            "shutdown": {"propagationSeconds": 2},
            "cache": {"import": cache_import} if cache_import else {},
        }
    )


def _bundle(pod: PodProcess, given: Server, folder: Path) -> tuple[Path, str]:
    """Compile in one place and write what another needs; returns the file and its digest."""
    model = given.container["args"]
    assert (done := pod.run("compile", *model)).returncode == 0, done.stderr
    file = folder / "tiny.bundle"
    # It fails where a start would not be warm.
    done = pod.run("cache", "export", str(file), "--model", *model)
    assert done.returncode == 0, done.stderr
    return file, done.stdout.split()[0]


def _replica(given: Server, port: int, bundle: Path, folder: Path) -> PodProcess:
    """A pod with an empty cache of its own, after its init container."""
    pod = PodProcess(given, port, folder / "cache", folder)
    first = given.pod["initContainers"][0]
    args = [str(bundle) if arg == "/bundle/tiny.bundle" else arg for arg in first["args"]]
    assert (done := pod.run(*args)).returncode == 0, done.stderr
    return pod


def _compiled(page: str) -> dict[str, float]:
    """Graphs of a start by where they came from."""
    start = "rbln_compile_cache_requests_total{"
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(start):
            result = line.split('result="')[1].split('"')[0]
            found[result] = found.get(result, 0) + float(line.split()[-1])
    return {result: count for result, count in found.items() if count}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(3000)
def test_a_roll_under_load_loses_nothing_and_starts_warm(
    checkpoints: CheckpointCache, tmp_path: Path, closing: ExitStack
) -> None:
    checkpoint = checkpoints("llama", dtype="float32")
    plain = _rendered(checkpoint)
    # Its kernels are those of other tests; the replicas get them from the bundle.
    cache = share_kernels(tmp_path / "build" / "cache")
    builder = PodProcess(plain, 1, cache, tmp_path / "build")
    closing.callback(builder.close)
    bundle, digest = _bundle(builder, plain, tmp_path)
    source = {"persistentVolumeClaim": {"claimName": "bundles"}}
    given = _rendered(
        checkpoint, {"enabled": True, "file": bundle.name, "digest": digest, "volume": source}
    )

    *ports, front = (free_port() for _ in range(3))
    pods = []
    for number, port in enumerate(ports):
        pods.append(_replica(given, port, bundle, tmp_path / f"pod-{number}"))
        closing.callback(pods[-1].close)
    for pod in pods:
        pod.launch()
    started = [pod.until_started() for pod in pods]
    nginx = Nginx(front, ports, tmp_path / "nginx")
    closing.callback(nginx.close)
    nginx.until_listening()

    ended = []
    with SteadyLoad(nginx.url, "tiny", CLIENTS, TOKENS) as load:
        for number, port in enumerate(ports):
            time.sleep(3)
            ended.append(pods[number].end())
            fresh = _replica(given, port, bundle, tmp_path / f"pod-{number + 2}")
            closing.callback(fresh.close)
            fresh.launch()
            started.append(fresh.until_started())
            pods.append(fresh)
        time.sleep(3)
        assert all(pod.probe(name) for pod in pods[2:] for name in ("readiness", "liveness"))
    pages = [httpx.get(f"{pod.url}/metrics").text for pod in pods[2:]]
    results = [_compiled(page) for page in pages]
    passed_on = nginx.passed_on()
    sys.stdout.write(
        f"whole {load.whole}, lost {len(load.lost)}, passed on {len(passed_on)}, "
        f"start s {[round(x, 1) for x in started]}, end s {[round(x, 1) for x in ended]}, "
        f"graphs {results}\n"
    )
    assert load.lost == []
    assert min(load.whole.values()) > 0
    # Greedy answers are the same from every replica, before and after.
    assert len(load.texts) == 1
    # The roll was seen: some requests met a replica that drained, or was away.
    assert passed_on
    assert all(set(result) == {"hit"} for result in results), results


# -------------------------------------------------------------------------------------------- nginx
BODY = b"x" * 1_000_000


class _Replica(BaseHTTPRequestHandler):
    """Answers with the number of bytes that it got."""

    def do_POST(self) -> None:
        got = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(got).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _named_for_nginx(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*nginx*")}


def test_it_writes_in_the_folder_that_it_was_given_and_nowhere_else(replica: int) -> None:
    temporary = Path(tempfile.gettempdir())
    before = _named_for_nginx(temporary)
    with tempfile.TemporaryDirectory(prefix="rbln-proxy-") as folder:
        Path(folder).chmod(0o711)
        nginx = Nginx(free_port(), (replica, replica), Path(folder) / "run")
        try:
            nginx.until_listening()
            answer = httpx.post(f"{nginx.url}/v1/completions", content=BODY)
            assert (answer.status_code, answer.text) == (200, str(len(BODY)))
            large = BODY * 5
            answer = httpx.post(f"{nginx.url}/v1/files", content=large)
            assert (answer.status_code, answer.text) == (200, str(len(large)))
            assert httpx.post(f"{nginx.url}/v1/completions", content=large).status_code == 413
            made = {path.name for path in (Path(folder) / "run").iterdir()}
            assert {"nginx.pid", "body", "proxy"} <= made
            assert _named_for_nginx(temporary) == before
        finally:
            nginx.close()


# ----------------------------------------------------------------------------------------- download
@pytest.mark.engine
def test_the_server_finds_what_the_container_downloaded(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    pod = server(DOWNLOAD).pod
    download, waiting = pod["initContainers"]
    hub = HubServer(token="secret")
    hub.add("org/tiny", checkpoints("llama"))
    with hub.running():
        # What the Secret and `download.endpoint` give.
        given = {"HF_TOKEN": "secret", "HF_ENDPOINT": hub.url}
        first = _run(download["args"], {**_environment(download, tmp_path), **given})
    assert first.returncode == 0, first.stderr
    main = pod["containers"][0]
    assert main["args"][:3] == ["org/tiny", "--revision", "main"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in main["volumeMounts"]
    again = _run(["fetch", *main["args"][:3]], _environment(main, tmp_path))
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    # The container that waits for the Job names the same model.
    assert waiting["args"] == main["args"]


@pytest.mark.engine
def test_the_job_downloads_too_and_only_downloads_have_the_token() -> None:
    job = of_kind(render(DOWNLOAD), "Job")["spec"]["template"]["spec"]
    assert [one["name"] for one in job["initContainers"]] == ["download-model"]
    (token,) = [one for one in job["initContainers"][0]["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_TOKEN" not in server(DOWNLOAD).env
    kept = {"model": {"download": {**DOWNLOAD["model"]["download"], "claimName": "weights"}}}
    volumes = {v["name"]: v for v in server({**DOWNLOAD, **kept}).pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "weights"}


def _environment(container: Document, folder: Path) -> dict[str, str]:
    """The container's variables with paths of this machine."""
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    own |= {"HF_HUB_CACHE": str(folder / own["HF_HUB_CACHE"][1:]), "HOME": str(folder)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_", "HF_"))}
    return {**kept, **own, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}


def _run(args: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", *args]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )

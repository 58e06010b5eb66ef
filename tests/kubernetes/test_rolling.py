"""A roll under load: two replicas of the rendered pod behind nginx, replaced one after the other.

No request is lost, every new replica starts without compiling, from a bundle, and what the chart
allows for covers what the processes took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.kernel_cache import share_kernels
from tests.kubernetes.chart import Server, server
from tests.kubernetes.nginx_process import Nginx, free_ports
from tests.kubernetes.pod_process import PodProcess
from tests.kubernetes.steady_load import SteadyLoad
from tests.server.real_server import FLAGS

pytestmark = [pytest.mark.engine, pytest.mark.wide]

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

    *ports, front = free_ports(3)
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
    results = [_compiled(pod.metrics()) for pod in pods[2:]]
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

"""The chart rendered by Helm's own engine.

`helm-python-sdk` of requirements/dev.in carries it as a library (Helm 4); there is no `helm`
command among Debian's packages.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import yaml

from deploy.kubernetes.generate import CHART

Document = dict[str, Any]


@cache
def helm() -> Any:
    """The library, quiet; skips the test where it is not installed, as after `make install`."""
    module = pytest.importorskip(
        "helm_python", reason="helm-python-sdk is not installed: run `make dev`"
    )
    module.disable_logging()
    return module


@cache
def _chart() -> Any:
    return helm().Chart.load(str(CHART))


def render(values: dict[str, Any] | None = None, release: str = "llm") -> list[Document]:
    """The documents that `helm install RELEASE` would send; to be read, not changed."""
    return _render(json.dumps(values or {}), release)


@cache
def _render(values: str, release: str) -> list[Document]:
    files = _chart().render(values=json.loads(values), name=release, namespace="serving")
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    # S506: a safe loader, written in C.
    return [doc for text in texts for doc in yaml.load_all(text, yaml.CSafeLoader) if doc]


def notes(values: dict[str, Any] | None = None) -> str:
    text: str = _chart().render(values=values or {}, name="llm", namespace="serving")[
        "rbln-serve/templates/NOTES.txt"
    ]
    return text


def refusal(values: dict[str, Any]) -> str:
    """What Helm says of values that the chart does not take."""
    with pytest.raises(helm().HelmError) as caught:
        render(values)
    return str(caught.value)


def of_kind(documents: list[Document], kind: str) -> Document:
    found = [doc for doc in documents if doc["kind"] == kind]
    assert len(found) == 1, [f"{doc['kind']}/{doc['metadata']['name']}" for doc in documents]
    return found[0]


def pod_templates(documents: list[Document]) -> dict[str, Document]:
    """Every pod template by the kind, or the place in a group, that it belongs to."""
    found = {}
    for doc in documents:
        if doc["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[doc["kind"]] = doc["spec"]["template"]
        if doc["kind"] == "LeaderWorkerSet":
            group = doc["spec"]["leaderWorkerTemplate"]
            found["leader"], found["members"] = group["leaderTemplate"], group["workerTemplate"]
    return found


@dataclass(frozen=True)
class Server:
    """The server's container and pod as rendered."""

    container: Document
    pod: Document

    @property
    def env(self) -> dict[str, str]:
        """The environment by name; every value is a text, or Kubernetes would refuse it."""
        assert all(isinstance(item["value"], str) for item in self.container["env"])
        names = [item["name"] for item in self.container["env"]]
        assert len(names) == len(set(names))
        return {item["name"]: item["value"] for item in self.container["env"]}

    def patience_s(self, probe: str) -> int:
        """Seconds of failing after which a probe acts."""
        found = self.container[f"{probe}Probe"]
        seconds: int = found["periodSeconds"] * found["failureThreshold"]
        return seconds


def server(values: dict[str, Any] | None = None) -> Server:
    templates = pod_templates(render(values))
    pod = (templates.get("Deployment") or templates["StatefulSet"])["spec"]
    return Server(pod["containers"][0], pod)

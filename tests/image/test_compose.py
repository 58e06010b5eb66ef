"""docker-compose.yml: valid, confined, and in step with what it starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from server import service
from server.settings import ServerSettings
from tests.architecture.source_tree import ROOT
from tests.image.test_dockerfile import words_of

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = ("rbln-serve", "rbln-serve-npu")


def _mounts(name: str) -> dict[str, str]:
    """Target -> source of a service's volumes, variables by their defaults."""
    plain = [_plain(volume).split(":") for volume in SERVICES[name]["volumes"]]
    return {parts[1]: parts[0] for parts in plain}


def _plain(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def test_the_files_follow_the_compose_specification() -> None:
    files = ("docker-compose.yml", "deploy/compose/keys.yml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_plain_up_takes_the_emulated_device() -> None:
    lines = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert "COMPOSE_PROFILES=emulated" in lines
    assert {name: SERVICES[name]["profiles"] for name in SERVERS} == {
        "rbln-serve": ["emulated"],
        "rbln-serve-npu": ["npu"],
    }
    assert SERVICES["rbln-serve-npu"]["devices"] == ["rebellions.ai/npu=${NPUS:-all}"]


@pytest.mark.parametrize("name", SERVERS)
def test_a_stop_waits_for_the_drain(name: str) -> None:
    drain_s = ServerSettings.model_fields["drain_timeout_s"].default
    assert _seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + service._ENGINE_STOP_S + 5


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

"""What the server's own settings become in the engine's configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.errors import ConfigError
from server.engine.config import engine_config
from server.frontend import LaunchError
from server.settings import ServerSettings
from tests.checkpoints import CheckpointCache
from tests.server.real_server import FLAGS

pytestmark = pytest.mark.engine


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

"""What `server.vllm_frontend` and `server.engine` use of vLLM, as it was when they were written.

A failure here means that the vLLM pin moved: read what changed before adapting the server.
"""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


_IMPORTS = """
import sys
import server.vllm_frontend as frontend
name = "vllm.entrypoints.launchers.api_server.app_state"
assert name not in sys.modules
frontend.import_serving()
assert name in sys.modules
assert "vllm.entrypoints.pooling.scoring.protocol" in sys.modules
"""


def test_what_serves_is_imported_off_the_event_loop() -> None:
    # In a process of its own: here, other tests have imported it all.
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_signatures_of_the_front_end() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
    from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

    assert parameters(make_arg_parser) == ["parser"]
    assert parameters(validate_parsed_serve_args) == ["args"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
    serve = ["self", "request", "raw_request"]
    assert parameters(OpenAIServingChat.create_chat_completion) == serve
    assert parameters(OpenAIServingCompletion.create_completion) == serve
    assert parameters(OpenAIServingResponses.create_responses) == serve
    assert parameters(AnthropicServingMessages.create_messages) == serve
    assert parameters(AnthropicServingMessages.count_tokens) == serve
    assert parameters(ServingTokenization.create_tokenize) == serve
    assert parameters(ServingTokenization.create_detokenize) == serve
    assert parameters(OpenAIServingModels.show_available_models) == ["self"]
    assert parameters(OpenAIServingModels.is_base_model) == ["self", "model_name"]
    assert parameters(with_sse_keep_alive)[:2] == ["generator", "interval"]


def test_signatures_of_what_pools() -> None:
    from vllm import PoolingParams
    from vllm.config import ModelConfig
    from vllm.entrypoints.pooling.classify.serving import ServingClassification
    from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
    from vllm.entrypoints.pooling.pooling.serving import ServingPooling
    from vllm.entrypoints.pooling.scoring.serving import ServingScores
    from vllm.v1.engine.async_llm import AsyncLLM

    for serving in (ServingClassification, ServingEmbedding, ServingPooling):
        assert parameters(serving.__call__) == ["self", "request", "raw_request"]
    assert parameters(ServingScores.__call__) == ["self", "args", "kwargs"]
    assert parameters(AsyncLLM.encode)[:4] == ["self", "prompt", "pooling_params", "request_id"]
    assert parameters(ModelConfig.get_pooling_task) == ["self", "supported_tasks"]
    assert isinstance(ModelConfig.is_matryoshka, property)
    assert isinstance(ModelConfig.matryoshka_dimensions, property)
    assert isinstance(ModelConfig.embedding_size, property)
    assert PoolingParams(task="embed").task == "embed"


def test_signatures_of_the_engine() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    assert parameters(AsyncLLM.from_vllm_config) == [
        "vllm_config",
        "start_engine_loop",
        "usage_context",
        "stat_loggers",
        "enable_log_requests",
        "aggregate_engine_logging",
        "disable_log_stats",
        "client_addresses",
        "client_count",
        "client_index",
    ]
    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert parameters(AsyncLLM.shutdown) == ["self", "timeout"]
    assert isinstance(AsyncLLM.errored, property)
    assert parameters(AsyncEngineArgs.create_engine_config)[:2] == ["self", "usage_context"]
    assert parameters(tokens_input)[0] == "prompt_token_ids"
    assert {"additional_config", "shutdown_timeout", "numa_bind"} <= set(
        AsyncEngineArgs.__dataclass_fields__
    )


def test_every_refused_flag_exists_and_no_flag_of_ours_hides_an_engine_flag() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server.settings import ServerSettings
    from server.vllm_frontend import _REFUSED_FLAGS

    theirs = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert set(_REFUSED_FLAGS) <= theirs
    ours = set(ServerSettings.model_fields)
    assert not ours & set(AsyncEngineArgs.__dataclass_fields__)
    # What means the same in both.
    assert ours & theirs == {
        *("host", "port", "root_path", "api_key", "enable_ssl_refresh"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
        *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "--uvicorn-log-level", "debug"], "--uvicorn-log-level cannot be used"),
        (["m", "--api-server-count", "2"], "--api-server-count cannot be used"),
        (["m", "--no-such-flag"], "command line is wrong"),
        (["/no/such/model"], "'/no/such/model'"),
        (["m", "--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(argv: list[str], words: str) -> None:
    from server.frontend import LaunchError
    from server.settings import ServerSettings
    from server.vllm_frontend import parse_arguments

    with pytest.raises(LaunchError) as caught:
        parse_arguments(argv, ServerSettings())
    assert caught.value.exit_code == 2
    assert words in str(caught.value)


def test_vllm_starts_engines_the_way_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.utils.system_utils import get_mp_context

    from server.engine_process import choose_start_method

    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setitem(envs.environment_variables, name, envs.environment_variables[name])
    for method in ("forkserver", "spawn"):
        choose_start_method(method)
        context = get_mp_context()
        assert context is multiprocessing.get_context(method)

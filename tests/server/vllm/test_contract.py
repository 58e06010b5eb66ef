"""What `server.vllm` and `server.engine` use of vLLM, as it was when they were written.

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
import server.vllm.frontend as frontend
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


def test_signatures_of_what_serves_adapters() -> None:
    from vllm.config import LoRAConfig
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    assert parameters(AsyncLLM.add_lora) == ["self", "lora_request"]
    assert parameters(AsyncLLM.remove_lora) == ["self", "lora_id"]
    assert parameters(AsyncLLM.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]
    assert parameters(LoRARequest)[:3] == ["lora_name", "lora_int_id", "lora_path"]
    fields = ["name", "path", "base_model_name", "is_3d_lora_weight"]
    assert parameters(LoRAModulePath) == fields
    assert {"max_loras", "max_lora_rank"} <= set(LoRAConfig.__dataclass_fields__)
    # The lookups that `server.vllm.adapters.LeasedNames` answers; its other readers list names.
    lookups = inspect.getsource(BaseServing._maybe_get_adapters)
    assert "self.models.lora_requests[request.model]" in lookups
    assert "self.lora_requests.values()" in inspect.getsource(
        OpenAIServingModels.show_available_models
    )


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


def test_what_ends_waiting_and_asks_an_engine_whether_it_moves() -> None:
    from vllm.config import SchedulerConfig
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.request import RequestStatus

    made = ["tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats"]
    assert parameters(OutputProcessor) == made
    added = ["self", "request", "prompt", "parent_req", "request_index", "queue"]
    assert parameters(OutputProcessor.add_request) == added
    processed = ["self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"]
    assert parameters(OutputProcessor.process_outputs) == processed
    assert parameters(OutputProcessor.abort_requests) == ["self", "request_ids", "internal"]
    assert {"parent_req", "queue"} <= set(parameters(RequestState))
    assert {"stop_reason", "finish_reason"} <= set(EngineCoreOutput.__struct_fields__)
    assert {"WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"} <= set(RequestStatus.__members__)
    assert parameters(AsyncLLM.is_sleeping) == ["self"]
    assert "max_num_queued_tokens" in SchedulerConfig.__dataclass_fields__
    assert MaxQueuedTokensError().http_status == QueueOverflowError().http_status == 503


def test_what_meters_the_engine_finds_what_it_counts() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert parameters(AsyncLLM.add_request)[:2] == ["self", "request_id"]
    made = inspect.getsource(OutputProcessor.__init__)
    assert "self.request_states" in made
    assert "self.external_req_ids" in made
    state = parameters(RequestState.__init__)
    assert {"queue", "detokenizer", "prompt_token_ids"} <= set(state)
    assert parameters(IncrementalDetokenizer.num_output_tokens) == ["self"]


def test_what_the_grammar_gate_stands_on() -> None:
    from vllm.entrypoints.generate.base import protocol
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
    from vllm.v1.structured_output.request import get_structured_output_key

    assert parameters(AsyncLLM.add_request)[:4] == ["self", "request_id", "prompt", "params"]
    assert parameters(protocol.validate_structural_tag_payload) == ["payload", "parameter"]
    # Without a configuration there is nothing to validate against, whatever the grammar.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(("))
    params._validate_structured_outputs(None, None, None)
    text = get_structured_output_key(StructuredOutputsParams(json={"a": 1}))[1]
    assert text == '{"a": 1}'
    assert parameters(StructuredOutputManager.grammar_init) == ["self", "request"]
    assert parameters(XgrammarBackend) == ["vllm_config", "tokenizer", "vocab_size"]
    assert parameters(XgrammarBackend.compile_grammar)[1:] == [
        "request_type",
        "grammar_spec",
        "stop_token_ids",
    ]
    assert {"vocab_size", "matcher", "ctx"} <= set(XgrammarGrammar.__dataclass_fields__)


def test_every_refused_flag_exists_and_no_flag_of_ours_hides_an_engine_flag() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server.settings import ServerSettings
    from server.vllm.flags import _REFUSED_FLAGS

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
        # The server's own parser takes it in full alone; vLLM's would take it and check nothing.
        (["m", "--api-k", "sk-secret"], "--api-key must be written in full"),
        (["m", "--allowed-orig", '["x"]'], "--allowed-origins must be written in full"),
        (["/no/such/model"], "'/no/such/model'"),
        (["m", "--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(argv: list[str], words: str) -> None:
    from server.frontend import LaunchError
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    with pytest.raises(LaunchError) as caught:
        parse_arguments(argv, ServerSettings())
    assert caught.value.exit_code == 2
    assert words in str(caught.value)


def test_vllm_starts_engines_the_way_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.utils.system_utils import get_mp_context

    from server.engine.process import choose_start_method

    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setitem(envs.environment_variables, name, envs.environment_variables[name])
    for method in ("forkserver", "spawn"):
        choose_start_method(method)
        context = get_mp_context()
        assert context is multiprocessing.get_context(method)

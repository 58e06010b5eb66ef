"""What `server.vllm` and `server.engine` reach of vLLM by names that deploy/upstream cannot follow.

A failure here means that the vLLM pin moved: read what changed before adapting the server.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import subprocess
import sys
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache

pytestmark = pytest.mark.engine


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


_IMPORTS = """
import sys
from server.engine.launch import import_serving
name = "vllm.entrypoints.launchers.api_server.app_state"
assert name not in sys.modules
import_serving()
assert name in sys.modules
assert "vllm.entrypoints.pooling.scoring.protocol" in sys.modules
"""


def test_what_serves_is_imported_off_the_event_loop() -> None:
    # In a process of its own: here, other tests have imported it all.
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_signatures_of_what_serves() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.pooling.classify.serving import ServingClassification
    from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
    from vllm.entrypoints.pooling.pooling.serving import ServingPooling
    from vllm.entrypoints.pooling.scoring.serving import ServingScores
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

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
    for serving in (ServingClassification, ServingEmbedding, ServingPooling):
        assert parameters(serving.__call__) == serve
    assert parameters(ServingScores.__call__) == ["self", "args", "kwargs"]


def test_where_adapters_are_looked_up() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing

    # The lookups that `server.vllm.adapters.LeasedNames` answers; its other readers list names.
    lookups = inspect.getsource(BaseServing._maybe_get_adapters)
    assert "self.models.lora_requests[request.model]" in lookups
    assert "self.lora_requests.values()" in inspect.getsource(
        OpenAIServingModels.show_available_models
    )


def test_what_the_watch_and_the_meter_ask() -> None:
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import RequestState

    assert parameters(AsyncLLM.is_sleeping) == ["self"]
    assert MaxQueuedTokensError().http_status == QueueOverflowError().http_status == 503
    state = parameters(RequestState.__init__)
    assert {"parent_req", "queue", "detokenizer", "prompt_token_ids"} <= set(state)
    assert parameters(IncrementalDetokenizer.num_output_tokens) == ["self"]


def test_what_the_grammar_gate_stands_on() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import get_structured_output_key

    # Without a configuration there is nothing to validate against, whatever the grammar.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(("))
    params._validate_structured_outputs(None, None, None)
    text = get_structured_output_key(StructuredOutputsParams(json={"a": 1}))[1]
    assert text == '{"a": 1}'
    assert parameters(StructuredOutputManager.grammar_init) == ["self", "request"]


def test_where_answers_are_parsed() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    streams = parameters(OpenAIServingChat.chat_completion_stream_generator)
    assert streams[:3] == ["self", "request", "result_generator"]
    assert "parser" in parameters(OpenAIServingChat.chat_completion_full_generator)
    # Parsers are made in the order of the choices, and each reads its own outputs.
    source = inspect.getsource(OpenAIServingChat.chat_completion_stream_generator)
    assert "for _ in range(num_choices)" in source
    assert "parser = parsers[i]" in source
    events = parameters(OpenAIServingResponses._process_simple_streaming_events)
    start = ["self", "request", "sampling_params", "result_generator", "context"]
    assert events[:5] == start
    assert events[-1] == "_increment_sequence_number_and_return"
    assert parameters(OpenAIServingResponses.responses_full_generator)[:5] == start
    assert parameters(DelegatingParser.parse)[1:] == [
        *("model_output", "request", "enable_auto_tools", "model_output_token_ids"),
    ]
    assert parameters(Hermes2ProToolParser._extract_tool_name) == ["tc_json"]
    assert parameters(Hermes2ProToolParser._extract_tool_args) == ["tc_json", "is_complete"]


def test_errors_of_the_hub_have_the_names_that_are_known() -> None:
    from huggingface_hub import errors

    from server.engine.config import _HUB_ERRORS

    assert [name for name in sorted(_HUB_ERRORS) if not hasattr(errors, name)] == []
    assert errors.StrictDataclassError.__name__.startswith("StrictDataclass")


def test_every_refused_flag_exists_and_no_flag_of_ours_hides_an_engine_flag() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server.settings import ServerSettings
    from server.vllm.flag_table import (
        FULFILLED_FLAGS,
        REFUSED_FLAGS,
        RENAMED_FLAGS,
    )

    theirs = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert {*REFUSED_FLAGS, *RENAMED_FLAGS, *FULFILLED_FLAGS} <= theirs
    assert not REFUSED_FLAGS.keys() & {*RENAMED_FLAGS, *FULFILLED_FLAGS}
    assert set(RENAMED_FLAGS.values()) <= set(ServerSettings.model_fields)
    assert {"numa_bind", "lora_modules", "otlp_traces_endpoint", "load_format"} <= theirs
    ours = set(ServerSettings.model_fields)
    assert not ours & set(AsyncEngineArgs.__dataclass_fields__)
    # What means the same in both.
    assert ours & theirs == {
        *("host", "port", "root_path", "api_key", "enable_ssl_refresh"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
        *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
        *("uds", "headless"),
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "--h11-max-header-count", "9"], "cannot be used: --max-header-bytes bounds"),
        (["m", "--enable-prompt-embeds"], "--enable-prompt-embeds cannot be used: prompts are"),
        (["m", "--api-server-count", "2"], "cannot be used: a server has one HTTP process; run"),
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


def test_flags_of_manifests_for_vllm_are_honoured(
    checkpoints: CheckpointCache, caplog: pytest.LogCaptureFixture
) -> None:
    from server.observability.logging import FIELDS, REQUEST_LOGGER
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    level = logging.getLogger("uvicorn").level
    requests = logging.getLogger(REQUEST_LOGGER)
    words = "--uvicorn-log-level error --enable-server-load-tracking --api-server-count 1"
    some = ("--disable-access-log-for-endpoints", "/health, /tokenize")

    def logged(route: str) -> bool:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            requests.info("GET", extra={FIELDS: {"route": route}})
            requests.error("failed")
        assert "failed" in caplog.text
        return "GET" in caplog.text

    try:
        with caplog.at_level(logging.INFO):
            parse_arguments([str(checkpoints("llama")), *words.split(), *some], ServerSettings())
        assert "--disable-access-log-for-endpoints: finished requests" in caplog.text
        assert logging.getLogger("uvicorn").level == logging.ERROR
        assert [logged(route) for route in ("/tokenize", "/health", "/v1/models")] == [0, 0, 1]
        flags = [str(checkpoints("llama")), "--disable-uvicorn-access-log"]
        parse_arguments(flags, ServerSettings())
        assert not logged("/v1/models")
    finally:
        logging.getLogger("uvicorn").setLevel(level)
        requests.filters.clear()


def test_vllm_starts_engines_the_way_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.utils.system_utils import get_mp_context

    from server.vllm.patches import choose_start_method

    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setitem(envs.environment_variables, name, envs.environment_variables[name])
    for method in ("forkserver", "spawn"):
        choose_start_method(method)
        context = get_mp_context()
        assert context is multiprocessing.get_context(method)

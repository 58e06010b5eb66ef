"""Parser of vLLM's command line that rejects flags without effect in this server.

Flags that are settings of this server as well (`--host`, `--api-key`) are rejected too if they
reach vLLM's parser only.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rbln_backend.api.names import (
    CATALOGUE,
    get_checkpoint,
    hub_settings,
    is_on_hub,
    local_or_fetched,
    path_problem,
    resolve,
)
from rbln_backend.errors import CheckpointError, ConfigError
from server.frontend import LaunchError
from server.observability.logging import drop_request_lines
from server.settings import ServerSettings
from server.vllm.flag_table import FULFILLED_FLAGS, REFUSED_FLAGS

logger = logging.getLogger(__name__)

_USAGE = "rbln-serve serve MODEL [options] [vLLM options]"
_SHARED = """
    api_key root_path enable_ssl_refresh ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs
    ssl_ciphers allow_credentials allowed_origins allowed_methods allowed_headers
""".split()
"""Flags of vLLM that are settings of this server, whose parser removes those that it knows."""

_UVICORN_LEVELS = {"trace": 5}
"""Levels of uvicorn that `logging` does not have."""

_KEEP_ALIVE_S = 15
"""Proxies close silent connections after 30 seconds at the earliest."""


def parse_arguments(
    argv: Sequence[str], settings: ServerSettings, *, may_fetch: bool = False
) -> Namespace:
    """Parse vLLM's flags; with `may_fetch`, download a model of a hub that is not there.

    Raises `LaunchError`, with exit code 2 for a flag that is rejected.
    """
    parser = serve_parser()
    # Cached prompt tokens are reported unless --no-enable-prompt-tokens-details is given.
    parser.set_defaults(enable_prompt_tokens_details=True, sse_keep_alive_interval=_KEEP_ALIVE_S)
    try:
        args: Namespace = parser.parse_args(list(argv))
        if args.model_tag is not None:
            args.model = args.model_tag
        validate_parsed_serve_args(args)
    except SystemExit as error:
        raise LaunchError("the command line is wrong, as said above", exit_code=2) from error
    except (TypeError, ValueError) as error:
        raise LaunchError(str(error), exit_code=2) from error
    paths = {
        "MODEL": args.model,
        "--tokenizer": args.tokenizer,
        "--hf-config-path": args.hf_config_path,
    }
    for flag, name in paths.items():
        problem = None if name is None else path_problem(name)
        if problem is not None:
            raise LaunchError(f"{flag}: {problem}", exit_code=2)
    _use_local_checkpoint(args, may_fetch=may_fetch)
    _check_chat_template(args.chat_template)
    _check_adapter_flags(args, settings)
    for name, reason in REFUSED_FLAGS.items():
        value = getattr(args, name, None)
        if value != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise LaunchError(f"{flag} cannot be used: {reason}", exit_code=2)
    if args.api_server_count not in (None, 1):
        raise LaunchError(
            f"--api-server-count {args.api_server_count} cannot be used: a server has one HTTP "
            "process; run replicas behind a load balancer for more",
            exit_code=2,
        )
    # Reject flags that reached vLLM's parser only: an API key would not be checked.
    # Both parsers read the file of --config.
    for name in _SHARED:
        untouched = getattr(settings, name) == ServerSettings.model_fields[name].default
        if untouched and getattr(args, name, None) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise LaunchError(f"{flag} must be written in full", exit_code=2)
    if args.otlp_traces_endpoint is not None and find_spec("opentelemetry.sdk") is None:
        raise LaunchError(
            "--otlp-traces-endpoint needs the packages opentelemetry-sdk and "
            "opentelemetry-exporter-otlp, which are not installed",
            exit_code=2,
        )
    # Apply the flags that are no settings of this server, and log what they lead to.
    for name, effect in FULFILLED_FLAGS.items():
        value = getattr(args, name)
        if value == parser.get_default(name):
            continue
        logger.info("--%s: %s", name.replace("_", "-"), effect)
        if name == "disable_uvicorn_access_log":
            drop_request_lines(None)
        elif name == "disable_access_log_for_endpoints":
            drop_request_lines([path.strip() for path in value.split(",")])
        elif name == "uvicorn_log_level":
            logging.getLogger("uvicorn").setLevel(_UVICORN_LEVELS.get(value, value.upper()))
    args.host, args.port = settings.host, settings.port
    return args


def serve_parser() -> FlexibleArgumentParser:
    return make_arg_parser(
        FlexibleArgumentParser(prog="rbln-serve serve", usage=_USAGE, add_help=False)
    )


def _use_local_checkpoint(args: Namespace, *, may_fetch: bool) -> None:
    """Replace MODEL by its fetched folder; clients still see the given name.

    What needs files of a hub besides those that `fetch` downloads is left to vLLM. Raises
    `LaunchError` if a model cannot be fetched.
    """
    is_plain = args.load_format in ("auto", "hf", "safetensors", "pt")
    is_plain = is_plain and not args.trust_remote_code and args.download_dir is None
    try:
        if args.model in CATALOGUE:
            cache_root = Path(resolve(args.additional_config).config.cache_root)
            folder: Path | None = get_checkpoint(args.model, cache_root)
        elif is_on_hub(args.model) and is_plain:
            hub = hub_settings()
            if isinstance(args.hf_token, str):
                hub = replace(hub, token=args.hf_token)
            folder = local_or_fetched(args.model, args.revision, hub, may_fetch=may_fetch)
        else:
            return
    except (CheckpointError, ConfigError) as error:
        raise LaunchError(str(error)) from error
    if folder is None:
        return
    logger.info("MODEL %s is the checkpoint %s", args.model, folder)
    args.served_model_name = args.served_model_name or [args.model]
    args.model = args.model_tag = str(folder)


def _check_chat_template(template: str | None) -> None:
    """Raise `LaunchError` for a template that would block when read, such as a pipe."""
    # Anything with a brace or a line break is a template itself.
    if template is None or any(sign in template for sign in "{}\n"):
        return
    path = Path(template)
    if path.exists() and not path.is_file():
        raise LaunchError(f"--chat-template: {template!r} is not a regular file", exit_code=2)


def _check_adapter_flags(args: Namespace, settings: ServerSettings) -> None:
    """Raise `LaunchError` for flags of adapters that would have no effect."""
    if not args.enable_lora:
        unused = {
            "--lora-modules": args.lora_modules,
            "--lora-root": settings.lora_root,
            "--lora-state-file": settings.lora_state_file,
            "--lora-base-names": settings.lora_base_names,
        }
        for flag, value in unused.items():
            if value:
                raise LaunchError(f"{flag} needs --enable-lora", exit_code=2)
    root = settings.lora_root
    if root is not None and not root.is_dir():
        raise LaunchError(f"--lora-root: there is no directory {str(root)!r}", exit_code=2)
    if settings.lora_state_file is not None and root is None:
        raise LaunchError("--lora-state-file needs --lora-root", exit_code=2)


def print_help(topic: str) -> None:
    """Print vLLM's own help: `all`, a group of flags, or what matches a word."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="rbln-serve serve", usage=_USAGE))
    with suppress(SystemExit):
        parser.parse_args([f"--help={topic}"])

"""vLLM's own application for rendering, without an engine and in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi.testclient import TestClient


@contextmanager
def vllm_renders(checkpoint: Path, *flags: str) -> Iterator[TestClient]:
    """Yield a client of what `vllm launch render` serves for a checkpoint."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(checkpoint), "--served-model-name", "tiny", *flags]
    )
    config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
    app = build_app(args, ("render",))
    app.state.log_stats = False  # read at the application's start, which comes first here
    with TestClient(app) as client:
        assert client.portal is not None
        client.portal.call(init_render_app_state, config, app.state, args)
        yield client

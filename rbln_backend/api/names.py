"""Names of the backend that the server uses and that need neither torch nor vLLM."""

from __future__ import annotations

from rbln_backend.checkpoints.folders import (
    CATALOGUE,
    convert,
    fetch,
    get_checkpoint,
    is_on_hub,
    local_or_fetched,
    path_problem,
)
from rbln_backend.config import (
    BACKGROUND_PRIORITY,
    FIRST_PRIORITY,
    NO_TOKEN_LEFT,
    PROGRESS_ARGS,
    PROMPT_PROGRESS,
    QUEUE_TIMEOUT,
)
from rbln_backend.graphs.bundles import (
    MAX_BYTES,
    Contents,
    Imported,
    above_bound,
    audit,
    collect,
    of_other_versions,
    read_archive,
    read_tree,
    unpack,
    unused_since,
    write_bundle,
    write_folder,
)
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, Entry, graph_store
from rbln_backend.graphs.kernel_files import KernelFiles, is_intact, kernel_store, libraries
from rbln_backend.limits import MULTIMODAL
from rbln_backend.lora.adapter_files import (
    Target,
    TensorName,
    check_config,
    check_modules,
    check_tensors,
)
from rbln_backend.reports.info import (
    SECTIONS,
    CompileReport,
    ModelReport,
    StoreReport,
    read_descriptions,
)
from rbln_backend.reports.metrics import MetricDecl, computed_rows
from rbln_backend.reports.progress import GraphProgress, LastStart, ProgressReader, ProgressSnapshot
from rbln_backend.settings import HubSettings, given_options, hub_settings, options_of_vllm, resolve
from rbln_backend.speculation.drafter import EXTRA_ARGS, Prediction

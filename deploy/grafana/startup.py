"""Dashboard of start-up: progress, compilations and the artifact store."""

from __future__ import annotations

from deploy.grafana.panel import BAD_ABOVE_ZERO, Dashboard, Panel, Query, Row, Step
from deploy.grafana.promql import OURS, PLACE, ratio, total

_STARTING = OURS + ',phase=~"init|load|compile|warmup"'

_START = (
    Panel(
        "Phase",
        "state-timeline",
        (
            Query(
                f"sum by (instance, phase) (rbln_serve_phase{{{OURS}}}) == 1",
                "{{instance}} {{phase}}",
            ),
        ),
        "The phase of each instance: init, load, compile, warmup, ready, draining, dead.",
        width=12,
        maximum=1,
    ),
    Panel(
        "Graphs done",
        "timeseries",
        (
            Query(total("rbln_serve_warmup_graphs_done", by="instance"), "{{instance}} done"),
            Query(total("rbln_serve_warmup_graphs", by="instance"), "{{instance}} of"),
        ),
        "Graphs that the start-up compiled or loaded.",
        width=12,
    ),
    Panel(
        "Starting instances",
        "stat",
        (Query(f"sum(rbln_serve_phase{{{_STARTING}}})"),),
        "Instances that are not ready yet.",
        width=4,
        steps=(Step(None, "green"), Step(1, "blue")),
    ),
    Panel(
        "Time to ready",
        "bargauge",
        (
            Query(
                f"max by (instance) (rbln_serve_startup_seconds{{{OURS}}}) > 0",
                "{{instance}}",
                instant=True,
            ),
        ),
        "Seconds from process start to ready, the latest start of each instance.",
        "s",
    ),
    Panel(
        "Seconds by phase",
        "bargauge",
        (
            Query(
                f"max by (phase) (rbln_startup_phase_seconds{{{OURS}}})", "{{phase}}", instant=True
            ),
        ),
        "The slowest rank of the slowest instance.",
        "s",
        width=12,
    ),
)

_COMPILE = (
    Panel(
        "Graphs in memory",
        "bargauge",
        (
            Query(
                f"max by (kind, result) (rbln_graphs{{{OURS}}})",
                "{{kind}} {{result}}",
                instant=True,
            ),
        ),
        "Graphs of an instance, compiled or loaded from the store.",
    ),
    Panel(
        "Seconds a graph",
        "bargauge",
        (
            Query(
                ratio(
                    total("rbln_compile_seconds_sum", by="kind, result"),
                    total("rbln_compile_seconds_count", by="kind, result"),
                ),
                "{{kind}} {{result}}",
                instant=True,
            ),
        ),
        "Mean since the engines started, compiled and loaded.",
        "s",
    ),
    Panel(
        "Compile seconds spent",
        "timeseries",
        (Query(total("rbln_compile_seconds_sum", by="kind, result"), "{{kind}} {{result}}"),),
        "Sum over graphs since the engines started. Graphs compile in parallel.",
        "s",
    ),
    Panel(
        "Hot-path compiles",
        "timeseries",
        (Query(total("rbln_recompiles_after_warmup_total", by="kind"), "{{kind}}"),),
        "Compilations after ready; each one delayed all requests. Must stay 0.",
        steps=BAD_ABOVE_ZERO,
    ),
    Panel(
        "Slowest compile",
        "timeseries",
        (
            Query(
                "histogram_quantile(1, "
                + total("rbln_compile_seconds_bucket", by="le, kind, result")
                + ")",
                "{{kind}} {{result}}",
            ),
        ),
        "Upper bound of the slowest compilation's bucket since the engines started.",
        "s",
    ),
    Panel(
        "Device memory",
        "timeseries",
        (Query(total("rbln_device_memory_bytes", by="kind"), "{{kind}}"),),
        "Device memory allocated by the service, all ranks together.",
        "bytes",
        stack=True,
    ),
)

_STORE = (
    Panel(
        "Look-ups",
        "timeseries",
        (Query(total("rbln_compile_cache_requests_total", by="result"), "{{result}}"),),
        "Look-ups in the artifact store since the engines started. Corrupt ones were rebuilt.",
    ),
    Panel(
        "Hit ratio",
        "stat",
        (
            Query(
                ratio(
                    total("rbln_compile_cache_requests_total", OURS + ',result="hit"'),
                    total("rbln_compile_cache_requests_total"),
                )
            ),
        ),
        "Of all look-ups since the engines started. 1 is a warm start.",
        "percentunit",
        width=4,
        steps=(Step(None, "orange"), Step(0.99, "green")),
    ),
    Panel(
        "Corrupt entries",
        "stat",
        (Query(total("rbln_compile_cache_requests_total", OURS + ',result="corrupt"')),),
        "Entries that failed their check, since the engines started.",
        width=4,
        steps=BAD_ABOVE_ZERO,
    ),
    Panel(
        "Writes",
        "timeseries",
        (Query(total("rbln_compile_cache_writes_total", by="result"), "{{result}}"),),
        "Artifacts written to the store. The next start compiles failed ones again.",
    ),
    Panel(
        "Size",
        "timeseries",
        (Query(f"max by (instance) (rbln_compile_cache_size_bytes{{{OURS}}})", "{{instance}}"),),
        "Bytes of all artifacts. Instances that share a store show the same.",
        "bytes",
    ),
    Panel(
        "Entries",
        "timeseries",
        (Query(f"max by (instance) (rbln_compile_cache_entries{{{OURS}}})", "{{instance}}"),),
        "Artifacts in the store.",
    ),
    Panel(
        "Waits for the store's locks",
        "timeseries",
        (Query(total("rbln_compile_cache_lock_wait_seconds_sum", by="instance"), "{{instance}}"),),
        "Seconds since the engine started of waiting for another process that compiled the same "
        "graph.",
        "s",
    ),
)

STARTUP = Dashboard(
    "rbln-startup",
    "rbln-serve / Compile and start-up",
    "Progress of starts, compilations and the artifact store.",
    (Row("Start", _START), Row("Graphs", _COMPILE), Row("Artifact store", _STORE)),
    PLACE,
)

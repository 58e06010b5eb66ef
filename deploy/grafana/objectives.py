"""Panels of admission by objective: actual times over predicted ones."""

from __future__ import annotations

from deploy.grafana.panel import Panel
from deploy.grafana.promql import quantiles

OBJECTIVES = (
    Panel(
        "Predicted first tokens",
        "timeseries",
        (*quantiles("rbln_objective_first_token_ratio"),),
        "Actual over predicted time to the first token, of requests with an objective.",
    ),
    Panel(
        "Predicted pace",
        "timeseries",
        (*quantiles("rbln_objective_token_ratio"),),
        "Actual over predicted time of a token after the first, of requests with an objective.",
    ),
)

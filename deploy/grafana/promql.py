"""PromQL expressions that several dashboards share.

`OURS` selects the server's and the engine's series, `VLLM` vLLM's own, which also have the model's
name. Rates cover Grafana's `$__rate_interval`, tiles the whole displayed range.
"""

from __future__ import annotations

from deploy.grafana.panel import Query, Variable

OURS = 'job=~"$job",namespace=~"$namespace",release=~"$release",instance=~"$instance"'
VLLM = OURS + ',model_name=~"$model"'
# Client requests to the engine: no probes, scrapes or unknown paths.
SERVED = OURS + ',method="POST",route!~"/admin/.+|other"'
RATE = "$__rate_interval"
RANGE = "$__range"

_INFO = "rbln_serve_build_info"
_JOB = 'job=~"$job"'
_RELEASES = f'{_JOB},namespace=~"$namespace"'
PLACE = (
    Variable("job", "Job", _INFO, "job"),
    # Without such labels, as outside Kubernetes, "All" matches.
    Variable("namespace", "Namespace", f"{_INFO}{{{_JOB}}}", "namespace"),
    Variable("release", "Release", f"{_INFO}{{{_RELEASES}}}", "release"),
    Variable("instance", "Instance", f'{_INFO}{{{_RELEASES},release=~"$release"}}', "instance"),
)
MODEL = Variable("model", "Model", f"vllm:num_requests_running{{{OURS}}}", "model_name")


def rate(metric: str, selector: str = OURS, *, by: str = "", over: str = RATE) -> str:
    """Return the summed rate of a counter, per second; `by` lists the labels to keep."""
    return f"sum{_by(by)} (rate({metric}{{{selector}}}[{over}]))"


def increase(metric: str, selector: str = OURS, *, by: str = "") -> str:
    """Return the increase of a counter over the displayed range."""
    return f"sum{_by(by)} (increase({metric}{{{selector}}}[{RANGE}]))"


def total(metric: str, selector: str = OURS, *, by: str = "") -> str:
    """Return the sum of a gauge."""
    return f"sum{_by(by)} ({metric}{{{selector}}})"


def ratio(part: str, whole: str) -> str:
    """Return `part / whole`, without a value where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(share: float, histogram: str, selector: str = OURS, *, by: str = "") -> str:
    """Return a quantile of a histogram over all chosen instances."""
    labels = f"le, {by}" if by else "le"
    buckets = rate(f"{histogram}_bucket", selector, by=labels)
    return f"histogram_quantile({share:g}, {buckets})"


def quantiles(histogram: str, selector: str = OURS) -> tuple[Query, ...]:
    """Return the queries of p50, p90 and p99."""
    return tuple(
        Query(quantile(share, histogram, selector), f"p{share * 100:g}")
        for share in (0.5, 0.9, 0.99)
    )


def mean(histogram: str, selector: str = OURS, *, by: str = "") -> str:
    """Return the mean of a histogram's observations."""
    summed = rate(f"{histogram}_sum", selector, by=by)
    return ratio(summed, rate(f"{histogram}_count", selector, by=by))


def attained(histogram: str, selector: str, bound: str) -> str:
    """Return the share of observations within `bound`, one of the histogram's own bounds."""
    within = increase(f"{histogram}_bucket", f'{selector},le="{bound}"')
    return ratio(within, increase(f"{histogram}_count", selector))


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""

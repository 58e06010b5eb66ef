"""Pages of several processes as one, with counts that continue over loads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.model_pool.front.metrics_page import add_counts, join_pages, parse_page, render_page

PAGE = """# HELP a_total Things.
# TYPE a_total counter
a_total{kind="x, \\"y\\""} 2.0
# HELP g A gauge.
# TYPE g gauge
g 5.0
# HELP h Seconds.
# TYPE h histogram
h_bucket{le="1.0",model_name="one"} 1.0
h_bucket{le="+Inf",model_name="one"} 3.0
h_count{model_name="one"} 3.0
h_sum{model_name="one"} 7.5
"""


def _values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_of_ended_processes_are_added_and_gauges_are_not() -> None:
    ended = parse_page("", "one")
    for _ in range(2):
        add_counts(ended, parse_page(PAGE, "one"))
    other = parse_page(PAGE.replace('model_name="one"', 'model_name="two"'), "two")
    page = render_page(join_pages([join_pages([parse_page(PAGE, "one"), ended]), other]))
    values = _values(page)
    kind = ("kind", 'x, "y"')
    assert values["a_total", (kind, ("model_name", "one"))] == 6
    assert values["a_total", (kind, ("model_name", "two"))] == 2
    assert values["g", (("model_name", "one"),)] == 5
    assert values["h_count", (("model_name", "one"),)] == 9
    assert values["h_sum", (("model_name", "one"),)] == 22.5
    assert page.count("# TYPE h histogram") == 1

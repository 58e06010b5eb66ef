"""Write the chart's values.schema.json: `python -m deploy.kubernetes.generate`, `make chart`."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.kubernetes.values_schema import values_schema

CHART = Path(__file__).parent / "rbln-serve"


def render() -> str:
    """Return the text of values.schema.json."""
    return json.dumps(values_schema(), indent=1) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(render(), encoding="utf-8")

"""Write the chart's values.schema.json and the application in presets/rayservice.yaml.

`python -m deploy.kubernetes.generate`, `make chart`.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from deploy.kubernetes.values_schema import values_schema

CHART = Path(__file__).parent / "rbln-serve"
RAY_SERVICE = Path(__file__).parent / "presets" / "rayservice.yaml"
_APPLICATION = Path(__file__).parents[2] / "examples" / "ray_serve.py"


def render() -> str:
    """Return the text of values.schema.json."""
    return json.dumps(values_schema(), indent=1) + "\n"


def render_ray_service() -> str:
    """Return the text of rayservice.yaml with examples/ray_serve.py in its ConfigMap."""
    source = textwrap.indent(_APPLICATION.read_text(encoding="utf-8"), "    ")
    text = RAY_SERVICE.read_text(encoding="utf-8")
    place = re.compile(r"(?<=  ray_serve\.py: \|\n).*?(?=^---$)", re.DOTALL | re.MULTILINE)
    return place.sub(lambda _: source, text)


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(render(), encoding="utf-8")
    RAY_SERVICE.write_text(render_ray_service(), encoding="utf-8")

"""Sets of values that the chart is rendered with, from `value_sets.yaml`."""

from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]
_SETS: dict[str, Values] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

# Name -> values and the oldest Kubernetes whose schemas they are checked against.
VALUE_SETS = {name: (one, "1.34" if name == "dra" else "1.30") for name, one in _SETS.items()}
KEYS, PLUGIN, NAMED_NPU = (_SETS[name] for name in ("keys-tls", "plugin", "named-npu"))
DOWNLOAD, DRA, STATEFUL, DATA = (_SETS[x] for x in ("download", "dra", "stateful", "data"))
EXTRAS, KEDA, HPA, GROUPS = (_SETS[name] for name in ("extras", "keda", "hpa", "groups"))
GATEWAY, ALL_ON, POD_MONITOR = (_SETS[name] for name in ("gateway", "all-on", "pod-monitor"))

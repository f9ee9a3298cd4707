"""Files of `aliquot/cluster/calibration`: figures of a device, each with its source.

Scripts that measure different things write into one file; each replaces its own figures only.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aliquot

FOLDER = Path(aliquot.__file__).parent / "cluster" / "calibration"
# In this order they stand in a file; others follow.
_ORDER = (
    "matmul_efficiency",
    "product_tile",
    "product_processors",
    "product_depth",
    "product_traffic",
    "sustained_share",
)


def update(name: str, figures: Mapping[str, tuple[Any, str]]) -> Path:
    """Write figures, each a value with its source, into the file of a device; keep the others."""
    path = FOLDER / f"{name}.toml"
    entries = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries |= {
        key: {"value": rounded(value), "source": source} for key, (value, source) in figures.items()
    }
    names = [n for n in _ORDER if n in entries] + sorted(n for n in entries if n not in _ORDER)
    lines = [
        "# Written by the scripts calibrate_*.py, gpu_steps.py and public_steps.py in benchmarks."
    ]
    for key in names:
        entry = entries[key]
        lines += [
            "",
            f"[{key}]",
            f"value = {json.dumps(entry['value'])}",
            f"source = {json.dumps(entry['source'], ensure_ascii=False)}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rounded(value: Any) -> Any:
    """A figure with as many digits as are meant."""
    return value if isinstance(value, int | list) else float(f"{float(value):.3g}")

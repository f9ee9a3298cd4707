"""Measured figures of devices: one file per kind of device in `calibration/`, each figure with its
source.

A device without a file has the figures of its backend (`_target.py`). `benchmarks/calibrate_gpu.py`
and `calibrate_operators.py` write these files from published measurements of operators and
collectives; `benchmarks/gpu_steps.py` and `public_steps.py` add what only whole steps show, such as
the share of a single kernel's speed that long steps sustain, from measured and reported steps.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from ..core import ClusterError

# The file of each device's chip. Devices that differ in the size of their memory alone share one.
_FILES = {
    "V100-16GB": "v100",
    "V100-32GB": "v100",
    "A100-40GB": "a100",
    "A100-80GB": "a100",
    "A100-PCIe": "a100",
    "H100": "h100",
    "H200": "h100",
    "B200": "b200",
    "v5e": "v5e",
    "v5p": "v5p",
    "v6e": "v6e",
}
# The file of how devices are joined, where that was measured apart from them.
_JOINED = dict.fromkeys(("A100-PCIe", "A10G", "L4", "RTX-4090"), "pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Speed of matrix products as a function of their shape.

    A processor computes one tile of the result at a time. For its start and its end, a tile takes
    as long as `depth` more steps along the contracted dim than there are. Tiles that reach beyond
    the result are computed whole, and a product with fewer tiles than processors takes as long as
    one tile. With the defaults only the number of operations counts.

    Args:
        tile: Rows, and columns, of a tile.
        processors: How many tiles are computed at once.
        depth: Steps of the contracted dim, elements.
        traffic: Share of the bandwidth of elementwise code at which products read and write, 0 to
            1.

    Reference: "Matrix multiplication background user's guide" (NVIDIA, 2023), sections on tile and
    wave quantization.

    Raises:
        ClusterError: A value out of its range.
    """

    tile: int = 1
    processors: int = 1
    depth: float = 0.0
    traffic: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1"
            for name in ("tile", "processors")
            if getattr(self, name) < 1
        ]
        if self.depth < 0:
            problems.append("depth must not be negative")
        if not 0 < self.traffic <= 1:
            problems.append("traffic must be above 0 and at most 1")
        if problems:
            raise ClusterError(problems, asked="products")


def is_calibrated(device_name: str) -> bool:
    """Whether figures of a device were fitted to measurements; otherwise its speeds are those of a
    data sheet, times the shares that other devices of its kind reach.
    """
    return device_name in _FILES


def chip_of(device_name: str) -> str:
    """The calibration file of a device's chip, which others with the same chip share; empty if it
    has none.
    """
    return _FILES.get(device_name, "")


@lru_cache(maxsize=64)
def measured_figures(device_name: str) -> MappingProxyType[str, Any]:
    """Contents of a device's file, as fields of `Target`; empty for a device that has none."""
    entries = _entries(device_name)
    if not entries:
        return MappingProxyType({})
    figures = {key: _frozen(entry["value"]) for key, entry in entries.items()}
    products = {
        key.removeprefix("product_"): figures.pop(key)
        for key in list(figures)
        if key.startswith("product_")
    }
    return MappingProxyType({**figures, "products": Products(**products)})


@lru_cache(maxsize=64)
def _entries(device_name: str) -> dict[str, Any]:
    """A device's files: figures by name, each with `value` and `source`."""
    folder = resources.files(__package__).joinpath("calibration")
    entries: dict[str, Any] = {}
    for name in filter(None, (_FILES.get(device_name), _JOINED.get(device_name))):
        entries |= tomllib.loads(folder.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    return entries


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

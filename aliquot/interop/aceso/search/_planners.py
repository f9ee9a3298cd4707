"""The table of planners over measured databases."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ._auto import Auto
from ._bottleneck import Bottleneck
from ._exact import Exact
from ._grid import Grid
from ._megatron import Megatron
from ._problem import SearchPlanner

PLANNERS: Mapping[str, Callable[..., SearchPlanner]] = {
    "auto": Auto,
    "exact": Exact,
    "bottleneck": Bottleneck,
    "grid": Grid,
    "megatron": Megatron,
}
"""Planners by name."""

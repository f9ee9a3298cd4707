"""Measurements of a cluster's devices, frozen for planning: ratios of measured to modelled seconds
at measured sizes, interpolated between them.

The cost model gives the seconds, and these ratios multiply them, so at a measured size the price is
the measurement. The tables are read from a profile database (`aliquot.profiling`); nothing here
touches a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import MEASURED, AbstractMeasured, Corrections, Link

Floats = NDArray[np.float64]
_NEIGHBOURS = 4
# Distance, in powers of two, up to which a size counts as measured.
_NEAR = 1.0
_SAME = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class RatioTable:
    """Measured over modelled seconds of one kind of operator at some sizes.

    Between measured sizes, the logarithm of the ratio is the mean over the nearest four, weighted
    by the inverse square of the distance.

    Args:
        points: sizes in powers of two, `(points, dims)`; each once.
        ratios: one for each point.
        spreads: spread of each measurement, as a share of it.
        grade: of the measurements; see `Corrections`.

    Reference: D. Shepard, "A two-dimensional interpolation function for irregularly-spaced data",
    1968.
    """

    points: Floats
    ratios: Floats
    spreads: Floats
    grade: str = MEASURED

    @cached_property
    def _tree(self) -> Any:
        # Imported here because the import is slow, and planning without measurements needs none.
        from scipy.spatial import cKDTree

        return cKDTree(self.points)

    @cached_property
    def interpolation_error(self) -> float:
        """Leave-one-out error: the median over measured sizes of the relative error of
        interpolation without that size's own measurement; 1 if there is only one size.
        """
        if len(self.points) < 2:
            return 1.0
        count = min(_NEIGHBOURS + 1, len(self.points))
        distances, neighbours = self._tree.query(self.points, k=count)
        # The nearest neighbour of a measured size is that size itself, which is left out.
        without = self._mean(distances[:, 1:], neighbours[:, 1:])
        return float(np.median(np.abs(without / self.ratios - 1)))

    def _mean(self, distances: Floats, neighbours: NDArray[np.intp]) -> Floats:
        # At a measured size the distance is zero, and its weight would be infinite.
        weights = 1 / np.maximum(distances, _SAME) ** 2
        # Ratios are averaged as logarithms, so that twice as slow and twice as fast cancel out.
        logs = np.log(self.ratios)[neighbours]
        return np.asarray(np.exp((weights * logs).sum(axis=1) / weights.sum(axis=1)), np.float64)

    def correct(self, points: Floats) -> Corrections:
        count = min(_NEIGHBOURS, len(self.points))
        distances, neighbours = self._tree.query(points, k=count)
        distances, neighbours = (
            each.reshape(len(points), count) for each in (distances, neighbours)
        )
        nearest, same = neighbours[:, 0], distances[:, 0] < _SAME
        ratios = np.where(same, self.ratios[nearest], self._mean(distances, neighbours))
        errors = np.where(same, self.spreads[nearest], self.interpolation_error)
        return Corrections(ratios, distances[:, 0] <= _NEAR, errors, self.grade)


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured(AbstractMeasured):
    """Tables of ratios by kind, with their source in words.

    Two are equal if their tables and transfers are. `transfers` are lines through the measured
    transfers between stages of a pipeline, inside a host (False) and between hosts (True).
    """

    tables: Mapping[str, RatioTable] = field(repr=False)
    source: str
    transfers: Mapping[bool, Link] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of the tables and transfers."""
        content = hashlib.sha256()
        # Sorted, so that tables read in another order have the same hash.
        for kind, table in sorted(self.tables.items()):
            content.update(f"{kind} {table.grade}".encode())
            for array in (table.points, table.ratios):
                content.update(np.ascontiguousarray(array).tobytes())
        content.update(repr(sorted(self.transfers.items())).encode())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measured) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def correct(self, kind: str, points: Floats, seconds: Floats) -> Corrections:
        """Modelled seconds, corrected by the tables. Kinds without a table stay as modelled."""
        table = self.tables.get(kind)
        if table is None:
            return Corrections(
                np.ones(len(points)), np.zeros(len(points), np.bool_), np.zeros(len(points))
            )
        return table.correct(points)

    def transfer_link(self, crosses_hosts: bool) -> Link | None:
        return self.transfers.get(crosses_hosts)

"""Prices of the operators of a modelled database: products, memory traffic and collectives on one
tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...cluster import Cluster, LogicalMesh, target_for
from ...cost import Work, collective_line, work_seconds
from ...graph import Phase
from ...plans import item_bytes
from ._write_database import OperatorRow

MIB = 2.0**20
_WHOLE = np.array([[-1]], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPrices:
    """Prices for one micro-batch size, tensor degree and algorithm, by the cost model, which the
    cluster's measurements correct if it has any.

    Attributes:
        cluster: the cluster that the operators run on.
        dtype: dtype of parameters and activations.
        batch: samples of a micro-batch on each data-parallel rank.
        tensor: tensor degree.
        algorithm: 0 splits the outputs of the first of two products, 1 its inputs.
    """

    cluster: Cluster
    dtype: str
    batch: int
    tensor: int
    algorithm: int

    @property
    def item(self) -> float:
        """Bytes of an element."""
        return float(item_bytes(self.dtype))

    def products(self, batch: int, rows: int, columns: int, depth: int) -> tuple[float, float]:
        """Seconds of a product, and of the two products of its backward pass."""
        forward = self._product(batch, rows, columns, depth)
        return forward, self._product(batch, rows, depth, columns) + self._product(
            batch, depth, columns, rows
        )

    def _product(self, batch: int, rows: int, columns: int, depth: int) -> float:
        return self.convolution(batch, rows, columns, depth, batch * rows * depth)

    def convolution(
        self, batch: int, rows: int, columns: int, depth: int, input_elements: int
    ) -> float:
        """Seconds of a product whose left operand is read from only `input_elements` elements,
        fewer than it has, because the windows of an image overlap.
        """
        left, right, result = (
            (True, True, False, True),
            (True, False, True, True),
            (True, True, True, False),
        )
        work = Work(
            phase=Phase.FORWARD,
            split_by=(True,) * 4,
            flops=2.0 * batch * rows * columns * depth,
            dtype=self.dtype,
            arrays=(
                (self.item * input_elements, left),
                (self.item * batch * depth * columns, right),
                (self.item * batch * rows * columns, result),
            ),
            kernels=1.0,
        )
        return self._seconds(work, (batch, rows, columns, depth))

    def traffic(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes."""
        work = Work(phase=Phase.FORWARD, split_by=(), arrays=((num_bytes, (False,)),), kernels=1.0)
        return self._seconds(work, (1,))

    def _seconds(self, work: Work, sizes: Sequence[int]) -> float:
        mesh = LogicalMesh(shape=(self.cluster.num_devices,), cluster=self.cluster)
        return float(work_seconds(work, sizes, _WHOLE, mesh, target_for(self.cluster.device))[0])

    def collective(self, kind: str, num_bytes: float) -> float:
        """Seconds of a collective of the tensor-parallel group over a whole array of so many
        bytes.
        """
        return collective_seconds(kind, self.tensor, num_bytes, self.cluster)

    def row(
        self,
        name: str,
        seconds: tuple[float, float],
        arrays: tuple[float, float],
        weights: float,
        activations: float,
        working: tuple[float, float],
    ) -> OperatorRow:
        """A row of the database, from seconds and bytes.

        Args:
            seconds: forward and backward.
            arrays: bytes at the input and at the output.
            working: bytes of temporary arrays, forward and backward.
        """
        return OperatorRow(
            name=name,
            forward_us=1e6 * seconds[0],
            backward_us=1e6 * seconds[1],
            input_mb=arrays[0] / MIB,
            output_mb=arrays[1] / MIB,
            weights_mb=weights / MIB,
            activations_mb=activations / MIB,
            forward_working_mb=working[0] / MIB,
            backward_working_mb=working[1] / MIB,
        )


def collective_seconds(kind: str, num_devices: int, num_bytes: float, cluster: Cluster) -> float:
    """Seconds of a collective among neighbouring devices of a host. For an all-gather, `num_bytes`
    are those of its result.
    """
    if num_devices == 1:
        return 0.0
    mesh = LogicalMesh(shape=(cluster.num_devices // num_devices, num_devices), cluster=cluster)
    entering = num_bytes / num_devices if kind == "all-gather" else num_bytes
    latency, per_byte = collective_line(
        kind, (1,), mesh, target_for(cluster.device), near_bytes=entering
    )
    return latency + per_byte * entering

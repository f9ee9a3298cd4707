"""Databases in Aceso's format that this project's cost model computes, instead of a profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from ...cluster import Cluster
from ...core import InputError
from ._operator_prices import MIB, OperatorPrices, collective_seconds
from ._write_database import DatabaseContent, OperatorRow

_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_MOST_MIB = 4096


class ModelShape(Protocol):
    """The sizes of a model, which give rows of operators under Aceso's names."""

    @property
    def dtype(self) -> str:
        """The dtype of parameters and activations."""

    @property
    def algorithms(self) -> tuple[int, ...]:
        """The algorithms of the operators."""

    @property
    def splits(self) -> int:
        """A number that tensor degrees must divide."""

    def rows(self, prices: OperatorPrices) -> tuple[OperatorRow, ...]:
        """All distinct operators, in order."""


def modelled_database(
    shape: ModelShape,
    cluster: Cluster,
    *,
    micro_batches: Sequence[int],
    tensor_degrees: Sequence[int] | None = None,
) -> DatabaseContent:
    """The operators, collectives and transfers of a model on a cluster with their prices by the
    cost model, which the cluster's measurements correct if it has any.

    Args:
        shape: the model; see `TransformerShape` and `ResNetShape`.
        micro_batches: samples on each data-parallel rank.
        tensor_degrees: by default all powers of two within a host.

    Raises:
        InputError: a tensor degree does not divide the heads or channels that it splits, or the
            devices of a host.
    """
    per_host = cluster.devices_per_host
    degrees = (
        [2**k for k in range(int(math.log2(per_host)) + 1)]
        if tensor_degrees is None
        else list(tensor_degrees)
    )
    wrong = [t for t in degrees if shape.splits % t or per_host % t]
    if tensor_degrees is not None and wrong:
        raise InputError(
            f"Tensor degrees {wrong} do not divide the {shape.splits} heads or channels that they"
            f" split, or the {per_host} devices of a host."
        )
    degrees = [t for t in degrees if t not in wrong]
    operators = {
        (b, t, algorithm): shape.rows(
            OperatorPrices(
                cluster=cluster, dtype=shape.dtype, batch=b, tensor=t, algorithm=algorithm
            )
        )
        for b, t, algorithm in itertools.product(micro_batches, degrees, shape.algorithms)
    }
    every = itertools.chain.from_iterable(operators.values())
    largest = max(max(row.input_mb, row.output_mb) for row in every)
    sizes = range(min(math.ceil(largest), _MOST_MIB) + 1)
    collectives = {}
    for kind, n in itertools.product(_KINDS, [t for t in degrees if t > 1]):
        name = kind.replace("_", "-")
        collectives[kind, n] = {
            size: 1e3 * collective_seconds(name, n, max(size, 0.5) * MIB, cluster) for size in sizes
        }
    return DatabaseContent(
        operators=operators,
        collectives=collectives,
        within_nodes=_transfers(*_link(cluster, within=True)),
        between_nodes=_transfers(*_link(cluster, within=False)) if cluster.num_hosts > 1 else None,
    )


def _link(cluster: Cluster, *, within: bool) -> tuple[float, float]:
    link = cluster.transfer_links[0 if within else 1]
    return link.latency_s, link.bandwidth_bytes_per_s


def _transfers(latency_s: float, bytes_per_s: float) -> dict[float, float]:
    """GB/s of messages of 1 to 1024 MiB."""
    sizes = [2.0**k * MIB for k in range(11)]
    return {size / MIB: size / (latency_s + size / bytes_per_s) / 1e9 for size in sizes}

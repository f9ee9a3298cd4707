"""A database of a GPT in Aceso's format, from this project's cost model instead of a profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...cluster import Cluster, LogicalMesh, target_for
from ...core import InputError
from ...cost import Work, collective_line, work_seconds
from ...graph import Phase
from ...plans import item_bytes
from ._write_database import DatabaseContent, OperatorRow

_MIB = 2.0**20
_INDEX_BYTES = 4
_FLOAT32_BYTES = 4
_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_MOST_MIB = 4096
_WHOLE = np.array([[-1]], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """Sizes of a GPT.

    Attributes:
        hidden_size, num_heads, ffn_size, vocab_size, seq_len: as usual; `max_positions` is how many
            positions are learned.
        dtype: of parameters and activations.
    """

    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    max_positions: int
    dtype: str


def gpt_database(
    shape: GPTShape,
    cluster: Cluster,
    *,
    micro_batches: Sequence[int],
    tensor_degrees: Sequence[int] | None = None,
) -> DatabaseContent:
    """Operators, collectives and transfers of a GPT on a cluster, as the cost model prices them, or
    as they were measured where the cluster holds measurements.

    Products are Megatron's: algorithm 0 splits the columns of the first of two products and the
    rows of the second, algorithm 1 the other way round. Times of an operator include the all-reduce
    of its results, or of its input's gradient. Dropout is counted as memory traffic with a mask of
    one byte for each element, as in Aceso's own models.

    Args:
        micro_batches: samples on each data-parallel rank.
        tensor_degrees: by default all powers of two within a host.

    Raises:
        InputError: a degree that does not divide the heads, or more devices than a host has.
    """
    per_host = cluster.devices_per_host
    degrees = (
        [2**k for k in range(int(math.log2(per_host)) + 1)]
        if tensor_degrees is None
        else list(tensor_degrees)
    )
    wrong = [t for t in degrees if shape.num_heads % t or per_host % t]
    if tensor_degrees is not None and wrong:
        raise InputError(
            f"Tensor degrees {wrong} do not divide the {shape.num_heads} heads, or the {per_host}"
            " devices of a host."
        )
    degrees = [t for t in degrees if t not in wrong]
    operators = {
        (b, t, algorithm): _Pricer(shape, cluster, b, t, algorithm).rows()
        for b, t, algorithm in itertools.product(micro_batches, degrees, (0, 1))
    }
    largest = max(max(row.input_mb, row.output_mb) for rows in operators.values() for row in rows)
    sizes = range(min(math.ceil(largest), _MOST_MIB) + 1)
    groups = [t for t in degrees if t > 1]
    return DatabaseContent(
        operators=operators,
        collectives={
            (kind, n): {
                size: (
                    1e3
                    * _collective_seconds(kind.replace("_", "-"), n, max(size, 0.5) * _MIB, cluster)
                )
                for size in sizes
            }
            for kind in _KINDS
            for n in groups
        },
        within_nodes=_transfers(*_link(cluster, within=True)),
        between_nodes=_transfers(*_link(cluster, within=False)) if cluster.num_hosts > 1 else None,
    )


@dataclass(frozen=True, slots=True)
class _Pricer:
    """Operators of one micro-batch size, tensor degree and algorithm."""

    shape: GPTShape
    cluster: Cluster
    batch: int
    tensor: int
    algorithm: int

    @property
    def _item(self) -> float:
        return float(item_bytes(self.shape.dtype))

    @property
    def _tokens(self) -> int:
        return self.batch * self.shape.seq_len

    def rows(self) -> tuple[OperatorRow, ...]:
        """All operators, in order."""
        s, t, item = self.shape, self.tensor, self._item
        h, f, tokens = s.hidden_size, s.ffn_size, self._tokens
        hidden = tokens * h * item
        wide = tokens * f * item
        scores = self.batch * s.num_heads * s.seq_len**2 * item / t
        mask = 1 / item
        columns_first = self.algorithm == 0
        split_in, split_out = (1, t) if columns_first else (t, 1)
        logits = tokens * s.vocab_size * item / t
        embedding = (s.vocab_size / t + s.max_positions) * h * item
        norm = 2 * _FLOAT32_BYTES * tokens
        residual = hidden
        heads = self.batch * s.num_heads // t
        per_head = h // s.num_heads
        norm_times = self._traffic(2 * hidden), self._traffic(4 * hidden)
        dropout = 2 + mask, 2 + mask
        return (
            self._row(
                "encoder-embedding",
                (
                    self._traffic((2 + dropout[0]) * hidden) + self._all_reduce(hidden),
                    self._traffic(dropout[1] * hidden + hidden + embedding),
                ),
                (tokens * _INDEX_BYTES, hidden),
                embedding,
                (1 + mask) * hidden,
                (hidden, embedding + hidden),
            ),
            self._row(
                "enc-1st-layernorm",
                norm_times,
                (hidden, hidden + residual),
                0.0,
                hidden + norm,
                (0.0, 2 * hidden),
            ),
            self._linear("enc-attention-qkv", h, 3 * h, split_in, split_out, residual, bias=0.0),
            self._row(
                "enc-attention-score",
                self._products(heads, s.seq_len, s.seq_len, per_head),
                (3 * hidden / t + residual, scores + hidden / t + residual),
                0.0,
                scores,
                (scores, 2 * scores),
            ),
            self._row(
                "enc-attention-softmax",
                (self._traffic(2 * scores), self._traffic(3 * scores)),
                (scores + hidden / t + residual,) * 2,
                0.0,
                scores,
                (0.0, 2 * scores),
            ),
            self._row(
                "enc-attention-dropout",
                (self._traffic(dropout[0] * scores), self._traffic(dropout[1] * scores)),
                (scores + hidden / t + residual,) * 2,
                0.0,
                (1 + mask) * scores,
                (0.0, 2 * scores),
            ),
            self._row(
                "enc-attention-context",
                self._products(heads, s.seq_len, per_head, s.seq_len),
                (scores + hidden / t + residual, hidden / t + residual),
                0.0,
                hidden / t,
                (0.0, scores + hidden / t),
            ),
            self._linear("enc-attention-dense", h, h, split_out, split_in, residual, bias=h * item),
            self._dropout("enc-post-attention-dropout", hidden, h * item),
            self._row(
                "enc-2nd-layernorm",
                norm_times,
                (hidden, hidden + residual),
                0.0,
                hidden + norm,
                (0.0, 2 * hidden),
            ),
            self._linear(
                "enc-MLP-GEMM-1", h, f, split_in, split_out, residual, bias=f * item / split_out
            ),
            self._row(
                "enc-MLP-gelu",
                (self._traffic(2 * wide / split_out), self._traffic(3 * wide / split_out)),
                (
                    (wide + f * item) / split_out + residual,
                    wide / split_out + residual,
                ),
                0.0,
                wide / split_out,
                (0.0, 2 * wide / split_out),
            ),
            self._linear("enc-MLP-GEMM-2", f, h, split_out, split_in, residual, bias=h * item),
            self._dropout("enc-post-MLP-dropout", hidden, h * item),
            self._row(
                "final-layernorm",
                norm_times,
                (hidden, hidden),
                0.0,
                hidden + norm,
                (0.0, 2 * hidden),
            ),
            self._row(
                "gpt-post-process",
                self._with_loss(logits),
                (hidden, 0.0),
                s.vocab_size * h * item / t,
                logits * _FLOAT32_BYTES / item,
                (logits, logits),
            ),
        )

    def _linear(
        self,
        name: str,
        wide_in: int,
        wide_out: int,
        split_in: int,
        split_out: int,
        residual: float,
        *,
        bias: float,
    ) -> OperatorRow:
        """A product with a parameter of which one side is split: the sums over a split input are
        all-reduced.
        """
        item, tokens = self._item, self._tokens
        into, out = tokens * wide_in * item, tokens * wide_out * item
        forward, backward = self._products(1, tokens, wide_out // split_out, wide_in // split_in)
        if split_in > 1:
            forward += self._all_reduce(out)
        if split_out > 1:
            backward += self._all_reduce(into)
        weights = wide_in * wide_out * item / self.tensor
        return self._row(
            name,
            (forward, backward),
            (into / split_in + residual, out / split_out + residual + bias),
            weights,
            out / split_out,
            (0.0, weights + into / split_in),
        )

    def _dropout(self, name: str, hidden: float, bias: float) -> OperatorRow:
        """Dropout, with the bias and the residual added in the same kernel."""
        mask = 1 / self._item
        return self._row(
            name,
            (self._traffic((3 + mask) * hidden), self._traffic((2 + mask) * hidden)),
            (2 * hidden + bias, hidden),
            0.0,
            (1 + mask) * hidden,
            (0.0, 2 * hidden),
        )

    def _with_loss(self, logits: float) -> tuple[float, float]:
        s = self.shape
        forward, backward = self._products(
            1, self._tokens, s.vocab_size // self.tensor, s.hidden_size
        )
        single = logits * _FLOAT32_BYTES / self._item
        hidden = self._tokens * s.hidden_size * self._item
        return (
            forward
            + self._traffic(logits + 3 * single)
            + self._all_reduce(self._tokens * _FLOAT32_BYTES),
            backward + self._traffic(logits + 2 * single) + self._all_reduce(hidden),
        )

    def _products(self, batch: int, rows: int, columns: int, depth: int) -> tuple[float, float]:
        """Seconds of a product, and of the two products of its backward pass."""
        forward = self._product(batch, rows, columns, depth)
        return forward, self._product(batch, rows, depth, columns) + self._product(
            batch, depth, columns, rows
        )

    def _product(self, batch: int, rows: int, columns: int, depth: int) -> float:
        left, right, result = (
            (True, True, False, True),
            (True, False, True, True),
            (True, True, True, False),
        )
        work = Work(
            phase=Phase.FORWARD,
            split_by=(True,) * 4,
            flops=2.0 * batch * rows * columns * depth,
            dtype=self.shape.dtype,
            arrays=(
                (self._item * batch * rows * depth, left),
                (self._item * batch * depth * columns, right),
                (self._item * batch * rows * columns, result),
            ),
            kernels=1.0,
        )
        return self._seconds(work, (batch, rows, columns, depth))

    def _traffic(self, num_bytes: float) -> float:
        work = Work(phase=Phase.FORWARD, split_by=(), arrays=((num_bytes, (False,)),), kernels=1.0)
        return self._seconds(work, (1,))

    def _seconds(self, work: Work, sizes: Sequence[int]) -> float:
        mesh = LogicalMesh(shape=(self.cluster.num_devices,), cluster=self.cluster)
        return float(work_seconds(work, sizes, _WHOLE, mesh, target_for(self.cluster.device))[0])

    def _all_reduce(self, num_bytes: float) -> float:
        return _collective_seconds("all-reduce", self.tensor, num_bytes, self.cluster)

    def _row(
        self,
        name: str,
        seconds: tuple[float, float],
        arrays: tuple[float, float],
        weights: float,
        activations: float,
        working: tuple[float, float],
    ) -> OperatorRow:
        return OperatorRow(
            name=name,
            forward_us=1e6 * seconds[0],
            backward_us=1e6 * seconds[1],
            input_mb=arrays[0] / _MIB,
            output_mb=arrays[1] / _MIB,
            weights_mb=weights / _MIB,
            activations_mb=activations / _MIB,
            forward_working_mb=working[0] / _MIB,
            backward_working_mb=working[1] / _MIB,
        )


def _collective_seconds(kind: str, num_devices: int, num_bytes: float, cluster: Cluster) -> float:
    """Seconds of a collective among neighbours of a host. An all-gather is known by the bytes that
    leave it.
    """
    if num_devices == 1:
        return 0.0
    mesh = LogicalMesh(shape=(cluster.num_devices // num_devices, num_devices), cluster=cluster)
    entering = num_bytes / num_devices if kind == "all-gather" else num_bytes
    latency, per_byte = collective_line(
        kind, (1,), mesh, target_for(cluster.device), near_bytes=entering
    )
    return latency + per_byte * entering


def _link(cluster: Cluster, *, within: bool) -> tuple[float, float]:
    link = cluster.transfer_links[0 if within else 1]
    return link.latency_s, link.bandwidth_bytes_per_s


def _transfers(latency_s: float, bytes_per_s: float) -> dict[float, float]:
    """GB/s of messages of 1 to 1024 MiB."""
    sizes = [2.0**k * _MIB for k in range(11)]
    return {size / _MIB: size / (latency_s + size / bytes_per_s) / 1e9 for size in sizes}

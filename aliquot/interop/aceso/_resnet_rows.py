"""Operators of Wide-ResNets as rows of a database.

Arrays between operators are replicated within a tensor group. Algorithm 0 splits the output
channels of a convolution and gathers its result; algorithm 1 splits the input channels and sums the
result. The first convolution always has algorithm 0, and the last product is not split. In a block,
the input travels along until the shortcut (`downsample`), which adds it; the rectifiers inside
belong to the normalisations before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._operator_prices import OperatorPrices
from ._write_database import OperatorRow

_COLOURS = 3
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """One bottleneck: the channels of its input, before its 3 x 3 convolution, after it, and of its
    output; the side of the images at its input and output; whether its shortcut has a projection.
    """

    channels_in: int
    channels: int
    wide_channels: int
    channels_out: int
    size_in: int
    size_out: int
    projects: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """Sizes of a Wide-ResNet.

    Attributes:
        sections: the blocks of each section.
        channels: output channels of the first convolution.
        image_size: side of the input images.
        dtype: dtype of parameters and activations.
    """

    sections: tuple[tuple[BlockShape, ...], ...]
    channels: int
    image_size: int
    num_classes: int
    dtype: str

    @property
    def algorithms(self) -> tuple[int, ...]:
        """Algorithm 0 splits output channels, 1 input channels."""
        return (0, 1)

    @property
    def splits(self) -> int:
        """The number that tensor degrees must divide: the channels of the narrowest
        convolutions.
        """
        return self.channels

    def rows(self, prices: OperatorPrices) -> tuple[OperatorRow, ...]:
        """All operators, in order."""
        return tuple(_Rows(self, prices).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """What is convolved.

    Attributes:
        channels, sizes: of the image that is read, and of the one that is made.
        algorithm: by default that of the file.
        stride_skips: whether it reads only as many points as it makes, because its stride skips the
            others.
    """

    window: int
    channels: tuple[int, int]
    sizes: tuple[int, int]
    algorithm: int | None = None
    needs_input_gradient: bool = True
    stride_skips: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    shape: ResNetShape
    prices: OperatorPrices

    def all(self) -> Iterator[OperatorRow]:
        """All operators, in order."""
        s, p = self.shape, self.prices
        whole, half = s.image_size, -(-s.image_size // 2)
        first = self._bytes(half, s.channels)
        yield self._convolution(
            "conv1",
            _Convolution(
                window=7,
                channels=(_COLOURS, s.channels),
                sizes=(whole, half),
                algorithm=0,
                needs_input_gradient=False,
            ),
        )
        yield self._norm("bn1", first, s.channels)
        yield self._rectifier("relu1", first)
        enters = s.sections[0][0].size_in
        pooled = self._bytes(enters, s.channels)
        indices = pooled * _INDEX_BYTES / p.item
        moved = p.traffic(first + pooled + indices)
        yield p.row(
            "maxpool",
            (moved, moved),
            (first, pooled),
            0.0,
            pooled + indices,
            (0.0, first),
        )
        for section, blocks in enumerate(s.sections):
            for index, block in enumerate(blocks):
                yield from self._block(f"block-{section}-{index}", block)
        last = s.sections[-1][-1]
        yield from self._head(last)

    def _block(self, name: str, b: BlockShape) -> Iterator[OperatorRow]:
        entered = self._bytes(b.size_in, b.channels_in)
        steps = (
            ("1", 1, b.channels_in, b.channels, b.size_in, b.size_in),
            ("2", 3, b.channels, b.wide_channels, b.size_in, b.size_out),
            ("3", 1, b.wide_channels, b.channels_out, b.size_out, b.size_out),
        )
        for number, window, into, out, size_in, size_out in steps:
            # The first convolution itself reads the block's input, so none travels along before it.
            beside = (0.0 if number == "1" else entered), entered
            convolution = _Convolution(
                window=window, channels=(into, out), sizes=(size_in, size_out)
            )
            yield self._convolution(f"{name}-conv{number}", convolution, beside)
            yield self._norm(f"{name}-bn{number}", self._bytes(size_out, out), out, entered)
        left = self._bytes(b.size_out, b.channels_out)
        yield self._shortcut(f"{name}-downsample", b, entered, left)
        yield self._rectifier(f"{name}-relu", left)

    def _shortcut(self, name: str, b: BlockShape, entered: float, left: float) -> OperatorRow:
        p = self.prices
        added = p.traffic(3 * left)
        if not b.projects:
            return p.row(name, (added, p.traffic(left)), (left + entered, left), 0.0, left, (0, 0))
        convolution = _Convolution(
            window=1,
            channels=(b.channels_in, b.channels_out),
            sizes=(b.size_in, b.size_out),
            stride_skips=True,
        )
        projected = self._convolution(name, convolution)
        norm = self._norm(name, left, b.channels_out)
        mib = 2.0**20
        return OperatorRow(
            name=name,
            forward_us=projected.forward_us + norm.forward_us + 1e6 * added,
            backward_us=projected.backward_us + norm.backward_us,
            input_mb=(left + entered) / mib,
            output_mb=left / mib,
            weights_mb=projected.weights_mb + norm.weights_mb,
            activations_mb=projected.activations_mb + norm.activations_mb,
            forward_working_mb=projected.forward_working_mb,
            backward_working_mb=projected.backward_working_mb,
        )

    def _convolution(
        self, name: str, c: _Convolution, beside: Sequence[float] = (0.0, 0.0)
    ) -> OperatorRow:
        """The row of a convolution; `beside` are bytes that travel along, before and after it."""
        p, (channels_in, channels_out), (size_in, size_out) = self.prices, c.channels, c.sizes
        algorithm = p.algorithm if c.algorithm is None else c.algorithm
        split_out, split_in = (p.tensor, 1) if algorithm == 0 else (1, p.tensor)
        mine_in, mine_out = channels_in // split_in, channels_out // split_out
        points_in = p.batch * (size_out if c.stride_skips else size_in) ** 2
        points_out = p.batch * size_out**2
        depth = mine_in * c.window**2
        into = self._bytes(size_in, channels_in)
        out = self._bytes(size_out, channels_out)
        forward = p.convolution(1, points_out, mine_out, depth, points_in * mine_in)
        # The gradients of its weights and of its input each cost as much as the forward pass.
        backward = forward * (2 if c.needs_input_gradient else 1)
        if p.tensor > 1 and split_out > 1:
            forward += p.collective("all-gather", out)
            backward += p.collective("all-reduce", into) if c.needs_input_gradient else 0.0
        elif p.tensor > 1:
            forward += p.collective("all-reduce", out)
            backward += p.collective("all-gather", into)
        weights = channels_in * channels_out * c.window**2 * p.item / p.tensor
        kept = out if split_in == 1 else out + into / split_in
        working = out / split_out if split_out > 1 else 0.0
        return p.row(
            name,
            (forward, backward),
            (into + beside[0], out + beside[1]),
            weights,
            kept,
            (working, weights + into / split_in),
        )

    def _norm(self, name: str, num_bytes: float, channels: int, beside: float = 0.0) -> OperatorRow:
        p = self.prices
        return p.row(
            name,
            (p.traffic(3 * num_bytes), p.traffic(5 * num_bytes)),
            (num_bytes + beside,) * 2,
            2 * channels * p.item,
            num_bytes + 2 * channels * p.item,
            (0.0, 2 * num_bytes),
        )

    def _rectifier(self, name: str, num_bytes: float) -> OperatorRow:
        p = self.prices
        times = p.traffic(2 * num_bytes), p.traffic(3 * num_bytes)
        return p.row(name, times, (num_bytes, num_bytes), 0.0, num_bytes, (0.0, 2 * num_bytes))

    def _head(self, last: BlockShape) -> Iterator[OperatorRow]:
        s, p = self.shape, self.prices
        images = self._bytes(last.size_out, last.channels_out)
        means = p.batch * last.channels_out * p.item
        logits = p.batch * s.num_classes * p.item
        moved = p.traffic(images + means)
        yield p.row("avgpool", (moved, moved), (images, means), 0.0, means, (0.0, images))
        weights = last.channels_out * s.num_classes * p.item + s.num_classes * p.item
        yield p.row(
            "fc",
            p.products(1, p.batch, s.num_classes, last.channels_out),
            (means, logits),
            weights,
            logits,
            (0.0, weights),
        )

    def _bytes(self, size: int, channels: int) -> float:
        return self.prices.batch * size**2 * channels * self.prices.item

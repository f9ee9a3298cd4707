"""Configurations of models of images; see `_config.py` for those of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ._config import AbstractConfig, out_of_range, refuse

# Bottlenecks in each of the four stages, by the number of layers: three for each bottleneck, and
# the first convolution and the head.
_STAGES = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_IMAGE_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckConfig:
    """The shape of one bottleneck.

    `channels_in` and `channels_out` are the channels of its input and output, `channels` and
    `wide_channels` those before and after its 3 x 3 convolution. `stride` is that of the 3 x 3
    convolution and of the shortcut; `size_in` is the side of the input in points.
    """

    channels_in: int
    channels: int
    wide_channels: int
    channels_out: int
    stride: int
    size_in: int

    @property
    def size_out(self) -> int:
        """Side of the output in points."""
        return -(-self.size_in // self.stride)

    @property
    def projects(self) -> bool:
        """True if the shortcut needs a convolution of its own, because input and output differ in
        shape.
        """
        return self.stride != 1 or self.channels_in != self.channels_out

    @property
    def forward_flops(self) -> int:
        """Floating point operations of its convolutions on one image; products with padding beyond
        the edge count, too.
        """
        before, after = self.size_in**2, self.size_out**2
        flops = before * self.channels_in * self.channels
        flops += after * self.wide_channels * (9 * self.channels + self.channels_out)
        if self.projects:
            flops += after * self.channels_in * self.channels_out
        return 2 * flops


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNetConfig(AbstractConfig):
    """The shape of a ResNet of bottlenecks whose 3 x 3 convolutions are `width_factor` times as
    wide as usual.

    `num_layers` is one of 14, 26, 50, 101 and 152; `num_channels` is the number of channels of the
    first convolution and of the first stage, which doubles from stage to stage. Images are squares
    of `image_size` points in three colours.

    Raises:
        InputError: some sizes are out of range; every such fault is listed.
    """

    examples: ClassVar[str] = "images"
    loops: ClassVar[bool] = False
    usual_dtype: ClassVar[str | None] = "float32"

    name: str
    family: str = "wide-resnet"
    num_layers: int
    num_channels: int
    width_factor: int
    image_size: int = 224
    num_classes: int = 1024

    def __post_init__(self) -> None:
        faults = (
            [] if self.family == "wide-resnet" else [f"family={self.family!r} is not wide-resnet"]
        )
        if self.num_layers not in _STAGES:
            faults.append(
                f"num_layers={self.num_layers} is not one of {', '.join(map(str, _STAGES))}"
            )
        faults += out_of_range(self, ("num_channels", "width_factor", "image_size", "num_classes"))
        refuse(self.name, faults)

    @property
    def section_lengths(self) -> tuple[int, ...]:
        """Bottlenecks in each of the four sections of equal image size."""
        return _STAGES[self.num_layers]

    def bottlenecks(self) -> Iterator[BottleneckConfig]:
        """All bottlenecks, in order. Before them, the first convolution and the pooling after it
        each halve the image.
        """
        size, channels_in = _half(_half(self.image_size)), self.num_channels
        for stage, count in enumerate(self.section_lengths):
            for index in range(count):
                block = BottleneckConfig(
                    channels_in=channels_in,
                    channels=self.num_channels << stage,
                    wide_channels=(self.num_channels << stage) * self.width_factor,
                    channels_out=4 * self.num_channels << stage,
                    stride=2 if stage and not index else 1,
                    size_in=size,
                )
                yield block
                size, channels_in = block.size_out, block.channels_out

    @property
    def flops_per_image(self) -> int:
        """Floating point operations to train on one image: forward and backward, without
        recomputation.

        Convolutions and the head cost as much again for each of their two gradients, except that
        the first convolution needs no gradient of the image.
        """
        first = 2 * _half(self.image_size) ** 2 * 49 * _IMAGE_CHANNELS * self.num_channels
        blocks = list(self.bottlenecks())
        head = 2 * blocks[-1].channels_out * self.num_classes
        return 2 * first + 3 * (sum(block.forward_flops for block in blocks) + head)

    @property
    def flops_per_example(self) -> int:
        """`flops_per_image`."""
        return self.flops_per_image

    @property
    def batch_multiple(self) -> int:
        """1: a batch may have any size."""
        return 1

    def batch(self, global_batch: int, float_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Images, channels last, and the number of each image's class."""
        shape = (global_batch, self.image_size, self.image_size, _IMAGE_CHANNELS)
        return {"images": (shape, float_dtype), "labels": ((global_batch,), "int32")}

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """No other fields change: all other sizes are computed from the fields."""
        return {}


def _half(size: int) -> int:
    return -(-size // 2)

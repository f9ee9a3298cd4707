"""Configurations of U-Nets that take noise out of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ._config import AbstractConfig, out_of_range, refuse

ATTENTION_GROUPS = 32
"""Groups of channels that are normalised together before attention."""

NUM_TIMES = 1000
"""Steps of noise in the usual schedules: times are below it."""

# Two for the first convolution and the head, two at the bottom, one for each level on the way down
# and up, and one more at the top on the way up.
_LAYERS = tuple(2 * levels + 5 for levels in range(2, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetLayerConfig:
    """The shape of one layer: a residual block, attention if `attends`, and a change of size.

    `channels_in` are those of its input, `channels_skip` those of the array from the way down that
    is joined to it, 0 if there is none; `size` is the side of both in points. `resample` is "down",
    "up" or "". What `is_kept`, before the size changes, is joined again on the way up.
    """

    channels_in: int
    channels_skip: int
    channels_out: int
    size: int
    attends: bool = False
    resample: str = ""
    is_kept: bool = False

    def forward_flops(self, config: UNetConfig) -> int:
        """Floating point operations on one image; products with padding beyond the edge count,
        too.
        """
        points, width, entered = self.size**2, self.channels_out, self.channels_in
        entered += self.channels_skip
        products = 9 * points * width * (entered + width) + config.time_size * width
        if entered != width:
            products += points * entered * width
        if self.attends:
            # Queries, keys, values and output, attention to all points, then the same to the
            # context; the network behind it; and a projection before and after both.
            products += 4 * points * width**2 + 2 * points**2 * width
            products += 2 * points * width**2 + 2 * points * config.context_len * width
            products += 2 * config.context_len * config.context_size * width
            products += (12 + 2) * points * width**2
        if self.resample:
            resized = points * 4 if self.resample == "up" else points // 4
            products += 9 * resized * width**2
        return 2 * products


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig(AbstractConfig):
    """The shape of a U-Net whose layers attend to a context, such as a text.

    Images are squares of `image_size` points. Each level but the last halves them, and doubles the
    channels, of which the first has `num_channels`; the last two levels have equally many.
    `num_layers` is 9 for two levels, and two more for each further one. Attention has `num_heads`
    heads, and is at all levels but the last, on the way up the first. The context has
    `context_len` vectors of `context_size` elements.

    Raises:
        InputError: some sizes are out of range; every such fault is listed.
    """

    examples: ClassVar[str] = "latents"
    loops: ClassVar[bool] = False
    usual_dtype: ClassVar[str | None] = "float32"

    name: str
    family: str = "unet"
    num_layers: int = 13
    num_channels: int
    image_size: int = 32
    channels_in: int = 3
    channels_out: int = 4
    num_heads: int = 8
    norm_groups: int = 4
    context_len: int
    context_size: int

    def __post_init__(self) -> None:
        faults = [] if self.family == "unet" else [f"family={self.family!r} is not unet"]
        wrong = out_of_range(
            self,
            (
                "num_channels",
                "image_size",
                "channels_in",
                "channels_out",
                "num_heads",
                "norm_groups",
                "context_len",
                "context_size",
            ),
        )
        faults += wrong
        if self.num_layers not in _LAYERS:
            faults.append(
                f"num_layers={self.num_layers} is not one of {', '.join(map(str, _LAYERS))}"
            )
        elif not wrong and self.image_size % 2 ** (self.num_levels - 1):
            faults.append(
                f"image_size={self.image_size} cannot be halved {self.num_levels - 1} times, as"
                f" num_layers={self.num_layers} asks for"
            )
        if not wrong:
            divisors = {
                "num_heads": self.num_heads,
                "norm_groups": self.norm_groups,
                "the groups before attention": ATTENTION_GROUPS,
            }
            faults += [
                f"num_channels={self.num_channels} is not a multiple of {what}, {divisor}"
                for what, divisor in divisors.items()
                if self.num_channels % divisor
            ]
        refuse(self.name, faults)

    @property
    def num_levels(self) -> int:
        """Sizes of images, from the whole one to the smallest."""
        return (self.num_layers - 5) // 2

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Channels at each level."""
        last = self.num_levels - 2
        return tuple(self.num_channels << min(level, last) for level in range(self.num_levels))

    @property
    def time_size(self) -> int:
        """Elements of the vector that says how noisy an image is."""
        return 4 * self.num_channels

    def layers(self) -> Iterator[UNetLayerConfig]:
        """All layers between the first convolution and the head, in order: down, across the bottom
        and up. On the way up each is joined to what was kept last.
        """
        channels, bottom = self.level_channels, self.num_levels - 1
        entered = self.num_channels
        for level, width in enumerate(channels):
            yield UNetLayerConfig(
                channels_in=entered,
                channels_skip=0,
                channels_out=width,
                size=self.image_size >> level,
                attends=level < bottom,
                resample="down" if level < bottom else "",
                is_kept=True,
            )
            entered = width
        for attends in (True, False):
            yield UNetLayerConfig(
                channels_in=entered,
                channels_skip=0,
                channels_out=entered,
                size=self.image_size >> bottom,
                attends=attends,
            )
        for level in (*range(bottom, -1, -1), 0):
            yield UNetLayerConfig(
                channels_in=entered,
                channels_skip=channels[level],
                channels_out=channels[level],
                size=self.image_size >> level,
                attends=level > 0,
                resample="up" if level > 0 else "",
            )
            entered = channels[level]

    @property
    def flops_per_example(self) -> int:
        """Floating point operations to train on one image: forward and backward, without
        recomputation. Products cost as much again for each of their two gradients; the first
        convolution needs no gradient of the image.
        """
        ends = 2 * 9 * self.image_size**2 * self.num_channels
        time = 2 * self.time_size * (self.num_channels + self.time_size)
        layers = sum(layer.forward_flops(self) for layer in self.layers())
        inner = layers + time + ends * self.channels_out
        return 3 * inner + 2 * ends * self.channels_in

    @property
    def batch_multiple(self) -> int:
        """1: a batch may have any size."""
        return 1

    def batch(self, global_batch: int, float_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Noisy images and what is to be predicted of them, channels last; for each image the step
        of noise that it is at, and its context.
        """
        shape = (global_batch, self.image_size, self.image_size)
        return {
            "images": ((*shape, self.channels_in), float_dtype),
            "times": ((global_batch,), "int32"),
            "context": ((global_batch, self.context_len, self.context_size), float_dtype),
            "targets": ((*shape, self.channels_out), float_dtype),
        }

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Vectors of the context keep their ratio to `num_channels`."""
        if "num_channels" not in changes:
            return {}
        size = changes["num_channels"] * self.context_size // self.num_channels
        return {"context_size": max(1, size)}

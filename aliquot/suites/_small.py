"""Cases made so small that virtual devices run them: the same kind of plan of the same kind of
model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..zoo import MoEConfig, UNetConfig, WideResNetConfig
from ._suite import Case, GivenStage

_Sizes = TypeVar("_Sizes", tuple[int, int], tuple[int, int, int])
_MOST_MICRO_BATCHES = 4
_LEAST_LAYERS = 2
_SEQUENCE = 32


def small_case(case: Case, most_devices: int = 8) -> Case:
    """The case on at most so many devices, with a model of as many blocks as its stages need, all
    else of its model tiny, at most 4 micro-batches, in float32.
    """
    stages = _fewer_stages(case.stages, most_devices)
    layout = _halved(case.layout, most_devices) if case.layout else None
    mesh = _halved(case.mesh_shape, most_devices) if case.mesh_shape else None
    ways = (tuple(math.prod(stage.mesh) for stage in stages), layout, mesh)
    devices = sum(ways[0]) or math.prod(layout or mesh or (min(case.num_devices, most_devices),))
    blocks = sum(stage.layers for stage in stages) or (layout[2] if layout else 1)
    rows = math.lcm(devices, *(stage.mesh[0] * stage.mesh[1] for stage in stages))
    count = min(case.num_micro_batches, _MOST_MICRO_BATCHES)
    layers = min(case.num_layers, 4) if case.num_layers else None
    blocks = max(blocks, layers or 1, _LEAST_LAYERS)
    config = case.config
    if isinstance(config, WideResNetConfig):
        # The depths that there are, by their blocks.
        depth = 14 if blocks <= 4 else 26 if blocks <= 8 else 50
        sizes = {"num_layers": depth, "num_channels": 8, "width_factor": 2, "image_size": 32}
        sizes["num_classes"] = 16
    elif isinstance(config, UNetConfig):
        sizes = {"num_layers": 9, "num_channels": 32, "image_size": 8, "num_heads": 4}
        sizes["context_len"] = 4
    else:
        sizes = {"hidden_size": 64, "num_heads": 4, "seq_len": _SEQUENCE, "vocab_size": 256}
        sizes["num_layers"] = blocks
        if isinstance(config, MoEConfig):
            # Every second block has experts, which choose among the tokens of two sequences.
            sizes |= {"num_layers": 2 * blocks, "num_experts": 8, "group_size": 2 * _SEQUENCE}
            rows *= 2
    return replace(
        case,
        num_devices=devices,
        global_batch=rows * count,
        num_micro_batches=count,
        overrides=sizes,
        dtype="float32",
        stages=stages,
        layout=layout,
        mesh_shape=mesh,
        num_layers=layers,
        published_s=None,
        published_tflops=None,
    )


def _fewer_stages(stages: Sequence[GivenStage], most: int) -> tuple[GivenStage, ...]:
    """Smaller meshes, and where single devices are still too many, two stages made one."""
    found = list(stages)
    while sum(math.prod(stage.mesh) for stage in found) > most:
        if any(math.prod(stage.mesh) > 1 for stage in found):
            largest = max(math.prod(stage.mesh) for stage in found)
            for k, stage in enumerate(found):
                if math.prod(stage.mesh) == largest:
                    found[k] = replace(stage, mesh=_half(stage.mesh))
        else:
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [replace(a, layers=a.layers + b.layers) for a, b in pairs]
    share = math.gcd(*(stage.layers for stage in found)) if found else 1
    return tuple(replace(stage, layers=stage.layers // share) for stage in found)


def _halved(sizes: _Sizes, most: int) -> _Sizes:
    while math.prod(sizes) > most:
        sizes = _half(sizes)
    return sizes


def _half(sizes: _Sizes) -> _Sizes:
    """The sizes with the largest halved."""
    largest = max(range(len(sizes)), key=lambda k: sizes[k])
    halved = [n // 2 if k == largest else n for k, n in enumerate(sizes)]
    return (halved[0], halved[1]) if len(sizes) == 2 else (halved[0], halved[1], halved[2])

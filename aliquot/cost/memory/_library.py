"""Workspace of a GPU's libraries: of cuDNN's convolutions and the code around them, and copies for
8-bit products.

cuDNN reads kernels with their output features first. Kernels in another order of dims are copied
when a step begins; all later operators read the copy, so it stays until the update has read it. A
remat region, however, takes the kernel itself, through its barrier, and copies it again for its own
products.

The gradient of a maximum over windows is scattered to the positions of the maxima (an int32 for
each dim of the image), which are found right before. The zeroes to scatter into are made as soon as
the image is, because the scheduler sees no reason to wait. If the image is itself a maximum with a
constant, the zeroes are that constant's array, and the scatter writes into a copy of it.

cuBLAS multiplies 8-bit floats only with the contracted dim of both operands last. Where more
products in loops contract another dim of a weight than its last one, as forward products and those
that are recomputed do, the whole stack of the weight is copied in that order, in its own type,
before the loops, which take their rows from the copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...graph import Literal, Op, Operand, OpId, ValueId
from ...sharding import Cuts

_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copied:
    """Kernels of a value class, each copied for the convolutions from operator `births[k]` to
    `deaths[k]`.

    `op_class` is one of these convolutions.
    """

    value_class: int
    op_class: int
    births: NDArray[np.int64]
    deaths: NDArray[np.int64]


def copied_kernels(cuts: Cuts, last_use: NDArray[np.int64]) -> Iterator[Copied]:
    """Kernels that are copied into another order of dims. `last_use[v]` is the last operator that
    reads value `v`.
    """
    value_classes, op_classes = cuts.folding.value_class.tolist(), cuts.folding.op_class.tolist()
    # The backward pass reads reversed kernels, for which the same copy serves.
    turned = {op.outputs[0]: op.inputs[0] for op in cuts.graph.ops if op.name == "rev"}
    readers: dict[tuple[ValueId, int], list[OpId]] = {}
    for op in cuts.graph.ops:
        operand = _kernel(op)
        kernel = turned.get(operand, operand) if isinstance(operand, int) else None
        if not isinstance(kernel, int) or not _is_taken_in(cuts, value_classes[kernel]):
            continue
        if not _features_first(
            cuts.graph.values[kernel].shape, op.params["dimension_numbers"].rhs_spec
        ):
            readers.setdefault((kernel, op.region), []).append(op.index)
    copies: dict[tuple[int, bool], tuple[int, list[tuple[int, int]]]] = {}
    for (read, region), ops in readers.items():
        producer = cuts.producer[value_classes[read]]
        stays = producer is None and not region
        lives = (0, int(last_use[read])) if stays else (ops[0], ops[-1])
        copies.setdefault((value_classes[read], stays), (op_classes[ops[0]], []))[1].append(lives)
    for (value_class, _), (op_class, lives_of) in copies.items():
        births, deaths = np.array(lives_of, np.int64).T
        yield Copied(value_class=value_class, op_class=op_class, births=births, deaths=deaths)


def turned_weights(cuts: Cuts) -> Iterator[tuple[int, OpId]]:
    """Value classes of stacks of weights that are copied for 8-bit products, each with the last
    operator that reads a row of it.
    """
    graph, classes = cuts.graph, cuts.folding.value_class.tolist()
    maker = {out: op for op in graph.ops for out in op.outputs if out >= 0}
    found: dict[int, tuple[int, OpId]] = {}
    for op in graph.ops:
        if op.name != "dot_general" or op.trips == 1:
            continue
        for value, contracted in zip(op.inputs, op.params["dimension_numbers"][0], strict=True):
            if not isinstance(value, int) or not graph.values[value].dtype.startswith("float8"):
                continue
            stack = _stack_of(cuts, value, maker)
            if stack is not None:
                last = len(graph.values[value].shape) - 1
                votes, _ = found.get(classes[stack], (0, 0))
                found[classes[stack]] = votes + (-1 if last in contracted else 1), op.index
    for value_class, (votes, last_read) in found.items():
        if votes > 0:
            yield value_class, last_read


def _stack_of(cuts: Cuts, value: ValueId, maker: dict[ValueId, Op]) -> ValueId | None:
    """The stack of parameters of which a value is a row, perhaps scaled and cast; None if it is
    none.
    """
    while (op := maker.get(value)) is not None:
        shape = cuts.graph.values[value].shape
        if not cuts.param_only[cuts.folding.value_class[value]]:
            return None
        sources = [
            i
            for i in op.inputs
            if isinstance(i, int)
            and (op.name == "scan_slice" or cuts.graph.values[i].shape == shape)
        ]
        if op.name == "scan_slice":
            return sources[0] if sources[0] not in maker else None
        if not sources:
            return None
        value = sources[0]
    return None


def only_convolved(cuts: Cuts) -> list[bool]:
    """For each value class, whether it is a reversed kernel that only convolutions read: these can
    reverse it themselves.
    """
    maker_names = [cuts.first[m[0]].name if m is not None else "" for m in cuts.producer]
    reversed_only = [name == "rev" for name in maker_names]
    for op_class, op in enumerate(cuts.first):
        for position, value_class, _ in cuts.operands(op_class):
            reversed_only[value_class] &= op.name == "conv_general_dilated" and position == 1
    return reversed_only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scattered:
    """Images of a value class to whose maxima over windows gradients are scattered: bytes of
    positions, or of zeroes, for each image, their live ranges, and `what` they are.
    """

    value_class: int
    what: str
    num_bytes: int
    births: NDArray[np.int64]
    deaths: NDArray[np.int64]


def indexed_maxima(cuts: Cuts, made_at: NDArray[np.int64]) -> Iterator[Scattered]:
    """Images to whose maxima gradients are scattered. `made_at[v]` is the operator from which value
    `v` is alive.
    """
    images: dict[int, list[tuple[int, int]]] = {}
    num_bytes: dict[int, tuple[int, int]] = {}
    for op in cuts.graph.ops:
        if op.name != "select_and_scatter_add":
            continue
        taken = [i for i in op.inputs if isinstance(i, int)]
        windows, image = cuts.graph.values[taken[0]], cuts.graph.values[taken[-1]]
        value_class = int(cuts.folding.value_class[taken[-1]])
        images.setdefault(value_class, []).append((int(made_at[taken[-1]]), op.index))
        producer = cuts.producer[value_class]
        maker = cuts.first[producer[0]] if producer is not None else None
        shared = (
            maker is not None
            and maker.name == "max"
            and any(isinstance(i, Literal) for i in maker.inputs)
        )
        positions = _INDEX_BYTES * len(image.shape) * math.prod(windows.shape)
        num_bytes[value_class] = image.num_bytes, positions + (image.num_bytes if shared else 0)
    for value_class, lives_of in images.items():
        births, deaths = np.array(lives_of, np.int64).T
        zeroes, positions = num_bytes[value_class]
        for what, count, begin in (
            ("zeroes for gradients of", zeroes, births),
            ("positions of", positions, deaths),
        ):
            yield Scattered(
                value_class=value_class, what=what, num_bytes=count, births=begin, deaths=deaths
            )


def _features_first(shape: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """True if output features are the first dim other than those of size one; `order` begins with
    the position of that dim.
    """
    return shape[order[0]] == 1 or all(n == 1 for n in shape[: order[0]])


def _kernel(op: Op) -> Operand | None:
    return op.inputs[1] if op.name == "conv_general_dilated" else None


def _is_taken_in(cuts: Cuts, value_class: int) -> bool:
    """True for a parameter, or a loop's slice of one. Computed arrays need no copy, because they
    are written in the wanted order at once.
    """
    producer = cuts.producer[value_class]
    return cuts.param_only[value_class] and (
        producer is None or cuts.first[producer[0]].name in ("scan_slice", "tie")
    )

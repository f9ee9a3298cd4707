"""How many of the devices split each array of the state where their number does not divide its
dims.

FSDP of PyTorch flattens arrays and pads them. XLA takes and returns arrays in equal parts only, so
that 96 devices cannot share a dim of 8192. On a mesh 3x32 they can: 32 devices share one copy of
the array, and each of three such groups has one, as in hybrid FSDP. Arrays whose dims 96 divides
are still split over both axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ....cluster import logical_mesh_shapes
from ....core import counted
from ....cost import Problem, enumerate_choices, shards
from ....graph import Role, wildcard

# A second axis must make what a device holds of the state smaller by this share. It makes every
# plan longer to find, and nobody misses the pieces of a few vectors.
_LEAST_SAVING = 0.1
# Arrays that make up less of the state are not named.
_LEAST_SHARE = 0.01
_MOST_SIZES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSplit:
    """How a number of devices splits the state.

    Attributes:
        axes: sizes of the mesh axes that make up the devices. Those along the last are neighbours.
        notes: which arrays fewer devices share, and by how much they miss.
    """

    axes: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Array:
    """An input of a step. `free` are the dims that stand for the factors of its node, -1 for those
    that may not be split.
    """

    path: str
    is_parameter: bool
    shape: tuple[int, ...]
    num_bytes: int
    node: int
    free: tuple[int, ...]

    @property
    def divides(self) -> tuple[bool, ...]:
        """For each factor of its node, whether it runs through a dim that may be split."""
        return tuple(dim >= 0 for dim in self.free)


def split_state(
    problem: Problem,
    nodes: frozenset[int],
    devices: int,
    *,
    beside: int = 1,
    taken: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> StateSplit:
    """The axes over which `devices` split the arrays of some nodes furthest, at most two.

    Args:
        nodes: those that a method splits; one axis if there are none.
        beside: size of another axis that splits the same arrays.
        taken: by node, factors that only other axes split.
    """
    # The inputs of a step that given nodes hold.
    arrays = []
    for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
        if port.node in nodes:
            value = problem.graph.values[item.value]
            free = port.projection
            if others := taken.get(port.node):
                free = tuple(-1 if f in others else dim for f, dim in enumerate(free))
            arrays.append(
                _Array(
                    path=item.path,
                    is_parameter=item.role is Role.PARAMETER,
                    shape=tuple(value.shape),
                    num_bytes=value.num_bytes,
                    node=port.node,
                    free=free,
                )
            )
    total_bytes = sum(array.num_bytes for array in arrays)
    axes: tuple[int, ...] = (devices,)
    sharers = devices * beside
    if not total_bytes or devices == 1:
        return StateSplit(axes=axes)

    def pieces(array: _Array, axes: tuple[int, ...]) -> int:
        sizes = (*axes, beside) if beside > 1 else axes
        choices = enumerate_choices(problem.nodes.nodes[array.node], sizes)
        return int(shards(choices, array.divides, sizes).max())

    def on_each_bytes(axes: tuple[int, ...]) -> float:
        return sum(array.num_bytes / pieces(array, axes) for array in arrays)

    held_bytes = on_each_bytes(axes)
    if total_bytes / sharers < (1 - _LEAST_SAVING) * held_bytes:
        shapes = [shape for shape in logical_mesh_shapes(devices) if len(shape) == 2]
        # Of meshes that split it as far, the one whose last axis alone splits it furthest, as the
        # devices along that axis are neighbours.
        best = min(
            shapes,
            key=lambda shape: (on_each_bytes(shape), on_each_bytes(shape[1:])),
            default=axes,
        )
        if on_each_bytes(best) < (1 - _LEAST_SAVING) * held_bytes:
            axes = best
    by_pieces: dict[int, list[_Array]] = defaultdict(list)
    for array in arrays:
        by_pieces[pieces(array, axes)].append(array)
    notes = []
    for number, some in sorted(by_pieces.items()):
        if number < sharers and sum(a.num_bytes for a in some) >= _LEAST_SHARE * total_bytes:
            notes.append(_note(some, number, sharers, total_bytes))
    return StateSplit(axes=axes, notes=tuple(notes))


def _note(arrays: Sequence[_Array], pieces: int, devices: int, total_bytes: int) -> str:
    # Parameters are named before their moments.
    largest = max(arrays, key=lambda array: (array.num_bytes, array.is_parameter))
    paths = {wildcard(array.path) for array in arrays}
    others = f" and {counted(len(paths) - 1, 'more array')}" if len(paths) > 1 else ""
    share = sum(array.num_bytes for array in arrays) / total_bytes
    # The largest sizes come nearest to what the devices could divide.
    sizes = {array.shape[dim] for array in arrays for dim in array.free if dim >= 0}
    misses = []
    for size in sorted(sizes, reverse=True):
        if size % devices:
            misses.append(
                f"{size} = {size // devices} x {devices} + {size % devices}"
                if size > devices
                else f"{size} < {devices}"
            )
    shared = (
        f"split over {pieces} of these devices, in {devices // pieces} copies"
        if pieces > 1
        else "whole on each of them"
    )
    return (
        f"{devices} devices cannot share {wildcard(largest.path)} {list(largest.shape)}{others},"
        f" {share:.0%} of the state that they split, as they divide none of the dims"
        f" ({', '.join(misses[:_MOST_SIZES])}): each is {shared}. With multiples of {devices} all"
        " would share it."
    )

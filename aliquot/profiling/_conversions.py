"""Conversions, from one split to another, of the arrays that cross between segments. Like segments,
they are measured as programs of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..runtime import make_mesh
from ..sharding import Spec, dims_of, format_spec
from ._database import ProgramKey
from ._programs import CompiledPart, compile_program, key_of
from ._segments import Combination, Crossing, SegmentedStep


class Conversion(NamedTuple):
    """The resharding of an array of a given shape from one spec to another."""

    shape: tuple[int, ...]
    dtype: str
    source: Spec
    target: Spec


LAUNCH = Conversion(shape=(), dtype="float32", source=(), target=())
"""A program that does next to nothing. Its time is part of every measured program; a step that is
one program pays it once.
"""


def conversions_between(
    crossings: Sequence[Crossing], before: Combination, after: Combination
) -> Iterator[tuple[Crossing, Conversion]]:
    """The arrays to convert between two neighbouring segments, forward and backward.

    Args:
        crossings: the arrays that cross between segments of these kinds; see
            `SegmentedStep.crossings`.
    """
    for crossing in crossings:
        maker, reader = (after, before) if crossing.is_backward else (before, after)
        source, target = maker.leaves.get(crossing.leaves), reader.enters.get(crossing.enters)
        # Random keys are small, and a program by itself cannot take them as arrays.
        is_key = crossing.dtype.startswith("key<")
        if source is not None and target is not None and source != target and not is_key:
            yield crossing, Conversion(crossing.shape, crossing.dtype, source, target)


def all_conversions(
    step: SegmentedStep, combinations: Sequence[Sequence[Combination]]
) -> list[Conversion]:
    """All conversions that any two neighbours of a step may need, each once, after `LAUNCH`."""
    found = {LAUNCH: None}
    for (a, b), crossings in step.crossings.items():
        ends = _by_boundary(combinations[a]), _by_boundary(combinations[b])
        for before, after in itertools.product(*ends):
            found |= dict.fromkeys(c for _, c in conversions_between(crossings, before, after))
    return list(found)


def _by_boundary(combinations: Sequence[Combination]) -> list[Combination]:
    """One combination for each way to split the inputs and outputs of a segment."""
    found = {}
    for c in combinations:
        found[tuple(c.enters.items()), tuple(c.leaves.items())] = c
    return list(found.values())


def conversion_key(conversion: Conversion, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a conversion on this process's devices."""
    return key_of(f"conversion {tuple(conversion)}", mesh_shape)


def compile_conversion(
    conversion: Conversion, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]
) -> CompiledPart:
    """Compile a conversion, or `LAUNCH`. May be called in several threads."""
    mesh = make_mesh(mesh_shape, axis_names, None)
    if conversion == LAUNCH:
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(lambda x: x + 1, out_shardings=whole)
        argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        return compile_program(
            jitted, [argument], mesh_shape, axis_names, label="launch of a program"
        )
    ends, names, ndim = [], [], len(conversion.shape)
    for spec in (conversion.source, conversion.target):
        ends.append(NamedSharding(mesh, PartitionSpec(*dims_of(spec, mesh.axis_names, ndim))))
        names.append(format_spec(spec, axis_names, ndim))
    source, target = ends
    argument = jax.ShapeDtypeStruct(conversion.shape, jnp.dtype(conversion.dtype), sharding=source)
    label = f"{conversion.dtype}{list(conversion.shape)} from {names[0]} to {names[1]}"
    jitted = jax.jit(lambda x: x, out_shardings=target)
    return compile_program(jitted, [argument], mesh_shape, axis_names, label=label)

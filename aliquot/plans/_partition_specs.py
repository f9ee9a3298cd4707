"""A plan's splits as JAX's `PartitionSpec`s and `NamedSharding`s, for users with their own training
loop. Imports jax only when called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core import InputError, PlanMismatchError
from ._idle_hosts import require_busy_processes
from ._plan import ArrayInterface, Plan

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

_MOST_FAULTS = 8


def partition_specs(plan: Plan) -> dict[str, PartitionSpec]:
    """For each input path of the step, in order, its `PartitionSpec` over the axis names of the
    plan's mesh.

    An input that several stages hold has the spec of the first.
    """
    from jax.sharding import PartitionSpec

    placed: dict[str, tuple[tuple[str, ...], ...]] = {}
    for stage in reversed(plan.stages):
        placed.update(stage.shardings)
    found = {}
    for array in plan.inputs:
        dims: list[str | tuple[str, ...] | None] = []
        for axes in placed.get(array.path, ()):
            dims.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
        found[array.path] = PartitionSpec(*dims)
    return found


def spec_tree(plan: Plan, tree: Any, path: str | None = None) -> Any:
    """A tree like `tree`, an argument of the step or a part of one, with the `PartitionSpec` of
    each array.

    Raises:
        InputError: `tree` is no part of the plan's inputs, or could be several; pass `path` then.
    """
    import jax

    specs = partition_specs(plan)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = _paths_of(plan, leaves, path)
    return jax.tree_util.tree_unflatten(structure, [None if p is None else specs[p] for p in paths])


def sharding_tree(plan: Plan, tree: Any, mesh: Mesh, path: str | None = None) -> Any:
    """As `spec_tree`, with a `NamedSharding` for each array.

    Raises:
        InputError: as `spec_tree`, or the plan is a pipeline.
    """
    import jax
    from jax.sharding import NamedSharding

    from ..graph import memory_kind

    _refuse_pipelines(plan)
    specs = partition_specs(plan)
    kinds = {array.path: memory_kind(array) for array in plan.inputs}
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    shardings = []
    for p in _paths_of(plan, leaves, path):
        shardings.append(None if p is None else NamedSharding(mesh, specs[p], memory_kind=kinds[p]))
    return jax.tree_util.tree_unflatten(structure, shardings)


def make_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh over the first of `devices`, by default those that JAX sees.

    Raises:
        InputError: the plan is a pipeline, whose stages have a mesh each.
        PlanMismatchError: there are too few devices, or processes with those of idle hosts alone.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    _refuse_pipelines(plan)
    shape, names = plan.stages[0].mesh_shape, plan.stages[0].axis_names
    available = list(jax.devices() if devices is None else devices)
    needed = math.prod(shape)
    if len(available) < needed:
        raise PlanMismatchError(
            f"the plan is for {needed} devices ({'x'.join(map(str, shape))}), and there are"
            f" {len(available)}",
            asked="the plan does not fit these devices",
            advice=(
                "Pass as many devices as the plan has, or plan for those at hand"
                " (Cluster.detect())."
            ),
        )
    require_busy_processes(plan, available)
    grid = np.array(available[:needed], dtype=object).reshape(shape)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(shape))


def _refuse_pipelines(plan: Plan) -> None:
    if plan.is_pipeline or len(plan.stages) != 1:
        raise InputError(
            f"the plan has {len(plan.stages)} stages with a mesh each, and one jitted function runs"
            " on one mesh. Run it with aliquot.parallelize(step, plan), or plan one program with"
            " method=WholeProgram() or ShardParallel()."
        )


def _paths_of(plan: Plan, leaves: Sequence[tuple[Any, Any]], path: str | None) -> list[str | None]:
    """The input path of each leaf; None for leaves that are no arrays."""
    from ..graph import path_parts

    arrays = {array.path: array for array in plan.inputs}
    suffixes = ["".join(path_parts(keys)) for keys, _ in leaves]
    shapes = [_shape(leaf) for _, leaf in leaves]
    known = [k for k, shape in enumerate(shapes) if shape is not None]
    if not known:
        return [None] * len(leaves)
    first = suffixes[known[0]]
    prefixes = {p.removesuffix(first) for p in arrays if p.endswith(first)} - {""}
    if path is not None:
        prefixes = {path}
    wanted = [(suffixes[k], shapes[k]) for k in known]
    faults = {}
    for prefix in sorted(prefixes, key=lambda p: (len(p), p)):
        faults[prefix] = list(_faults(arrays, prefix, wanted))
    good = [prefix for prefix, reasons in faults.items() if not reasons]
    if len(good) > 1:
        # Prefer a whole argument to a part of one, such as the moments of an optimizer.
        whole = [prefix for prefix in good if prefix.isidentifier()]
        good = whole if len(whole) == 1 else good
    if len(good) == 1:
        found = []
        for suffix, shape in zip(suffixes, shapes, strict=True):
            found.append(None if shape is None else good[0] + suffix)
        return found
    if good:
        raise InputError(
            f"this tree could be any of {', '.join(good[:_MOST_FAULTS])}: add path={good[0]!r} or"
            " another."
        )
    closest = min(faults, key=lambda prefix: len(faults[prefix]), default=None)
    listed = (
        "; ".join(faults[closest][:_MOST_FAULTS])
        if closest is not None
        else f"no input ends with {suffixes[known[0]]!r}"
    )
    names = ", ".join(dict.fromkeys(p.partition(".")[0].partition("[")[0] for p in arrays))
    raise InputError(f"this tree is no argument of the step that was planned ({names}): {listed}.")


def _shape(leaf: Any) -> tuple[int, ...] | None:
    if type(leaf) in (int, float):
        return ()
    shape = getattr(leaf, "shape", None)
    return tuple(shape) if shape is not None and hasattr(leaf, "dtype") else None


def _faults(
    arrays: dict[str, ArrayInterface],
    prefix: str,
    wanted: Sequence[tuple[str, tuple[int, ...] | None]],
) -> Iterator[str]:
    for suffix, shape in wanted:
        array = arrays.get(prefix + suffix)
        if array is None:
            yield f"the plan has no {prefix + suffix}"
        elif array.shape != shape:
            yield f"{prefix + suffix} has shape {shape}, and {array.shape} in the plan"

"""Initialization of the state: the user's function runs in pieces, each on the devices that hold
its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from ..core import CaptureError, PlanMismatchError
from ..graph import Graph, SplitGraph, capture, evaluate, plain_context, split_rows
from ..plans import ArrayInterface, Plan
from ._state_call import argument_of, misplaced_state, state_arguments, state_call
from .transport import Rows, agree_on_init, joined, stub

_NOTHING = np.zeros((), np.int32)


def init_state(
    fn: Callable[..., Any],
    inputs: Sequence[ArrayInterface],
    places: Mapping[str, Sequence[Rows]],
    init_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    compared_with: Plan | None = None,
    traced: Graph | None = None,
) -> Any:
    """Results of `init_fn(*args, **kwargs)`, each array created on the devices that will hold it; a
    `PiecedArray` if its rows lie on several stages.

    The result must be the step's state argument, or a tuple of several of its arguments in their
    order.

    Args:
        fn: the step.
        inputs: names, shapes and roles of its inputs.
        places: shardings of each input, by path: one for each of its pieces.
        compared_with: the plan, if several processes run it: they compare it, the function, its
            arguments and their settings first.
        traced: the step as the plan was made for it, if that is known: it may say why plans differ.

    Raises:
        PlanMismatchError: the processes differ, or the result does not match the step's arguments;
            names every path that differs.
        CaptureError: the function returns something that neither is an array nor stays the same.
    """
    given, tree = tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = [leaf for _, leaf in given]
    dynamic = [position for position, leaf in enumerate(leaves) if _is_array(leaf)]
    kept: dict[str, Any] = {}

    def run(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for position, array in zip(dynamic, arrays, strict=True):
            filled[position] = array
        positional, keywords = tree_unflatten(tree, filled)
        # The result's structure is known only once the function was traced.
        results, kept["tree"] = tree_flatten(init_fn(*positional, **keywords))
        kept["statics"], made = {}, []
        for k, leaf in enumerate(results):
            if _is_array(leaf) or type(leaf) in (int, float):
                made.append(leaf)
            else:
                kept["statics"][k] = leaf
        return made

    arrays = [leaves[position] for position in dynamic]
    if jax.sharding.get_abstract_mesh().empty:
        make = run
    else:
        # It may name axes of the caller's mesh; captured, it needs no mesh.
        graph = capture(lambda _, *dynamic: run(*dynamic), _NOTHING, *arrays)

        def make(*dynamic: Any) -> list[Any]:
            return evaluate(graph, [_NOTHING, *dynamic])

    with plain_context():
        if compared_with is not None:
            arguments: dict[str, Any] = {}
            statics: dict[str, Any] = {}
            for path, leaf in given:
                kind = arguments if _is_array(leaf) else statics
                kind[f"argument {keystr(path[1:])} of step.init"] = leaf
            agree_on_init(compared_with, jax.make_jaxpr(make)(*arrays), arguments, statics, traced)
        shapes = jax.eval_shape(make, *arrays)
        wanted = _places(fn, inputs, places, kept, shapes)
        return _create(make, arrays, shapes, kept, wanted)


def _create(
    run: Callable[..., list[Any]],
    arrays: Sequence[Any],
    shapes: Sequence[Any],
    kept: Mapping[str, Any],
    wanted: Sequence[Sequence[Rows]],
) -> Any:
    """The user's result, each array created where it is wanted."""
    stacks = _stacks(run, arrays, wanted)
    arrays_made: dict[tuple[int, Rows], Any] = {}
    # One program for each mesh, so that no array crosses between meshes.
    by_mesh: dict[Any, list[tuple[int, Rows]]] = {}
    for k, place in enumerate(wanted):
        for rows in place:
            by_mesh.setdefault(rows.sharding.mesh, []).append((k, rows))
    for mesh, on_mesh in by_mesh.items():
        if not mesh.local_devices:
            # Other processes make these arrays; stubs without data stand in for them here.
            for k, rows in on_mesh:
                struct = jax.eval_shape(rows.of, shapes[k])
                arrays_made[k, rows] = stub(struct.shape, rows.sharding, struct.dtype)
            continue

        def part(*dynamic: Any, on_mesh: Sequence[tuple[int, Rows]] = on_mesh) -> list[Any]:
            # All results are traced for every mesh; the compiler removes what those on this mesh do
            # not need.
            results, pieces = run(*dynamic), _pieces(stacks, dynamic)
            made = []
            for k, rows in on_mesh:
                made.append(results[k] if rows.stop is None else pieces[k, rows.start])
            return made

        whole = NamedSharding(mesh, PartitionSpec())
        replicated = list(arrays)
        if whole.is_fully_addressable:
            replicated = [jax.device_put(array, whole) for array in arrays]
        created = jax.jit(part, out_shardings=[rows.sharding for _, rows in on_mesh])(*replicated)
        arrays_made |= zip(on_mesh, created, strict=True)
    results = []
    for k, place in enumerate(wanted):
        results.append(joined([arrays_made[k, rows] for rows in place], place))
    return _rebuild(kept, results)


_Stacks: TypeAlias = Sequence[tuple[Sequence[int], SplitGraph]]


def _stacks(
    run: Callable[..., list[Any]], arrays: Sequence[Any], wanted: Sequence[Sequence[Rows]]
) -> _Stacks:
    """Graphs that make the stacked arrays of the result, cut so that each stage makes only its own
    rows.

    There is one entry for all arrays that are cut at the same rows: their positions in the result,
    and the graph that makes them.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for k, place in enumerate(wanted):
        stops = [rows.stop for rows in place if rows.stop is not None]
        if stops:
            alike.setdefault((0, *stops), []).append(k)
    stacks = []
    for bounds, positions in alike.items():

        def stacked(_: Any, *dynamic: Any, positions: Sequence[int] = positions) -> list[Any]:
            results = run(*dynamic)
            return [results[k] for k in positions]

        # A function without arguments cannot be captured.
        graph = capture(stacked, _NOTHING, *arrays)
        stacks.append((positions, split_rows(graph, bounds, range(len(positions)))))
    return stacks


def _pieces(stacks: _Stacks, arrays: Sequence[Any]) -> dict[tuple[int, int], Any]:
    """The pieces of stacked results, by position in the result and first row."""
    rows_made = {}
    for positions, split in stacks:
        results = evaluate(split.graph, split.cut([_NOTHING, *arrays]))
        for k, pieces in zip(positions, split.split.outputs, strict=True):
            for piece in pieces:
                rows_made[k, piece.start] = results[piece.position]
    return rows_made


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _rebuild(kept: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
    leaves = list(arrays)
    for position, static in sorted(kept["statics"].items()):
        leaves.insert(position, static)
    return tree_unflatten(kept["tree"], leaves)


def _places(
    fn: Callable[..., Any],
    arrays: Sequence[ArrayInterface],
    places: Mapping[str, Sequence[Rows]],
    kept: Mapping[str, Any],
    shapes: Sequence[Any],
) -> list[Sequence[Rows]]:
    """Shardings of each array of the result. The result is flattened as arguments of the step,
    which gives its arrays the paths by which `places` knows them.
    """
    result = _rebuild(kept, shapes)
    flat = state_call(fn, arrays, result)
    call, given = flat.call, flat.calling.names
    inputs = {i.path: i for i in arrays if argument_of(i.path) in given}
    problems = []
    rows_of: dict[int, Sequence[Rows]] = {}
    # In the order of the step's parameters, which is that of the messages.
    made = zip(call.paths, call.leaves, strict=True)
    for path, leaf in sorted(made, key=lambda pair: given.index(argument_of(pair[0]))):
        if path not in inputs:
            problems.append(f"{path} is made, but the step takes no such array")
            continue
        wanted = inputs.pop(path)
        if (tuple(leaf.shape), str(leaf.dtype)) != (wanted.shape, wanted.dtype):
            described = f"{leaf.dtype}{list(leaf.shape)}"
            problems.append(
                f"{path} is made as {described}, the step takes {wanted.dtype}{list(wanted.shape)}"
            )
        # Matched by identity, because an array's path in the result differs from that in the step.
        rows_of[id(leaf)] = places[path]
    missing = sorted(inputs, key=lambda path: given.index(argument_of(path)))
    problems += [f"{path} is missing" for path in missing]
    if problems:
        names = state_arguments(fn, arrays)
        misplaced = misplaced_state(fn, arrays, result)
        wanted_names = ", ".join(names if misplaced else given)
        if misplaced:
            advice = f"Return ({wanted_names}), the order of the step's parameters."
        elif len(names) > 1:
            advice = f"Return exactly what the step takes as ({', '.join(names)})."
        else:
            advice = "Return exactly what the step takes there."
        raise PlanMismatchError(
            misplaced or problems,
            asked=f"what the function given to init returns is not the step's {wanted_names}",
            advice=advice,
        )
    lost = [leaf for leaf in shapes if id(leaf) not in rows_of]
    if lost:
        raise CaptureError(
            f"{len(lost)} arrays of what the function given to init returns cannot be found"
            " again among the step's arguments. Make the state without init and pass it to the"
            " step."
        )
    return [rows_of[id(leaf)] for leaf in shapes]

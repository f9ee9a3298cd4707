"""Training step + example arguments -> Graph. Nothing runs, nothing is allocated: arguments may be shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core import CaptureError
from . import _jax_compat as compat
from ._calling import Calling, calling_of
from ._inline import Inliner
from ._phases import assign_phases, assign_roles
from ._types import Graph, Input, Op, Operand, Output, Phase, Role, Value


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Trace a training step, as it is, into a `Graph`.

    Args:
        fn: the step: plain, jitted, or one that changes Flax NNX objects in place. Its own errors come through unwrapped.
        *args, **kwargs: example arguments; arrays or `jax.ShapeDtypeStruct`s. What is no array (a Python number, a
            function) is static: part of the plan.

    Raises:
        CaptureError: `fn` is no function, takes no arrays, or returns something that is no array.
    """
    calling = calling_of(fn, args, kwargs)
    if not calling.call.leaves:
        raise CaptureError(
            f"{getattr(fn, '__name__', 'The step')} was given no arrays. Pass example arguments (arrays or "
            "jax.ShapeDtypeStruct) after the function: capture(train_step, state, batch)."
        )
    return build_graph(calling, calling.call.leaves)


def build_graph(calling: Calling, leaves: Sequence[Any]) -> Graph:
    """Trace the step of a calling convention on other leaves (such as a smaller batch) of the same structure."""
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    closed = compat.trace(lambda *flat: calling.run(flat), structs)
    inliner = Inliner()
    input_values = [inliner.new_value(v.aval) for v in closed.jaxpr.invars]
    body = inliner.block(closed.jaxpr, closed.consts, input_values, "", 1)
    values = tuple(inliner.values)
    ops = assign_phases(inliner.ops, len(values))
    outputs = tuple(Output(path=p, value=v) for p, v in zip(calling.out_paths, body.outputs, strict=True))
    trains = any(op.phase is Phase.BACKWARD for op in ops)
    successors = _match_state(calling, values, input_values, outputs, trains)
    inputs = [
        Input(path=path, value=value, role=Role.OTHER, output=successors.get(path))
        for path, value in zip(calling.call.paths, input_values, strict=True)
    ]
    batch = _batch_paths(calling, values, inputs, trains)
    return Graph(
        name=getattr(calling.fn, "__name__", type(calling.fn).__name__),
        values=values,
        ops=ops,
        body=body,
        inputs=assign_roles(ops, values, inputs, outputs, batch),
        constants=inliner.constants,
        outputs=outputs,
        calling=calling,
    )


def _argument_of(path: str, names: Sequence[str]) -> str:
    """The argument that a path stands in."""
    fitting = [n for n in names if path == n or path.startswith((f"{n}.", f"{n}["))]
    return max(fitting, key=len) if fitting else path


def _match_state(
    calling: Calling,
    values: Sequence[Value],
    input_values: Sequence[int],
    outputs: Sequence[Output],
    trains: bool,
) -> dict[str, int]:
    """For each input path its successor's position among the outputs.

    An argument is state when some part of the result has its structure, shapes and dtypes; the state of NNX objects is
    known by name. A lone array is matched only to the output at the same place, and only in a step that trains: an
    evaluation may well return something that looks like its input.
    """
    matched: dict[str, int] = {}
    for position in range(calling.num_results, len(outputs)):
        matched[outputs[position].path] = position

    def kind(operand: Operand) -> tuple[Any, ...]:
        return (values[operand].shape, values[operand].dtype) if isinstance(operand, int) else (operand.shape, operand.dtype)

    arguments: dict[str, list[tuple[str, int]]] = {}
    for path, value in zip(calling.call.paths, input_values, strict=True):
        name = _argument_of(path, calling.names)
        if name not in calling.modules:
            arguments.setdefault(name, []).append((path, value))
    parts: dict[str, list[int]] = {"": list(range(calling.num_results))}
    for position in range(calling.num_results):
        parts.setdefault(_first_key(outputs[position].path), []).append(position)
    taken: set[int] = set()
    for place, (name, leaves) in enumerate(arguments.items()):
        wanted = [(path.removeprefix(name), kind(value)) for path, value in leaves]
        for prefix, positions in parts.items():
            found = [(outputs[p].path.removeprefix(prefix), kind(outputs[p].value)) for p in positions]
            if found != wanted or taken & set(positions):
                continue
            key_array = all(k[1].startswith("key<") for _, k in wanted)
            if len(wanted) == 1 and not key_array and not (trains and _place(parts, prefix) == place):
                continue
            taken |= set(positions)
            matched.update({path: p for (path, _), p in zip(leaves, positions, strict=True)})
            break
    return matched


def _place(parts: dict[str, list[int]], prefix: str) -> int:
    """At which place of the result a part stands; the whole result stands at place 0."""
    return 0 if prefix == "" else list(parts).index(prefix) - (1 if "" in parts else 0)


def _first_key(path: str) -> str:
    """The first key of a path: `[0]` of `[0].params.w`, `.loss` of `.loss`."""
    for k in range(1, len(path)):
        if path[k] in ".[":
            return path[:k]
    return path


def _batch_paths(calling: Calling, values: Sequence[Value], inputs: Sequence[Input], trains: bool) -> set[str]:
    """Paths of what each step gets anew: arguments without a successor whose arrays share their leading dim.

    Where nothing is trained, the first argument holds the parameters and the others are the batch.
    """
    groups: dict[str, list[Input]] = {}
    for item in inputs:
        groups.setdefault(_argument_of(item.path, calling.names), []).append(item)
    fresh = [name for name, items in groups.items() if all(i.output is None for i in items)]
    if not trains and len(groups) > 1:
        first = next(iter(groups))
        fresh = [name for name in fresh if name != first]
    batch: set[str] = set()
    for name in fresh:
        sizes = {values[i.value].shape[0] for i in groups[name] if values[i.value].shape}
        if len(sizes) == 1:
            batch.update(i.path for i in groups[name])
    return batch

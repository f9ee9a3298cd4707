"""Training step + example arguments -> Graph. Nothing runs, nothing is allocated: arguments may be
shapes.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..core import CaptureError
from . import _jax_compat as compat
from ._calling import Calling, calling_of
from ._inline import Inliner
from ._matching import match_state
from ._phases import assign_phases
from ._roles import assign_roles, batch_paths, reach_of
from ._types import Graph, Input, Op, Output, Phase, Role, Value

# Traces of a step that are spent on finding which of its numbers must be static.
_MOST_TRIALS = 8
# Counts of elements up to here are exact in float64, in which costs and solvers count.
_MOST_ELEMENTS = 2**53


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Trace a training step, as it is, into a `Graph`.

    Python numbers inside an argument's pytree (such as the step counter of a fresh Flax
    `TrainState`) are traced as `jax.jit` does, unless a jitted step declares them static or the
    step needs their values; those, the settings of Equinox modules and everything else that is no
    array (a function, a flag) are static: part of the plan.

    Args:
        fn: the step: plain, jitted, or one that changes Flax NNX objects in place. Its errors come
            through unwrapped.
        *args, **kwargs: example arguments; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        CaptureError: `fn` is no function, takes no arrays, or returns something that is no array;
            or has arrays that no machine holds.
    """
    calling = calling_of(fn, args, kwargs)
    if not calling.call.leaves:
        raise CaptureError(
            f"{getattr(fn, '__name__', 'The step')} was given no arrays. Pass example arguments"
            " (arrays or jax.ShapeDtypeStruct) after the function: capture(train_step, state,"
            " batch)."
        )
    numbers = calling.call.numbers
    if not numbers:
        return build_graph(calling, calling.call.leaves)
    try:
        return build_graph(calling, calling.call.leaves)
    except CaptureError:
        raise
    except Exception:
        # Some number is a loop's length or a branch's condition after all; if not, the same error
        # comes again.
        calling = calling_of(fn, args, kwargs, static_numbers=frozenset(numbers))
        graph = build_graph(calling, calling.call.leaves)
    return _with_fewest_static(fn, args, kwargs, numbers, graph)


def _with_fewest_static(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    numbers: Sequence[str],
    graph: Graph,
) -> Graph:
    """The graph of a step that needs the values of some numbers, in which as few as possible are
    static.

    A number that is static by mistake would refuse the array that takes its place: a count of
    steps, say. Each trial is a trace, so of many numbers all stay static.
    """
    static = frozenset(numbers)
    if not 1 < len(numbers) <= _MOST_TRIALS:
        return graph
    for path in numbers:
        calling = calling_of(fn, args, kwargs, static_numbers=static - {path})
        try:
            graph = build_graph(calling, calling.call.leaves)
        except Exception:
            continue
        static -= {path}
    return graph


def build_graph(calling: Calling, leaves: Sequence[Any]) -> Graph:
    """Trace the step of a calling convention on other leaves (such as a smaller batch) of the same
    structure.
    """
    with _collector_paused():
        return _trace_to_graph(calling, leaves)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    # A trace makes a million objects that all stay: looking for garbage among them takes a quarter
    # of the time.
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _require_sizes(values: Sequence[Value]) -> None:
    """Refuse arrays that no machine holds."""
    largest = max(values, key=lambda value: math.prod(value.shape), default=None)
    if largest is not None and math.prod(largest.shape) > _MOST_ELEMENTS:
        raise CaptureError(
            f"the step has an array {largest.dtype}[{', '.join(map(str, largest.shape))}], of"
            f" {math.prod(largest.shape):.1e} elements, and can have {_MOST_ELEMENTS:.1e} at most."
            " Make the model or the batch smaller."
        )


def _trace_to_graph(calling: Calling, leaves: Sequence[Any]) -> Graph:
    # `run` notes the structure of the results in the calling convention: each trace has its own.
    calling = replace(calling)
    structs = [compat.shape_struct(leaf) for leaf in leaves]
    try:
        closed = compat.trace(lambda *flat: calling.run(flat), structs)
    except NameError as error:
        if "unbound axis name" in str(error):
            error.add_note(
                "A plan is made from the step that one device would run on the whole batch. Take"
                " out collectives over devices, such as `jax.lax.pmean(grads, axis)`: the plan puts"
                " in what its splits need."
            )
        raise
    inliner = Inliner()
    input_values = [inliner.new_value(v.aval) for v in closed.jaxpr.invars]
    body = inliner.block(closed.jaxpr, closed.consts, input_values, "", 1)
    values = tuple(inliner.values)
    _require_sizes(values)
    drafts = inliner.drafts
    phases = assign_phases(drafts, len(values), inliner.decided)
    ops = tuple(
        [
            Op(
                index=index,
                name=draft.name,
                inputs=draft.inputs,
                outputs=draft.outputs,
                params=draft.params,
                phase=phase,
                scope=draft.scope,
                trips=draft.trips,
                eqn=draft.eqn,
                region=draft.region,
            )
            for index, (draft, phase) in enumerate(zip(drafts, phases, strict=True))
        ]
    )
    outputs = tuple(
        [Output(path=p, value=v) for p, v in zip(calling.out_paths, body.outputs, strict=True)]
    )
    return Graph(
        name=getattr(calling.fn, "__name__", type(calling.fn).__name__),
        values=values,
        ops=ops,
        body=body,
        inputs=_inputs(calling, values, ops, input_values, outputs),
        constants=inliner.constants,
        outputs=outputs,
        calling=calling,
    )


def _inputs(
    calling: Calling,
    values: Sequence[Value],
    ops: Sequence[Op],
    input_values: Sequence[int],
    outputs: Sequence[Output],
) -> tuple[Input, ...]:
    """The step's inputs with their roles, and for state the output that replaces it."""
    reach = reach_of(ops, values)
    trains = any(op.phase is Phase.BACKWARD for op in ops)
    call = calling.call
    # Behind the step's results stand the arrays of NNX objects that it changed in place, under the
    # paths of their inputs. Arrays of other arguments are matched with results by how they are
    # used.
    state = {outputs[k].path: k for k in range(calling.num_results, len(outputs))}
    successors = {k: state[path] for k, path in enumerate(call.paths) if path in state}
    plain = [k for k, parts in enumerate(call.parts) if parts[0] not in calling.modules]
    matched = match_state(
        ops,
        values,
        [(call.parts[k], input_values[k]) for k in plain],
        list(zip(calling.out_parts, outputs[: calling.num_results], strict=True)),
        reach,
        trains,
    )
    successors.update({plain[k]: position for k, position in matched.items()})
    inputs = [
        Input(path=path, value=value, role=Role.OTHER, output=successors.get(k))
        for k, (path, value) in enumerate(zip(call.paths, input_values, strict=True))
    ]
    batch = batch_paths(
        calling.names, [parts[0] for parts in call.parts], values, inputs, reach, trains
    )
    return assign_roles(reach, values, inputs, outputs, batch)

"""Tracing of a training step into a `Graph`.

Nothing runs and nothing is allocated: example arguments may be `jax.ShapeDtypeStruct`s.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import structs

from ..core import AliquotError, CaptureError
from . import _jax_compat as compat
from ._calling import Calling, calling_of
from ._evaluate import evaluate
from ._inline import Inliner
from ._matching import match_state
from ._memory import refuse_work_on_host
from ._phases import Draft, assign_phases
from ._recompute_layers import recomputing
from ._roles import assign_roles, batch_paths, reach_of
from ._types import (
    NO_VALUE,
    Block,
    Call,
    Graph,
    Input,
    Literal,
    Op,
    Operand,
    OpId,
    Output,
    Phase,
    Recomputation,
    Role,
    Value,
    ValueId,
    value_ids,
)

# The most traces of a step that are spent on finding which of its numbers must be static.
_MOST_TRIALS = 8
# Objects, texts and dates, which NumPy keeps in arrays and JAX does not.
_KINDS_OF_NUMPY_ALONE = frozenset("OUSMm")
_MOST_LISTED = 6
# Counts of elements up to here are exact in float64, in which costs and solvers count.
_MOST_ELEMENTS = 2**53


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Trace a training step, as it is, into a `Graph`.

    Arrays are traced. So are Python numbers inside an argument's pytree (such as the step counter
    of a fresh Flax `TrainState`), as by `jax.jit`, with two exceptions: a jitted step declares them
    static, or the step needs their values. These numbers and everything that is no array (a
    function, a flag, the settings of an Equinox module) are static: the plan holds only for these
    values.

    Arguments, or parts of them, that the result has in the same form are state. Of the others, the
    batch is that whose arrays have equally many rows; arrays whose rows products contract or
    lookups choose from, such as frozen weights in an argument of their own, are parameters.

    Args:
        fn: the step: plain, jitted, or one that changes Flax NNX objects in place. Its errors come
            through unwrapped, with a note that says which arguments it was given.
        *args, **kwargs: example arguments; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        CaptureError: `fn` is no function, takes no arrays, returns something that is no array,
            makes an array of more than 2**53 elements; an example argument has no shape of whole
            numbers, or no dtype of JAX.
    """
    calling = calling_of(fn, args, kwargs)
    if not calling.call.leaves:
        raise CaptureError(
            f"{getattr(fn, '__name__', 'The step')} was given no arrays. Pass example arguments"
            " (arrays or jax.ShapeDtypeStruct) after the function: capture(train_step, state,"
            " batch)."
        )
    _refuse_malformed_arrays(calling)
    try:
        graph = _trace_with_numbers(calling, fn, args, kwargs)
    except AliquotError:
        raise
    except Exception as error:
        error.add_note(f"aliquot traced {_name(calling)} with {_examples(calling)}.")
        raise
    # A graph lives in caches, and the arrays of an example are the caller's to free.
    call = graph.calling.call
    graph.calling.call = replace(call, leaves=tuple(map(compat.shape_struct, call.leaves)))
    return graph


def _trace_with_numbers(
    calling: Calling, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Graph:
    """The graph, with as few numbers static as the step needs the values of.

    A number made static without need would break later calls: the step counter, for example, is a
    Python number at first and an array after one step, and a plan refuses other values of static
    arguments. Each number costs one more trace, so if there are many, all of them stay static.
    """
    numbers = calling.call.numbers
    if not numbers:
        return build_graph(calling, calling.call.leaves)
    try:
        return build_graph(calling, calling.call.leaves)
    except CaptureError:
        raise
    except Exception:
        # The step may need the value of a number, as the length of a loop or the condition of a
        # branch. If it fails for another reason, this second trace raises the same error.
        calling = calling_of(fn, args, kwargs, static_numbers=frozenset(numbers))
        graph = build_graph(calling, calling.call.leaves)
    static = frozenset(numbers)
    for path in numbers if 1 < len(numbers) <= _MOST_TRIALS else ():
        # Trace one more number; if that fails, the step needs its value, and it stays static.
        calling = calling_of(fn, args, kwargs, static_numbers=static - {path})
        try:
            graph = build_graph(calling, calling.call.leaves)
        except Exception:
            continue
        static -= {path}
    return graph


def _refuse_malformed_arrays(calling: Calling) -> None:
    """Raise `CaptureError` for examples that no array can look like, which JAX would refuse without
    their names; all at once.
    """
    faults = []
    for path, leaf in zip(calling.call.paths, calling.call.leaves, strict=True):
        sizes = tuple(leaf.shape)
        if not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
            faults.append(f"{path} has the shape {sizes}; sizes are whole numbers from 0")
        if getattr(leaf.dtype, "kind", "") in _KINDS_OF_NUMPY_ALONE:
            faults.append(f"{path} has the dtype {leaf.dtype}, which JAX does not have")
    if faults:
        raise CaptureError(
            f"{_name(calling)} cannot be traced with these example arguments:"
            + "".join(f"\n  - {fault}" for fault in faults[:_MOST_LISTED])
            + (f"\n  - and {n} more" if (n := len(faults) - _MOST_LISTED) > 0 else "")
            + "\nA plan is made for the shapes and dtypes that the step will run with. Pass arrays,"
            " or shapes such as jax.ShapeDtypeStruct((16, 65), jnp.float32)."
        )


def _name(calling: Calling) -> str:
    return getattr(calling.fn, "__name__", type(calling.fn).__name__)


def _examples(calling: Calling) -> str:
    """The last example arguments, mostly the batch, as they were understood."""
    call = calling.call
    arrays = []
    for path, leaf in zip(call.paths, call.leaves, strict=True):
        arrays.append(f"{path} {leaf.dtype}[{', '.join(map(str, leaf.shape))}]")
    others = []
    for path, (_, value) in zip(call.static_paths, call.statics, strict=True):
        others.append(f"{path}, a {type(value).__name__} and no array")
    return "; ".join([*arrays[-_MOST_LISTED:], *others[-_MOST_LISTED:]])


def build_graph(calling: Calling, leaves: Sequence[Any]) -> Graph:
    """Trace the step for the given leaves, such as those of a smaller batch.

    Args:
        calling: the step and the structure of its arguments.
        leaves: arrays or shapes, one for each traced leaf of the arguments.
    """
    with _garbage_collection_paused():
        # `calling.run` writes the structure of the results into `calling`; with a copy, traces do
        # not overwrite each other's.
        calling = replace(calling)
        shapes = list(map(compat.shape_struct, leaves))
        try:
            closed = compat.trace(lambda *flat: calling.run(flat), shapes)
        except NameError as error:
            if "unbound axis name" in str(error):
                error.add_note(
                    "A plan is made from the step that one device would run on the whole batch."
                    " Take out collectives over devices, such as `jax.lax.pmean(grads, axis)`: the"
                    " plan puts in what its splits need."
                )
            raise
        traced = _Traced.of(closed)
        values, ops, body = traced.values, traced.ops, traced.body
        refuse_work_on_host(ops, values)
        outputs = tuple(
            [Output(path=p, value=v) for p, v in zip(calling.out_paths, body.outputs, strict=True)]
        )
        return Graph(
            name=_name(calling),
            values=values,
            ops=ops,
            body=body,
            inputs=_inputs(calling, values, ops, traced.inputs, outputs),
            constants=traced.constants,
            outputs=outputs,
            calling=calling,
        )


def with_recomputation(graph: Graph, name: str, *, like: Graph | None = None) -> Graph:
    """A step whose layers recompute in the backward pass what `name`, one of `RECOMPUTE`, says.

    It computes the same numbers. Traced on another batch, it recomputes likewise.

    Args:
        like: this step on another batch, which recomputes already: the same layers are chosen.
    """
    if name == "none":
        return graph
    known = like.calling.recompute if like is not None else None
    loose, how = recomputing(graph, name, known.places if known is not None else None)
    with _garbage_collection_paused():
        if all(_is_plain_region(call) for call in loose.body.items if isinstance(call, Call)):
            traced, how = _numbered(loose, how)
        else:
            how = replace(how, op_origins=(), value_origins=())
            shapes = []
            for item, leaf in zip(loose.inputs, graph.calling.call.leaves, strict=True):
                shapes.append(compat.shape_struct(leaf, loose.values[item.value].shape))
            traced = _Traced.of(compat.trace(lambda *arrays: evaluate(loose, arrays), shapes))
        fresh: dict[str, Any] = {"traces": {}, "own_traces": {}, "cut_state": None}
        inputs = zip(loose.inputs, traced.inputs, strict=True)
        outputs = zip(loose.outputs, traced.body.outputs, strict=True)
        return replace(
            loose,
            values=traced.values,
            ops=traced.ops,
            body=traced.body,
            inputs=tuple([replace(old, value=value) for old, value in inputs]),
            constants=traced.constants,
            outputs=tuple([replace(old, value=value) for old, value in outputs]),
            calling=replace(graph.calling, recompute=how, as_written=graph, **fresh),
        )


def _is_plain_region(call: Call) -> bool:
    return call.kind == "remat" and not any(isinstance(i, Call) for i in call.blocks[0].items)


def _numbered(loose: Graph, how: Recomputation) -> tuple[_Traced, Recomputation]:
    """What a trace of a step in loose form gives, without tracing it; and how the step recomputes,
    with the origins of the trace's operators and values.

    Args:
        loose: of operators, and of regions that hold nothing but operators.
        how: with the origins of the operators and values in `loose`.
    """
    sequence: list[tuple[Op, int, str]] = []
    from_regions = set[ValueId]()
    regions = 0
    for item in loose.body.items:
        if isinstance(item, Call):
            regions += 1
            from_regions.update(item.outputs)
            outer = str(item.eqn.source_info.name_stack)
            for inner in item.blocks[0].items:
                op = loose.ops[cast(OpId, inner)]
                # As JAX names an operator in a region: by the innermost call around it alone.
                own = str(op.eqn.source_info.name_stack)
                sequence.append((op, regions, f"{outer}/{own}" if outer and own else outer or own))
        else:
            sequence.append((loose.ops[item], 0, loose.ops[item].scope))
    reads = [op.inputs for op, _, _ in sequence]
    returned = loose.output_values
    is_read = set(value_ids(itertools.chain(returned, *reads)))
    numbers: dict[ValueId, Operand] = {}
    values: list[Value] = []
    origins: list[ValueId] = []

    def number(old: ValueId) -> ValueId:
        known = loose.values[old]
        new = numbers[old] = ValueId(len(values))
        values.append(known if known.index == new else structs.replace(known, index=new))
        origins.append(how.value_origins[old])
        return new

    def read(operands: Iterable[Operand]) -> tuple[Operand, ...]:
        return tuple([i if type(i) is Literal else numbers[i] for i in operands])

    given = list(map(number, loose.input_values))
    ops: list[OpId] = []
    constants = {number(v): loose.constants[v] for v in loose.constants if v in is_read}
    drafts: list[Draft] = []
    places: list[OpId | None] = []
    for op, region, scope in sequence:
        inputs = read(op.inputs)
        if op.name == "convert_element_type" and type(inputs[0]) is Literal:
            (out,) = op.outputs
            if out not in from_regions:
                # JAX folds it.
                dtype, literal = loose.values[out].dtype, inputs[0]
                value = np.asarray(literal.value).astype(jnp.dtype(dtype))[()]
                numbers[out] = structs.replace(literal, value=value, dtype=dtype)
                places.append(None)
                continue
        outputs = tuple([NO_VALUE if o < 0 else number(o) for o in op.outputs])
        places.append(OpId(len(drafts)))
        drafts.append(Draft(op.name, inputs, outputs, op.params, scope, 1, op.eqn, region))
        ops.append(how.op_origins[op.index])
    place = iter(places)
    items: list[OpId | Call] = []
    for item in loose.body.items:
        if isinstance(item, Call):
            (block,) = item.blocks
            inside = tuple([k for k in itertools.islice(place, len(block.items)) if k is not None])
            taken, results = read(block.inputs), read(block.outputs)
            body = Block(inputs=taken, items=inside, outputs=results)
            made = cast("tuple[ValueId, ...]", results)
            items.append(replace(item, blocks=(body,), inputs=taken, outputs=made))
        elif (k := next(place)) is not None:
            items.append(k)
    traced = _Traced(
        values=tuple(values),
        ops=_in_phases(drafts, len(values), {}),
        body=Block(inputs=tuple(given), items=tuple(items), outputs=read(returned)),
        inputs=given,
        constants=constants,
    )
    return traced, replace(how, op_origins=tuple(ops), value_origins=tuple(origins))


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    # A trace makes a million objects, none of which is garbage yet; looking for garbage among them
    # takes a quarter of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a graph that are read from a jaxpr; `inputs` are the values that it takes."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    body: Block
    inputs: Sequence[ValueId]
    constants: Mapping[ValueId, Any]

    @classmethod
    def of(cls, closed: Any) -> _Traced:
        inliner = Inliner()
        inputs = [inliner.new_value(v.aval) for v in closed.jaxpr.invars]
        body = inliner.block(closed.jaxpr, closed.consts, inputs, "", 1)
        values = tuple(inliner.values)
        largest = max(values, key=lambda value: math.prod(value.shape), default=None)
        if largest is not None and math.prod(largest.shape) > _MOST_ELEMENTS:
            raise CaptureError(
                f"the step has an array {largest.dtype}[{', '.join(map(str, largest.shape))}], of"
                f" {math.prod(largest.shape):.1e} elements, and can have {_MOST_ELEMENTS:.1e} at"
                " most. Make the model or the batch smaller."
            )
        drafts = inliner.drafts
        ops = _in_phases(drafts, len(values), inliner.decided)
        return cls(values=values, ops=ops, body=body, inputs=inputs, constants=inliner.constants)


def _in_phases(
    drafts: Sequence[Draft], num_values: int, decided: Mapping[ValueId, Sequence[ValueId]]
) -> tuple[Op, ...]:
    """The operators, each with its phase."""
    phases = assign_phases(drafts, num_values, decided)
    ops = []
    for index, (draft, phase) in enumerate(zip(drafts, phases, strict=True)):
        op = Op(
            index=OpId(index),
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
        ops.append(op)
    return tuple(ops)


def _inputs(
    calling: Calling,
    values: Sequence[Value],
    ops: Sequence[Op],
    input_values: Sequence[ValueId],
    outputs: Sequence[Output],
) -> tuple[Input, ...]:
    """The step's inputs, each with its role and, if it is state, the output that replaces it."""
    reach = reach_of(ops, values)
    trains = any(op.phase is Phase.BACKWARD for op in ops)
    call = calling.call
    # Two kinds of state. Arrays of NNX objects that the step changes in place are appended to its
    # outputs under the paths of their inputs, so the path says which output replaces which input.
    # Arrays of all other arguments are matched with the step's results by how they are used.
    in_place = {outputs[k].path: k for k in range(calling.num_results, len(outputs))}
    successors = {k: in_place[path] for k, path in enumerate(call.paths) if path in in_place}
    others = [k for k, parts in enumerate(call.parts) if parts[0] not in calling.modules]
    matched = match_state(
        ops,
        values,
        [(call.parts[k], input_values[k]) for k in others],
        list(zip(calling.out_parts, outputs[: calling.num_results], strict=True)),
        reach,
        trains,
    )
    successors.update({others[k]: position for k, position in matched.items()})
    inputs = []
    for k, (path, value) in enumerate(zip(call.paths, input_values, strict=True)):
        inputs.append(Input(path=path, value=value, role=Role.OTHER, output=successors.get(k)))
    batch = batch_paths(
        calling.names, [parts[0] for parts in call.parts], ops, values, inputs, reach, trains
    )
    return assign_roles(reach, ops, values, inputs, outputs, batch)

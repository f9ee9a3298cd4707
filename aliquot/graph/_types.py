"""The captured training step as plain data: values, operators, and the blocks that contain them.

`Graph.ops` is the flat view that rules and planners read: the operators inside scan, while, cond
and remat bodies are listed in line, and *link* operators say how a body's values are related to
outer ones. `Graph.body` is the nested view of the same operators, which the runtime replays.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, TypeAlias, final

import msgspec

ValueId = NewType("ValueId", int)
"""Position of an array in `Graph.values`."""

NO_VALUE = ValueId(-1)
"""In place of a value: a result that has no name because nothing reads it."""

OpId = NewType("OpId", int)
"""Position of an operator in `Graph.ops`."""

StageId = NewType("StageId", int)
"""Number of a stage of a pipeline, in the order in which a micro-batch passes through them."""


class Role(enum.StrEnum):
    """Role of an input of the step in training."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    STATE = "state"
    BATCH = "batch"
    OTHER = "other"


class Memory(enum.StrEnum):
    """Memory in which an array lies: a device's own, or that of its host, from which devices copy.

    The values are the names that plan files use.
    """

    DEVICE = "device"
    HOST = "host"


class Phase(enum.IntEnum):
    """Part of a training step to which an operator belongs.

    The prologue depends on neither forward nor backward operators (masks, position tables, key
    folding), but may feed them.
    """

    PROLOGUE = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One array of the step.

    `dtype` is NumPy's name of the type. Random keys (`key<...>`) and the zeros that JAX makes of
    gradients of integers (`float0`) have types of JAX's own, which cannot be made from the name:
    `jax_dtype`.
    """

    index: ValueId
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    memory: Memory = Memory.DEVICE
    jax_dtype: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole, unsplit array."""
        return math.prod(self.shape) * self.itemsize


@final
class Literal(msgspec.Struct, frozen=True, kw_only=True):
    """A constant scalar written into the trace."""

    value: Any
    shape: tuple[int, ...]
    dtype: str
    memory: Memory = Memory.DEVICE


Operand: TypeAlias = ValueId | Literal
"""The index of a value, or a literal."""


def value_ids(operands: Iterable[Operand]) -> list[ValueId]:
    """The values among operands or results: neither literals nor `NO_VALUE`."""
    return [i for i in operands if type(i) is not Literal and i >= 0]


def result_shapes(op: Op, values: Sequence[Value]) -> list[tuple[int, ...]]:
    """Shapes of an operator's results, also of those that nothing reads."""
    shapes = []
    for k, out in enumerate(op.outputs):
        shapes.append(values[out].shape if out >= 0 else tuple(op.eqn.outvars[k].aval.shape))
    return shapes


class Op(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One operator.

    Attributes:
        index: position in `Graph.ops`.
        name: name of the JAX primitive, or of a link (`scan_slice`, `scan_stack`, `tie`).
        inputs: operands in order.
        outputs: value indices in order; `NO_VALUE` for a result that nothing names.
        params: the primitive's parameters.
        phase: see `Phase`.
        scope: name stack of the user's code, outermost first, joined by "/".
        trips: how often it runs in a step (product of the lengths of the scans around it).
        eqn: JAX's equation, from which it is run again; None for links.
        region: innermost remat region it stands in, 0 for none.
        deferrable: in a stage of a pipeline: whether it can be deferred to the update, because no
            other stage needs its results before; see `deferrable_items`.
    """

    index: OpId
    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[ValueId, ...]
    params: Mapping[str, Any]
    phase: Phase
    scope: str
    trips: int
    eqn: Any
    region: int
    deferrable: bool = False

    @property
    def is_link(self) -> bool:
        """True if the operator computes nothing and only relates a body's values to outer ones."""
        return self.eqn is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A sequence of operators and calls with named inputs and outputs: the step itself, or a body
    inside it.
    """

    inputs: tuple[Operand, ...]
    items: tuple[OpId | Call, ...]
    outputs: tuple[Operand, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A structured operator (remat, scan, while or cond) with its bodies.

    Attributes:
        kind: "remat", "scan", "while" or "cond".
        eqn: JAX's equation.
        blocks: one body; condition and body for a while; one block for each branch of a cond.
        inputs: operands in JAX's order.
        outputs: results in JAX's order.
    """

    kind: str
    eqn: Any
    blocks: tuple[Block, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An array that the step takes.

    Attributes:
        path: its place in the arguments, such as `state.params.layers[3].attn.q`.
        value: index of its value.
        role: see `Role`.
        output: position in `Graph.outputs` of its successor (the new parameter of a parameter), or
            None.
        copies: how often memory holds as many bytes: more than once for state that is cut with the
            batch and lies there whole.
    """

    path: str
    value: ValueId
    role: Role
    output: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An array that the step returns; `value` is its value, or a literal."""

    path: str
    value: Operand


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Rows `[start, stop)` of an input or output, at `position` in the split graph; all of it if
    `stop` is None.
    """

    position: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Record of how a graph was made from another by cutting its scans over layers into ranges.

    Attributes:
        original: the graph before it was cut.
        bounds: where the ranges begin, and where the last one ends.
        inputs: for each input of the original its pieces, in order.
        outputs: for each output of the original its pieces, in order.
        passes: through the layers, side by side: each range runs so many scans.
    """

    original: Graph
    bounds: tuple[int, ...]
    inputs: tuple[tuple[Piece, ...], ...]
    outputs: tuple[tuple[Piece, ...], ...]
    passes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """How the layers of a step recompute.

    Attributes:
        name: one of `graph.RECOMPUTE`.
        places: layers that are written out, as ranges of the step's items, the same on a batch of
            any size; none for scans.
        op_origins, value_origins: for each operator and each value of the step, the one of the step
            as it was written that it repeats or is; empty for scans.
    """

    name: str
    places: tuple[tuple[int, int], ...] = ()
    op_origins: tuple[OpId, ...] = field(default=(), repr=False)
    value_origins: tuple[ValueId, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A captured step. See the module's description for its two views.

    Attributes:
        name: name of the user's function.
        values: all arrays, by index.
        ops: all operators in program order, bodies in line.
        body: the same operators as nested blocks.
        inputs: arrays that the caller passes, in the order of the flat call.
        constants: arrays that the step's closure holds, by value index.
        outputs: arrays that it returns, in flat order.
        calling: the calling convention: how arguments become `inputs`, and `outputs` the user's
            result. A split graph has that of the original.
        split: how it was made from another graph, if it was.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    body: Block
    inputs: tuple[Input, ...]
    constants: Mapping[ValueId, Any]
    outputs: tuple[Output, ...]
    calling: Any = field(repr=False)
    split: Split | None = field(default=None, repr=False)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The size of the first dim of each array of the batch; scalars have none."""
        shapes = [self.values[i.value].shape for i in self.inputs if i.role is Role.BATCH]
        return tuple([shape[0] for shape in shapes if shape])

    @property
    def input_values(self) -> tuple[ValueId, ...]:
        """The value of each input, in order."""
        return tuple([item.value for item in self.inputs])

    @property
    def output_values(self) -> tuple[Operand, ...]:
        """The value, or the literal, of each output, in order."""
        return tuple([output.value for output in self.outputs])

    def inputs_of(self, *roles: Role) -> set[ValueId]:
        """The values of the inputs of some roles."""
        return {item.value for item in self.inputs if item.role in roles}

    @property
    def returned(self) -> set[ValueId]:
        """The values that the step returns."""
        return set(value_ids(self.output_values))

    @functools.cached_property
    def makers(self) -> Mapping[ValueId, Op]:
        """The operator that makes each value; inputs and constants have none."""
        makers: dict[ValueId, Op] = {}
        for op in self.ops:
            makers.update(dict.fromkeys(op.outputs, op))
        return makers

    @functools.cached_property
    def links(self) -> Mapping[ValueId, Op]:
        """The link operator that makes each value that one makes."""
        return {value: op for value, op in self.makers.items() if op.is_link}

    @functools.cached_property
    def looped(self) -> frozenset[ValueId]:
        """Values over whose leading dim a loop runs."""
        sliced = itertools.chain(*(op.inputs for op in self.ops if op.name == "scan_slice"))
        return frozenset(value for value in sliced if isinstance(value, int))

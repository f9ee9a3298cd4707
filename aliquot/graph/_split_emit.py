"""Writes a graph again with stacked arrays in pieces: local operators once for each range, scans
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from . import _jax_compat as compat
from ._split_equations import Equations, joint, with_rows
from ._split_reach import is_split, opens
from ._split_rows import Local, local_rule
from ._split_values import Pieces, index_of
from ._types import Block, Call, Graph, Literal, Op, Operand

Items: TypeAlias = list["int | Call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Body into which operators are written.

    Attributes:
        items: the list that they join.
        trips, of: how many rounds of the loops around them are left of how many.
        region: remat region.
        in_loop: whether this is a loop's body, which sees stacked arrays as a whole.
    """

    items: Items
    trips: int = 1
    of: int = 1
    region: int = 0
    in_loop: bool = False

    def body(self, region: int) -> _Place:
        """A body that runs once for each time that the place itself does."""
        return replace(self, items=[], region=region)

    def loop(self, trips: int, of: int) -> _Place:
        """A loop's body."""
        return replace(self, items=[], trips=self.trips * trips, of=self.of * of, in_loop=True)


@dataclass(slots=True, kw_only=True)
class Emitter:
    """Operators of the new graph.

    Attributes:
        arrays: its values.
        ops: its operators so far.
        joined: operators of the old graph that need pieces put together.
        recut: operators of the old graph whose result is cut after they made it whole.
    """

    arrays: Pieces
    ops: list[Op] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    recut: set[int] = field(default_factory=set)
    _joints: set[int] = field(default_factory=set)
    _links: dict[int, Op] = field(default_factory=dict)
    _equations: Equations = field(default_factory=Equations)
    _regions: int = 0

    def __post_init__(self) -> None:
        self._links = {out: op for op in self.graph.ops if op.is_link for out in op.outputs}

    @property
    def graph(self) -> Graph:
        """The graph as it was."""
        return self.arrays.graph

    def run(self) -> Block:
        """Write the whole step; returns its nested view."""
        inputs = [v for item in self.graph.inputs for v in self.arrays.declare(item.value)]
        place = _Place(items=[])
        self._walk(self.graph.body, place)
        outputs = [v for output in self.graph.outputs for v in self.arrays.parts(output.value)]
        return Block(inputs=tuple(inputs), items=tuple(place.items), outputs=tuple(outputs))

    # ---- values ----------------------------------------------------------------------------------

    def _parts(self, operand: Operand, place: _Place) -> tuple[Operand, ...]:
        return (self.arrays.known(operand),) if place.in_loop else self.arrays.parts(operand)

    def _read(self, operand: Operand, place: _Place, like: Op, eqn: Any, aval: Any) -> Operand:
        """The whole of any operand, put together where it only comes in pieces."""
        arrays = self.arrays
        if arrays.needs_join(operand):
            old = index_of(operand)
            whole = arrays.new(old)
            avals = [with_rows(aval, stop - start) for start, stop in arrays.ranges]
            joined_eqn = joint(eqn, "concatenate", avals, aval, {"dimension": 0})
            self._op(like, place, joined_eqn, arrays.parts(old), (whole,))
            arrays.whole_here[old] = whole
            self._joints.add(whole)
        known = arrays.known(operand)
        if isinstance(known, int) and known in self._joints:
            self.joined.add(like.index)
        return known

    def _define(self, old: int, whole: int, place: _Place, like: Op, eqn: Any, aval: Any) -> None:
        """Say what a value of the old graph is now, and cut it if it must come in pieces."""
        if old not in self.arrays.stacked:
            self.arrays.whole[old] = whole
            return
        self.arrays.whole_here[old] = whole
        self.recut.add(like.index)
        rank = len(aval.shape)
        for piece, (start, stop) in zip(self.arrays.declare(old), self.arrays.ranges, strict=True):
            starts, limits = (start, *(0,) * (rank - 1)), (stop, *aval.shape[1:])
            params = {"start_indices": starts, "limit_indices": limits, "strides": None}
            slice_eqn = joint(eqn, "slice", [aval], with_rows(aval, stop - start), params)
            self._op(like, place, slice_eqn, (whole,), (piece,))

    # ---- operators -------------------------------------------------------------------------------

    def _op(
        self,
        like: Op,
        place: _Place,
        eqn: Any,
        inputs: Sequence[Operand],
        outputs: Sequence[int],
        name: str = "",
    ) -> None:
        """An operator that runs `eqn`, or a link; all else is as in `like`."""
        if eqn is not None:
            place.items.append(len(self.ops))
        self.ops.append(
            Op(
                index=len(self.ops),
                name=name or eqn.primitive.name,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                params=eqn.params if eqn is not None else {},
                phase=like.phase,
                scope=like.scope,
                trips=like.trips * place.trips // place.of,
                eqn=eqn,
                region=place.region,
            )
        )

    def _link(self, old: int, place: _Place, inputs: Sequence[Operand], output: int) -> None:
        """The link that makes `old`, on other operands."""
        like = self._links[old]
        self._op(like, place, None, inputs, (output,), like.name)

    def _walk(self, block: Block, place: _Place) -> None:
        calls: Mapping[str, Callable[[Call, _Place], None]] = {
            "remat": self._remat,
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }
        for item in block.items:
            if isinstance(item, Call):
                calls[item.kind](item, place)
            else:
                self._one(self.graph.ops[item], place)

    def _one(self, op: Op, place: _Place) -> None:
        rule = None
        if not place.in_loop and any(
            v in self.arrays.stacked for v in (*op.inputs, *op.outputs) if isinstance(v, int)
        ):
            rule = local_rule(op, self.graph.values, self.arrays.rows)
        if rule is not None and self._in_pieces(op, rule):
            self._local(op, rule, place)
            return
        avals = [v.aval for v in op.eqn.invars]
        inputs = [
            self._read(i, place, op, op.eqn, a) for i, a in zip(op.inputs, avals, strict=True)
        ]
        outputs = [self.arrays.new(o) if o >= 0 else -1 for o in op.outputs]
        self._op(op, place, op.eqn, inputs, outputs)
        self._define_all(op.outputs, outputs, place, op, op.eqn)

    def _define_all(
        self, old: Sequence[int], new: Sequence[int], place: _Place, like: Op, eqn: Any
    ) -> None:
        for before, after, var in zip(old, new, eqn.outvars, strict=True):
            if before >= 0:
                self._define(before, after, place, like, eqn, var.aval)

    def _in_pieces(self, op: Op, rule: Local) -> bool:
        both = [
            *zip(op.inputs, rule.operands, strict=True),
            *zip(op.outputs, rule.results, strict=True),
        ]
        return any(
            has_rows and v in self.arrays.stacked for v, has_rows in both if isinstance(v, int)
        )

    def _local(self, op: Op, rule: Local, place: _Place) -> None:
        """An operator once for each range."""
        shared = [
            None if has_rows else self._read(i, place, op, op.eqn, v.aval)
            for i, has_rows, v in zip(op.inputs, rule.operands, op.eqn.invars, strict=True)
        ]
        if not rule.join:
            for old in op.outputs:
                if old >= 0:
                    self.arrays.declare(old)
        partial = []
        for k, (start, stop) in enumerate(self.arrays.ranges):
            inputs = [
                self.arrays.parts(i)[k] if i_shared is None else i_shared
                for i, i_shared in zip(op.inputs, shared)
            ]
            if not rule.join:
                outputs = [index_of(self.arrays.parts(o)[k]) if o >= 0 else -1 for o in op.outputs]
            else:
                partial.append(self.arrays.new(op.outputs[0]))
                outputs = partial[-1:]
            eqn = self._equations.on_rows(op.eqn, rule, stop - start)
            if rule.counts_rows and start:
                self._count_from(start, op, eqn, outputs[0], place)
            else:
                self._op(op, place, eqn, inputs, outputs)
        if rule.join:
            self._combine(op, rule.join, partial, place)

    def _count_from(self, start: int, op: Op, eqn: Any, output: int, place: _Place) -> None:
        """Row numbers of a range that does not begin at zero."""
        local = self.arrays.new(op.outputs[0], self.arrays.values[output].shape[0])
        aval = eqn.outvars[0].aval
        dtype = np.dtype(aval.dtype)
        first = Literal(value=np.asarray(start, dtype)[()], shape=(), dtype=str(dtype))
        self._op(op, place, eqn, (), (local,))
        self._op(
            op,
            place,
            joint(eqn, "add", [aval, aval.update(shape=())], aval, {}),
            (local, first),
            (output,),
        )

    def _combine(self, op: Op, name: str, partial: Sequence[int], place: _Place) -> None:
        """Join the ranges' results."""
        aval = op.eqn.outvars[0].aval
        total = partial[0]
        for other in partial[1:]:
            result = self.arrays.new(op.outputs[0])
            self._op(
                op, place, joint(op.eqn, name, [aval, aval], aval, {}), (total, other), (result,)
            )
            total = result
        self._define(op.outputs[0], total, place, op, op.eqn, aval)

    # ---- loops -----------------------------------------------------------------------------------

    def _like(self, call: Call) -> Op:
        """The link that stands for a loop where an operator is asked for."""
        return self._links[
            next(v for v in (*call.outputs, *call.blocks[-1].inputs) if v in self._links)
        ]

    def _read_all(
        self, call: Call, operands: Sequence[Operand], first: int, place: _Place
    ) -> list[Operand]:
        """Operands of a loop, from its operand `first` on, as a whole."""
        avals = [v.aval for v in call.eqn.invars[first : first + len(operands)]]
        like = self._like(call)
        return [
            self._read(i, place, like, call.eqn, a) for i, a in zip(operands, avals, strict=True)
        ]

    def _scan(self, call: Call, place: _Place) -> None:
        params = call.eqn.params
        num_consts, num_carry = compat.scan_counts(params)
        first = num_consts + num_carry
        consts = self._read_all(call, call.inputs[:num_consts], 0, place)
        carry = self._read_all(call, call.inputs[num_consts:first], num_consts, place)
        if place.in_loop or not is_split(call, self.arrays.stacked, self.arrays.rows):
            slices = self._read_all(call, call.inputs[first:], first, place)
            results = self._scan_once(call, call.eqn, [*consts, *carry, *slices], None, place)
            self._define_all(call.outputs, results, place, self._like(call), call.eqn)
            return
        for old in call.outputs[num_carry:]:
            self.arrays.declare(old)
        numbered = list(enumerate(self.arrays.ranges))
        for k, (start, stop) in reversed(numbered) if params["reverse"] else numbered:
            slices = [self.arrays.parts(v)[k] for v in call.inputs[first:]]
            eqn = self._equations.scan_on_rows(call.eqn, stop - start)
            carry = list(
                self._scan_once(call, eqn, [*consts, *carry, *slices], k, place)[:num_carry]
            )
        ends = zip(call.outputs[:num_carry], carry, call.eqn.outvars[:num_carry], strict=True)
        for old, last, var in ends:
            assert isinstance(last, int)
            self._define(old, last, place, self._like(call), call.eqn, var.aval)

    def _scan_once(
        self, call: Call, eqn: Any, operands: Sequence[Operand], piece: int | None, place: _Place
    ) -> list[int]:
        """One loop: the whole of it, or the piece of that number, whose stacked results are
        declared.
        """
        params = eqn.params
        num_consts, num_carry = compat.scan_counts(params)
        (block,) = call.blocks
        body = place.loop(params["length"], call.eqn.params["length"])
        inner = self.arrays.declare_whole(block.inputs[num_consts:])
        for k, new in enumerate(inner):
            where = place if k < num_carry else body
            self._link(
                index_of(block.inputs[num_consts + k]), where, (operands[num_consts + k],), new
            )
        self._walk(block, body)
        ends = [self.arrays.known(v) for v in block.outputs]
        results = []
        for k, old in enumerate(call.outputs):
            stacks = k >= num_carry
            results.append(
                index_of(self.arrays.parts(old)[piece])
                if stacks and piece is not None
                else self.arrays.new(old)
            )
            self._link(
                old,
                body if stacks else place,
                (ends[k],) if stacks else (ends[k], inner[k]),
                results[-1],
            )
        whole = Block(
            inputs=(*operands[:num_consts], *inner), items=tuple(body.items), outputs=tuple(ends)
        )
        place.items.append(
            Call(
                kind="scan",
                eqn=eqn,
                blocks=(whole,),
                inputs=tuple(operands),
                outputs=tuple(results),
            )
        )
        return results

    def _while(self, call: Call, place: _Place) -> None:
        params = call.eqn.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        operands = self._read_all(call, call.inputs, 0, place)
        condition, block = call.blocks
        carried = self.arrays.declare_whole(block.inputs[num_body:])
        for old, start, new in zip(
            block.inputs[num_body:], operands[num_cond + num_body :], carried, strict=True
        ):
            self._link(index_of(old), place, (start,), new)
        blocks = []
        for body, consts in (
            (condition, operands[:num_cond]),
            (block, operands[num_cond : num_cond + num_body]),
        ):
            blocks.append(self._loop_body(body, (*consts, *carried), place))
        results = [self.arrays.new(old) for old in call.outputs]
        for old, last, inner, new in zip(
            call.outputs, blocks[1].outputs, carried, results, strict=True
        ):
            self._link(old, place, (last, inner), new)
        place.items.append(
            Call(
                kind="while",
                eqn=call.eqn,
                blocks=tuple(blocks),
                inputs=tuple(operands),
                outputs=tuple(results),
            )
        )
        self._define_all(call.outputs, results, place, self._like(call), call.eqn)

    def _loop_body(self, block: Block, inputs: Sequence[Operand], place: _Place) -> Block:
        """A body that sees every array as a whole."""
        body = place.loop(1, 1)
        self._walk(block, body)
        outputs = tuple([self.arrays.known(v) for v in block.outputs])
        return Block(inputs=tuple(inputs), items=tuple(body.items), outputs=outputs)

    # ---- remat regions and branches --------------------------------------------------------------

    def _body(self, block: Block, place: _Place) -> Block:
        """A body that sees the pieces themselves, unless a loop stands around it."""
        around = self.arrays.whole_here
        if not place.in_loop:
            self.arrays.whole_here = {}
        inputs = [part for operand in block.inputs for part in self._parts(operand, place)]
        self._walk(block, place)
        outputs = [part for operand in block.outputs for part in self._parts(operand, place)]
        self.arrays.whole_here = around
        return Block(inputs=tuple(inputs), items=tuple(place.items), outputs=tuple(outputs))

    def _remat(self, call: Call, place: _Place) -> None:
        self._regions += 1
        region = place.body(self._regions)
        (block,) = call.blocks
        body = self._body(block, region)
        results: list[int] = []
        for old, inner in zip(call.outputs, block.outputs, strict=True):
            parts = self._parts(inner, place)
            if old < 0:
                results += [-1] * len(parts)
            elif old == inner:
                results += [index_of(part) for part in parts]
            else:
                fresh = self.arrays.declare(old)
                for part, new in zip(parts, fresh, strict=True):
                    self._link(old, region, (part,), new)
                results += fresh
        place.items.append(
            Call(
                kind="remat",
                eqn=call.eqn,
                blocks=(body,),
                inputs=body.inputs,
                outputs=tuple(results),
            )
        )

    def _cond(self, call: Call, place: _Place) -> None:
        if not opens(call):
            self._platform_branches(call, place)
            return
        (which,) = self._read_all(call, call.inputs[:1], 0, place)
        blocks = [self._body(block, place.body(place.region)) for block in call.blocks]
        results: list[int] = []
        for old in call.outputs:
            for new in self.arrays.declare(old):
                self._link(old, place, [block.outputs[len(results)] for block in blocks], new)
                results.append(new)
        inputs = (which, *blocks[0].inputs)
        place.items.append(
            Call(
                kind="cond",
                eqn=call.eqn,
                blocks=tuple(blocks),
                inputs=inputs,
                outputs=tuple(results),
            )
        )

    def _platform_branches(self, call: Call, place: _Place) -> None:
        operands = self._read_all(call, call.inputs, 0, place)
        blocks = []
        for block in call.blocks:
            blocks.append(self._loop_body(block, operands[1:], place))
        results = [self.arrays.new(old) for old in call.outputs]
        for k, (old, new) in enumerate(zip(call.outputs, results, strict=True)):
            self._link(old, place, [block.outputs[k] for block in blocks], new)
        place.items.append(
            Call(
                kind="cond",
                eqn=call.eqn,
                blocks=tuple(blocks),
                inputs=tuple(operands),
                outputs=tuple(results),
            )
        )
        self._define_all(call.outputs, results, place, self._like(call), call.eqn)

"""Conversion of a jaxpr to values, operators and blocks: calls that do not matter to sharding are
inlined, structured ones become blocks.

Remat bodies share the indices of the values around them, so that rules see through them. The bodies
of scan, while and cond have their own values, and link operators say how these are related to the
outer ones:

* `scan_slice(xs) -> x`: `x` is `xs` without its leading dim; `scan_stack(y) -> ys` the reverse.
* `tie(a, b, ...) -> c`: all have one shape and must be split alike (a loop's carry, the results of
  a cond's branches).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from . import _jax_compat as compat
from ._checks import opened_branches
from ._phases import Draft
from ._types import NO_VALUE, Block, Call, Literal, Memory, Operand, OpId, Value, ValueId, value_ids


class _Place(NamedTuple):
    """Place of an equation: the body to which its operators are added, and what is around it.

    Attributes:
        scope: name stack of the calls around the body.
        trips: how often the body runs in a step.
        region: innermost remat region around it, 0 for none.
        items: operators and calls of the body so far.
    """

    scope: str
    trips: int
    region: int
    items: list[OpId | Call]


@dataclass(slots=True)
class Inliner:
    """Collects values and operators while it walks a jaxpr. `_phases` sets phases afterwards."""

    values: list[Value] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    constants: dict[ValueId, Any] = field(default_factory=dict)
    # For each condition that decides when a loop ends, the results of the loop.
    decided: dict[ValueId, tuple[ValueId, ...]] = field(default_factory=dict)
    _known_constants: dict[int, ValueId] = field(default_factory=dict)
    _scopes: dict[tuple[str, int], tuple[Any, str]] = field(default_factory=dict)
    _dtypes: dict[Any, tuple[str, int]] = field(default_factory=dict)
    _regions: int = 0

    def new_value(self, aval: Any) -> ValueId:
        shape, dtype, itemsize = self._shape_dtype(aval)
        index = ValueId(len(self.values))
        memory = Memory.HOST if compat.is_on_host(aval) else Memory.DEVICE
        self.values.append(
            Value(
                index=index,
                shape=shape,
                dtype=dtype,
                itemsize=itemsize,
                memory=memory,
                jax_dtype=aval.dtype if dtype == "float0" or dtype.startswith("key<") else None,
            )
        )
        return index

    def _shape_dtype(self, aval: Any) -> tuple[tuple[int, ...], str, int]:
        # Cached by dtype, because formatting its name takes longer than everything else here.
        kind = getattr(aval, "dtype", None)
        known = self._dtypes.get(kind)
        if known is None:
            shape, name, itemsize = compat.shape_dtype(aval)
            if kind is not None:
                self._dtypes[kind] = name, itemsize
            return shape, name, itemsize
        return tuple(aval.shape), *known

    def block(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Operand], scope: str, trips: int
    ) -> Block:
        """Walk a body whose `invars` are the given operands; returns its nested view."""
        return self._block(jaxpr, consts, inputs, _Place(scope, trips, 0, []))

    def _block(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Operand], place: _Place
    ) -> Block:
        place = place._replace(items=[])
        outputs = self._walk(jaxpr, consts, inputs, place)
        return Block(inputs=tuple(inputs), items=tuple(place.items), outputs=outputs)

    def _walk(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Operand], place: _Place
    ) -> tuple[Operand, ...]:
        """Add the operators and calls of a jaxpr to a place; returns its results."""
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._constant(var.aval, const)

        def read(atoms: Iterable[Any]) -> tuple[Operand, ...]:
            return tuple([self._literal(a) if compat.is_literal(a) else env[a] for a in atoms])

        results: tuple[Operand, ...] | None
        for eqn in jaxpr.eqns:
            operands = read(eqn.invars)
            inner = place._replace(scope=self._scope(place.scope, eqn))
            called = compat.inlined_body(eqn)
            if called is not None:
                body, body_consts, given = called
                taken = [operands[k] for k in given]
                results = self._walk(body, body_consts, taken, inner)
            elif eqn.primitive.name == "device_put":
                results = tuple(
                    # Without a change of memory it only states on which devices an array lies.
                    self._op(moved, (operand,), inner)[0] if moved else operand
                    for moved, operand in zip(compat.memory_moves(eqn), operands, strict=True)
                )
            elif compat.is_placement(eqn) or eqn.primitive.name == "name":
                # Placements are ignored: the plan decides where arrays lie, and the step may have
                # been written for other devices. Names have served: `jax.checkpoint` reads them
                # when the step is differentiated, which has happened.
                results = operands
            else:
                results = self._structured(eqn, operands, inner)
                if results is None:
                    results = self._op(eqn, operands, inner)
            env.update(zip(eqn.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _op(self, eqn: Any, operands: tuple[Operand, ...], place: _Place) -> tuple[ValueId, ...]:
        outputs = tuple(
            [NO_VALUE if compat.is_dropped(v) else self.new_value(v.aval) for v in eqn.outvars]
        )
        place.items.append(OpId(len(self.drafts)))
        name, (scope, trips, region, _) = eqn.primitive.name, place
        self.drafts.append(Draft(name, operands, outputs, eqn.params, scope, trips, eqn, region))
        return outputs

    def _link(
        self, name: str, inputs: Iterable[Operand], outputs: tuple[ValueId, ...], place: _Place
    ) -> None:
        scope, trips, region, _ = place
        self.drafts.append(Draft(name, tuple(inputs), outputs, {}, scope, trips, None, region))

    def _literal(self, atom: Any) -> Literal:
        shape, dtype, _ = self._shape_dtype(atom.aval)
        # JAX wraps some constants in an array type of its own, which cannot be hashed.
        value = np.asarray(atom.val)[()] if hasattr(atom.val, "dtype") else atom.val
        return Literal(value=value, shape=shape, dtype=dtype)

    def _constant(self, aval: Any, const: Any) -> ValueId:
        # One array may be a constant of many bodies.
        known = self._known_constants.get(id(const))
        if known is None:
            known = self._known_constants[id(const)] = self.new_value(aval)
            self.constants[known] = const
        return known

    def _scope(self, outer: str, eqn: Any) -> str:
        """The full name stack of an equation inside a call; JAX records only the part inside the
        call.
        """
        stack = eqn.source_info.name_stack
        # Formatting a stack is slow, and neighbours share theirs.
        known = self._scopes.get((outer, id(stack)))
        if known is None or known[0] is not stack:
            inner = str(stack)
            known = (stack, f"{outer}/{inner}" if outer and inner else outer or inner)
            self._scopes[outer, id(stack)] = known
        return known[1]

    def _structured(
        self, eqn: Any, operands: tuple[Operand, ...], place: _Place
    ) -> tuple[Operand, ...] | None:
        if compat.is_remat(eqn):
            return self._remat(eqn, operands, place)
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, operands, place)
            case "while":
                return self._while(eqn, operands, place)
            case "cond":
                return self._cond(eqn, operands, place)
        return None

    def _remat(self, eqn: Any, operands: tuple[Operand, ...], place: _Place) -> tuple[Operand, ...]:
        body, consts = compat.open_body(eqn.params["jaxpr"])
        self._regions += 1
        inside = place._replace(region=self._regions)
        block = self._block(body, consts, operands, inside)
        # If a body returns an operand or a literal unchanged, the call gets a new value for that
        # result.
        taken = set(value_ids(block.inputs)) | self.constants.keys()
        fresh: list[ValueId] = []
        for var, inner in zip(eqn.outvars, block.outputs, strict=True):
            if compat.is_dropped(var):
                fresh.append(NO_VALUE)
            elif isinstance(inner, Literal) or inner in taken:
                fresh.append(self.new_value(var.aval))
                self._link("tie", (inner,), (fresh[-1],), inside)
            else:
                taken.add(inner)
                fresh.append(inner)
        place.items.append(
            Call(kind="remat", eqn=eqn, blocks=(block,), inputs=operands, outputs=tuple(fresh))
        )
        return tuple(fresh)

    def _scan(self, eqn: Any, operands: tuple[Operand, ...], place: _Place) -> tuple[Operand, ...]:
        p = eqn.params
        (num_consts, num_carry), length = compat.scan_counts(p), p["length"]
        body, consts = compat.open_body(p["jaxpr"])
        inside = place._replace(trips=place.trips * length)
        init = operands[num_consts : num_consts + num_carry]
        carry_in = []
        for v in body.invars[num_consts : num_consts + num_carry]:
            carry_in.append(self.new_value(v.aval))
        slices = [self.new_value(v.aval) for v in body.invars[num_consts + num_carry :]]
        for start, inner in zip(init, carry_in, strict=True):
            self._link("tie", (start,), (inner,), place)
        for outer, inner in zip(operands[num_consts + num_carry :], slices, strict=True):
            self._link("scan_slice", (outer,), (inner,), inside)
        inner_inputs = (*operands[:num_consts], *carry_in, *slices)
        block = self._block(body, consts, inner_inputs, inside)
        results = tuple(self.new_value(v.aval) for v in eqn.outvars)
        for k in range(num_carry):
            self._link("tie", (block.outputs[k], carry_in[k]), (results[k],), place)
        for k in range(num_carry, len(results)):
            self._link("scan_stack", (block.outputs[k],), (results[k],), inside)
        place.items.append(
            Call(kind="scan", eqn=eqn, blocks=(block,), inputs=operands, outputs=results)
        )
        return results

    def _while(self, eqn: Any, operands: tuple[Operand, ...], place: _Place) -> tuple[Operand, ...]:
        p = eqn.params
        num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
        cond, cond_consts = compat.open_body(p["cond_jaxpr"])
        body, body_consts = compat.open_body(p["body_jaxpr"])
        init = operands[num_cond + num_body :]
        carry_in = [self.new_value(v.aval) for v in body.invars[num_body:]]
        for start, inner in zip(init, carry_in, strict=True):
            self._link("tie", (start,), (inner,), place)
        # The number of turns is unknown: the bodies count as run once.
        cond_block = self._block(cond, cond_consts, (*operands[:num_cond], *carry_in), place)
        body_inputs = (*operands[num_cond : num_cond + num_body], *carry_in)
        body_block = self._block(body, body_consts, body_inputs, place)
        results = tuple(self.new_value(v.aval) for v in eqn.outvars)
        for ends in cond_block.outputs:
            if isinstance(ends, int):
                self.decided[ends] = results
        for last, inner, result in zip(body_block.outputs, carry_in, results, strict=True):
            self._link("tie", (last, inner), (result,), place)
        place.items.append(
            Call(
                kind="while",
                eqn=eqn,
                blocks=(cond_block, body_block),
                inputs=operands,
                outputs=results,
            )
        )
        return results

    def _cond(self, eqn: Any, operands: tuple[Operand, ...], place: _Place) -> tuple[Operand, ...]:
        blocks = []
        for body, consts in opened_branches(eqn):
            blocks.append(self._block(body, consts, operands[1:], place))
        results = tuple(self.new_value(v.aval) for v in eqn.outvars)
        for k, result in enumerate(results):
            self._link("tie", [b.outputs[k] for b in blocks], (result,), place)
        place.items.append(
            Call(kind="cond", eqn=eqn, blocks=tuple(blocks), inputs=operands, outputs=results)
        )
        return results

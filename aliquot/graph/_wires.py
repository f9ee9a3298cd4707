"""How values go into and out of the bodies of structured operators: scans, whiles, branches and
remat regions.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from . import _jax_compat as compat
from ._types import Call, Operand, ValueId

Wire: TypeAlias = tuple[Operand, Operand]
"""A value, and what it is called behind the border of a body."""


class Carry(NamedTuple):
    """A value that each turn of a loop hands to the next.

    Attributes:
        start: what the loop begins with, around it.
        inner: what a turn gets.
        end: what a turn hands on.
        result: what the loop returns.
    """

    start: Operand
    inner: Operand
    end: Operand
    result: ValueId


class Wires(NamedTuple):
    """The borders of a call's bodies.

    Attributes:
        constants: what enters and is the same in each turn; all that enters a region or branches.
        carries: of a loop.
        slices: stacks that enter a scan, and the row of each that a turn gets.
        results: what leaves a region or branches; of a scan the rows, with the stacks made of them;
            of a while its carries, which it returns unchanged if it takes no turn.
    """

    constants: tuple[Wire, ...]
    carries: tuple[Carry, ...] = ()
    slices: tuple[Wire, ...] = ()
    results: tuple[tuple[Operand, ValueId], ...] = ()

    @property
    def enters(self) -> tuple[Wire, ...]:
        """From around the call into its bodies."""
        return *self.constants, *((c.start, c.inner) for c in self.carries), *self.slices

    @property
    def turns(self) -> tuple[Wire, ...]:
        """From one turn into the next."""
        return tuple([(c.end, c.inner) for c in self.carries])

    @property
    def leaves(self) -> tuple[tuple[Operand, ValueId], ...]:
        """From the bodies to the results of the call."""
        return *((c.end, c.result) for c in self.carries), *self.results


def wires_of(call: Call) -> Wires:
    """The wires of a call. The body of a while and its condition share the names of its carries."""
    params, outer, results = call.eqn.params, call.inputs, call.outputs
    if call.kind not in ("scan", "while"):
        given = outer[call.kind == "cond" :]
        into, out = list[Wire](), list[tuple[Operand, ValueId]]()
        for block in call.blocks:
            into += zip(given, block.inputs, strict=True)
            out += zip(block.outputs, results, strict=True)
        return Wires(tuple(into), results=tuple(out))
    block = call.blocks[-1]
    if call.kind == "while":
        before, first = params["cond_nconsts"], params["body_nconsts"]
        inner = block.inputs[first:]
        of_condition = zip(outer[:before], call.blocks[0].inputs, strict=False)
        constants = (*of_condition, *zip(outer[before:], block.inputs[:first], strict=False))
        carries = map(Carry, outer[before + first :], inner, block.outputs, results)
        unchanged = tuple(zip(inner, results, strict=True))
        return Wires(constants, carries=tuple(carries), results=unchanged)
    first, count = compat.scan_counts(params)
    starts, inner, turn = outer[first:], block.inputs[first:], block.outputs
    return Wires(
        tuple(zip(outer[:first], block.inputs[:first], strict=True)),
        carries=tuple(map(Carry, starts[:count], inner, turn, results)),
        slices=tuple(zip(starts[count:], inner[count:], strict=True)),
        results=tuple(zip(turn[count:], results[count:], strict=True)),
    )

"""Arrays in host memory: devices copy them, but compute in their own memory only."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import CaptureError, listing
from ._rule import traits_of
from ._source import source_line
from ._traits import Moves
from ._types import Memory, Op, Value

# Besides links and operators that move whole elements, these pass on what lies in host memory.
_PASS_ON = frozenset({"dynamic_update_slice", "name", "optimization_barrier"})
_COMPUTES = (None, Moves.CAST, Moves.NEGATE)


def refuse_work_on_host(ops: Sequence[Op], values: Sequence[Value]) -> None:
    """Raise `CaptureError` for operators that compute on arrays in host memory; lists all."""
    faults = []
    for op in ops:
        traits = traits_of(op.name)
        on_host = [values[o] for o in op.outputs if o >= 0 and values[o].memory is Memory.HOST]
        moved = traits.changes_memory or traits.moves not in _COMPUTES or op.name in _PASS_ON
        if on_host and not op.is_link and not moved:
            array = f"{on_host[0].dtype}[{', '.join(map(str, on_host[0].shape))}]"
            faults.append(f"`{op.name}` makes {array} at {source_line(op) or 'an unknown line'}")
    if faults:
        raise CaptureError(
            listing(
                "the step computes on arrays in host memory, and devices compute on their own"
                " memory only",
                list(dict.fromkeys(faults)),
                "Move the operands first: jax.device_put(x, jax.memory.Space.Device), and the"
                " result back with jax.memory.Space.Host.",
            )
        )

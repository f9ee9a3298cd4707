"""Names of the spaces that bounds hold for."""

from __future__ import annotations

from ..core import counted
from ._base import Decision

_ONE_PROGRAM_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": " that split all repeated layers the same way",
    "gap_within_blocks": " that split each product by some option of its ParallelBlock",
    "gap_within_neighbourhood": " with choices near the solutions of coarser meshes",
}


def one_program_scope(decision: Decision) -> str:
    """Words for the plans among which the lower bound of one program holds: never pipelines, even
    if these were searched, too.
    """
    if not decision.bound_holds_for:
        return ""
    parts = counted(decision.num_micro_batches, "micro-batch")
    shown = f"plans without a pipeline in {parts}"
    return shown + _ONE_PROGRAM_SCOPES.get(
        decision.bound_holds_for, f", {decision.bound_holds_for}"
    )

"""When is 1F1B that runs twice as far ahead the fastest schedule?

Simulates equal stages (a forward pass takes 1, the gradient of the input 1, those of the weights 1)
on 2, 4 and 8 submeshes, with as many micro-batches as stages and 4 and 16 times as many, and
transfers of 0 to 1 that overlap with tasks or not, under every schedule for training.

    python benchmarks/overlap_friendly.py [--quick] [--hardware NAME]
"""

import itertools
import sys
from typing import Any

import numpy as np
from _results import Report, options

from aliquot.cost import PipelineTimes, StageCosts, simulate
from aliquot.plans import SCHEDULES, make_schedule, training_schedules

_OURS, _RIVALS = "1f1b-overlap-friendly", ("1f1b", "zero-bubble", "interleaved-1f1b")
_CHUNKS = 2
_TRANSFERS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def main() -> int:
    """Run, and write what came out."""
    chosen = options(__doc__)
    report = Report(
        name="overlap_friendly",
        question="When is 1F1B that runs twice as far ahead the fastest schedule?",
        bar="none: the answer decides whether it is searched by default",
        method=(
            "Simulated, in units of a forward pass. Interleaved stages have two chunks of half the"
            " work. Memory is the most micro-batches that a submesh keeps."
        ),
    )
    rows: list[dict[str, Any]] = []
    few = chosen.quick
    for overlaps, stages, times, transfer in itertools.product(
        (True, False), (2, 4) if few else (2, 4, 8), (1, 4, 16), _TRANSFERS
    ):
        found = {
            name: _simulated(name, stages, times * stages, transfer, overlaps)
            for name in training_schedules()
        }
        rival = min(_RIVALS, key=lambda name: found[name].step_time_s)
        rows.append(
            {
                "transfers overlap": overlaps,
                "stages": stages,
                "micro-batches": times * stages,
                "transfer": transfer,
                "fastest other": rival,
                "its step": found[rival].step_time_s,
                "this step": found[_OURS].step_time_s,
                "this / other": found[_OURS].step_time_s / found[rival].step_time_s,
                "memory, other": float(found[rival].peak_bytes.max()),
                "memory, this": float(found[_OURS].peak_bytes.max()),
            }
        )
    report.tables["Steps"] = rows
    better = [row for row in rows if row["this / other"] < 1 - 1e-9]
    report.summary = {
        "cases": len(rows),
        "faster than what is searched by default": len(better),
        "of these, transfers overlap": sum(row["transfers overlap"] for row in better),
        "least transfer where it is faster": min((row["transfer"] for row in better), default=None),
        "least time of it beside the other": min(row["this / other"] for row in rows),
    }
    return report.finish(chosen, met=None)


def _simulated(
    name: str, stages: int, micro_batches: int, transfer: float, overlaps: bool
) -> PipelineTimes:
    chunks = _CHUNKS if SCHEDULES[name].interleaves else 1
    work = np.full(stages * chunks, 1 / chunks)
    nothing = np.zeros(stages * chunks)
    costs = StageCosts(
        forward_s=work,
        backward_input_s=work,
        backward_weight_s=work,
        update_s=nothing,
        transfer_s=np.full(stages * chunks - 1, transfer),
        state_bytes=nothing,
        in_flight_bytes=work,
        working_bytes=nothing,
        overlaps_transfers=overlaps,
    )
    return simulate(make_schedule(name, stages * chunks, micro_batches, stages), costs)


if __name__ == "__main__":
    sys.exit(main())

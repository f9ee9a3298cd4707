"""Replicated work: no axis of the mesh divides it, so every device does all of it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from ..graph import Phase
from ._choices import shards
from ._picked import Picked
from ._priced import Priced, work_seconds

UPDATE = "the update of state that is not split"
WHOLE = "operators that run whole"
REPLICATED_BY_PLAN = "operators that the plan replicates"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAlike:
    """Seconds of compute in a step that every device spends on the same work.

    `alike_s` gives them by reason; `total_s` is all compute of a device. Neither counts kernel
    launches. `longest` names what takes most of the time of `REPLICATED_BY_PLAN`, if anything does.
    """

    alike_s: dict[str, float]
    total_s: float
    longest: str = ""


def work_alike(picked: Picked) -> WorkAlike:
    """Compute that is replicated on all devices under a choice for each node; none on a single
    device.
    """
    priced = picked.priced
    alike: dict[str, float] = defaultdict(float)
    by_label: dict[str, float] = defaultdict(float)
    total = 0.0
    single = math.prod(priced.axis_sizes) == 1
    whole_s = _whole_seconds(priced)
    for node, work, sizes, choice in picked.works():
        times = 1 if work.phase is Phase.UPDATE else priced.repeats
        # Launches are left out of both figures, because no plan divides them.
        launches_s = work.kernels * priced.target.kernel_overhead_s
        all_s = float(work_seconds(work, sizes, choice, priced.mesh, priced.target)[0])
        seconds = all_s - launches_s
        local = [
            (b / s, s)
            for b, by in work.arrays
            if (s := float(shards(choice, by, priced.axis_sizes)[0]))
        ]
        # Work with arithmetic is replicated as a whole or not at all; of pure memory traffic, the
        # arrays that are not split are replicated.
        if work.flops:
            share = float(shards(choice, work.split_by, priced.axis_sizes)[0] == 1)
        else:
            moved = sum(b for b, _ in local)
            share = sum(b for b, s in local if s == 1) / moved if moved else 0.0
        total += times * seconds
        if share and not single:
            reason = UPDATE if work.phase is Phase.UPDATE else REPLICATED_BY_PLAN
            alike[reason] += times * seconds * share
            if reason == REPLICATED_BY_PLAN:
                by_label[node.label] += times * seconds * share
    # Operators that always run whole are part of the sums above, but count for another reason.
    for phase, seconds in whole_s.items() if not single else ():
        alike[UPDATE if phase is Phase.UPDATE else REPLICATED_BY_PLAN] -= seconds
        alike[WHOLE] += seconds
    return WorkAlike(
        alike_s={reason: seconds for reason, seconds in alike.items() if seconds > 0},
        total_s=total,
        longest=max(by_label, key=lambda label: by_label[label], default=""),
    )


def _whole_seconds(priced: Priced) -> dict[Phase, float]:
    """Seconds of the operators that always run whole, by phase."""
    speed = priced.target.memory_bytes_per_s(priced.mesh.cluster.device)
    by_phase: dict[Phase, float] = defaultdict(float)
    for op in priced.graph.whole:
        times = 1 if op.phase is Phase.UPDATE else priced.repeats
        by_phase[op.phase] += times * op.num_bytes * op.count / speed
    return by_phase

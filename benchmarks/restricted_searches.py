"""Are plans of restricted searches never better than what a free search finds?

Plans eight small steps freely and under six restrictions: small submeshes, meshes of data
parallelism, balanced stages, no all-to-all and no all-gather, no replicated parameters, the batch
on the first axis. Four of the steps are searched as large ones are, which tries fewer numbers of
stages and of micro-batches.

    python benchmarks/restricted_searches.py [--quick] [--hardware NAME]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from _results import Report, options, say  # noqa: E402
from planners.small_steps import mlp  # noqa: E402
from planners.test_pipeshard import BATCH, STATE, WIDE, train_step  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot.core import AliquotError  # noqa: E402
from aliquot.planners import _pipelines  # noqa: E402

_ROUNDING = 1e-9
_NARROW, _WIDE = (train_step, STATE, BATCH), (train_step, WIDE, BATCH)
# A step, where, and whether it is searched as if it were large.
CASES: tuple[tuple[str, Any, str, bool], ...] = (
    ("narrow layers", _NARROW, "4xV100-16GB", False),
    ("narrow layers", _NARROW, "4xV100-16GB", True),
    ("wide layers", _WIDE, "8xV100-16GB", False),
    ("wide layers", _WIDE, "2x2xV100-16GB", True),
    ("wide layers", _WIDE, "2x4xV100-16GB", True),
    ("products for 8,192 rows", mlp((1024, 4096, 1024, 4096, 1024), 8192), "8xV100-16GB", False),
    ("products for 64 rows", mlp((4096,) * 4, 64), "2x2xA100-PCIe", False),
    ("products for 1,024 rows", mlp((512, 2048, 512, 2048, 512), 1024), "4xA100-PCIe", True),
)
RESTRICTIONS = (
    aq.Within(submeshes=((1, 1), (1, 2))),
    aq.Within(meshes="data"),
    aq.Within(imbalance=0.2),
    aq.Within(without=("all-to-all", "all-gather")),
    aq.Within(replicated_parameters=False),
    aq.Within(batch_on_first_axis=True),
)


def _planned(step: Any, cluster: str, within: aq.Within | None) -> aq.Plan | str:
    try:
        return aq.plan(
            *step,
            cluster=aq.Cluster.preset(cluster),
            method=aq.PipeshardParallel(within=within),
        )
    except AliquotError as error:
        return str(error).partition("\n")[0]


def main() -> int:
    """Run, and write what came out; 1 if a restricted plan is better than the free one."""
    chosen = options(__doc__)
    report = Report(
        name="restricted_searches",
        question="Are plans of restricted searches never better than what a free search finds?",
        bar="48 of 48: none better, or none is left and the restriction is named",
        method="Predicted step times; the free one is 1.",
    )
    rows, usual = [], _pipelines._SMALL
    for name, step, cluster, as_large in CASES[:2] if chosen.quick else CASES:
        _pipelines._SMALL = 0 if as_large else usual
        free = _planned(step, cluster, None)
        assert isinstance(free, aq.Plan), free
        for within in RESTRICTIONS:
            plan = _planned(step, cluster, within)
            row: dict[str, Any] = {
                "step": name,
                "devices": cluster,
                "searched as large": as_large,
                "within": str(within),
            }
            if isinstance(plan, str):
                row |= {"step time": None, "plan": plan}
            else:
                share = plan.prediction.step_time_s / free.prediction.step_time_s
                stages = [stage.mesh_shape for stage in plan.stages]
                shown = f"{plan.schedule}, {plan.num_micro_batches} micro-batches, {stages}"
                row |= {"step time": share, "plan": shown}
            say(str(row))
            rows.append(row)
    _pipelines._SMALL = usual
    report.tables["Plans"] = rows
    shares = [row["step time"] for row in rows if row["step time"] is not None]
    better = sum(share < 1 - _ROUNDING for share in shares)
    report.summary = {
        "searches": len(rows),
        "better than free": better,
        "none left": len(rows) - len(shares),
        "least": min(shares),
        "most": max(shares),
    }
    return report.finish(chosen, met=better == 0)


if __name__ == "__main__":
    sys.exit(main())

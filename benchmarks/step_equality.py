"""Does every plan compute what the plain step computes?

Every method x {gpt, llama} x {unrolled, scan} x micro-batches {1, 4} x meshes {8, 4x2, 2x2x2} on
eight virtual CPU devices, in float64 (three AdamW steps) and float32 (three SGD steps), against the
plain step on one device. The same table is the test `tests/runtime/test_step_equality.py`.

    python benchmarks/step_equality.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _equality import compare_all, finish, largest_differences
from _results import Report, options, use_eight_devices, with_rows

use_eight_devices(fast_code=False)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.equality import LEAF, LOSS, NUM_STEPS, all_cases, compare, covering  # noqa: E402


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="step_equality",
        question="Equality of parallel and plain steps",
        bar=(
            "float64, AdamW: loss and every leaf of the state within 1e-9 of the leaf's largest"
            " magnitude; float32, SGD: loss within 1e-5 relative, every leaf within 1e-4 of its"
            " largest update"
        ),
        method=(
            f"{NUM_STEPS} steps of the whole program and of the plain step on one device, from one"
            " state over the same batches; the largest difference of any loss and of any leaf"
            " after the last step. The bias of the keys, whose gradient is rounding alone, is"
            " measured on the scale of the queries' bias beside it. Machine code is not optimized."
            " Deterministic: one run each."
        ),
    )
    rows = compare_all(chosen, all_cases(), covering, _row)
    for dtype in LOSS:
        mine = [r for r in rows if r["dtype"] == dtype]
        report.summary[f"{dtype}, cases"] = len(mine)
        report.summary[f"{dtype}, largest difference of loss, of leaves"] = largest_differences(
            mine
        )
    return finish(report, chosen, rows)


def _row(case: Any) -> dict[str, Any]:
    found = compare(case)
    return {
        **{
            name: getattr(case, name)
            for name in ("method", "mesh", "model", "form", "micro_batches", "dtype")
        },
        "loss": found.loss,
        "leaf": found.leaf,
        "worst leaf": found.path,
        "within": found.loss <= LOSS[case.dtype] and found.leaf <= LEAF[case.dtype],
    }


if __name__ == "__main__":
    sys.exit(main())

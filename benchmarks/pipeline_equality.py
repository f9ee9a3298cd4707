"""Does every pipeline compute what the plain step computes?

A tied toy model and {gpt, llama, moe, wide_resnet} x {gpipe, 1f1b, interleaved-1f1b, zero-bubble} x
{2, 4} stages x stages of {1, 2, unequal} devices on eight virtual CPU devices: three AdamW steps in
float64 against the plain step on one device. The same table is in the test
`tests/runtime/test_pipeline.py`.

    python benchmarks/pipeline_equality.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _equality import compare_all, finish, largest_differences
from _results import Report, options, use_eight_devices, with_rows

use_eight_devices(fast_code=False)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.pipeline_cases import (  # noqa: E402
    BAR,
    MICRO_BATCHES,
    NUM_STEPS,
    all_cases,
    compare,
    covering,
)


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="pipeline_equality",
        question="Equality of pipelines and plain steps",
        bar=(
            "float64, AdamW: loss and every leaf of the state within 1e-9 of the leaf's largest"
            " magnitude"
        ),
        method=(
            f"{NUM_STEPS} steps in {MICRO_BATCHES} micro-batches and as many plain ones on one"
            " device, from one state over the same batches; the largest difference of any loss and"
            " of any leaf after the last step. The bias of the keys, whose gradient is rounding"
            " alone, is measured on the scale of the queries' bias beside it. Wide-ResNet, whose"
            " BatchNorm sees one micro-batch at a time, is compared with the SPMD program on the"
            " same independent parts. Machine code is not optimized. Deterministic: one run each."
        ),
    )
    # A quick run takes the small model alone.
    every = all_cases(["tiny"]) if chosen.quick else all_cases()
    rows = compare_all(chosen, every, covering, _row)
    report.summary["cases"] = len(rows)
    report.summary["largest difference of loss, of leaves"] = largest_differences(rows)
    return finish(report, chosen, rows)


def _row(case: Any) -> dict[str, Any]:
    loss, leaf, path = compare(case)
    return {
        **{name: getattr(case, name) for name in ("model", "schedule", "stages", "mesh")},
        "devices": "+".join(map(str, case.sizes)),
        "loss": loss,
        "leaf": leaf,
        "worst leaf": path,
        "within": loss <= BAR and leaf <= BAR,
    }


if __name__ == "__main__":
    sys.exit(main())

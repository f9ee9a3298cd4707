"""Does anything but gradients travel under data parallelism?

Random steps whose examples do not depend on one another: networks with biases, norms and tables of
positions that one to three batches pass through, with shared layers, scans, recomputation,
gradients of each example, clipping, and metrics of the new parameters. Each is priced on its batch
and on half of it; of some, the programs for one batch and for two are compiled for eight virtual
devices. No collective may be larger on the larger batch.

    python benchmarks/gradient_cuts.py [--quick] [--steps 500] [--compiled 60] [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, use_eight_devices

use_eight_devices(fast_code=False)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _hlo import bytes_by_kind, collectives  # noqa: E402
from planners.growing_collectives import growing_collectives  # noqa: E402
from runtime.random_passes import ROWS, random_passes  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot.graph import capture  # noqa: E402


def priced_row(seed: int) -> dict[str, Any]:
    """Which priced collectives of a step grow with its batch."""
    text, step, state, batch = random_passes(seed)
    grows = growing_collectives(capture(step, state, batch))
    return {"step": text, "looked at": grows is not None, "grow": grows or []}


def compiled_row(seed: int) -> dict[str, Any]:
    """Which kinds of collectives of the compiled program send more on the whole batch."""
    sent = []
    for rows in (ROWS, 2 * ROWS):
        text, step, state, batch = random_passes(seed, rows)
        plan = aq.plan(step, state, batch, cluster=aq.Cluster.detect(), method=aq.DataParallel())
        compiled = aq.parallelize(step, plan).prepare(state, batch).lower().compile()
        sent.append(bytes_by_kind(collectives(compiled.as_text())))
    few, many = sent
    grow = [f"{kind}: {few[kind]} and {n} bytes" for kind, n in many.items() if n > few[kind]]
    return {"step": text, "looked at": True, "grow": grow}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more_options)
    journal = Journal(chosen.journal)
    steps, compiled = (12, 2) if chosen.quick else (chosen.steps, chosen.compiled)
    report = Report(
        name="gradient_cuts",
        question="Collectives that grow with the batch under data parallelism",
        bar="none, where examples do not depend on one another",
        method=(
            "Random steps, each on a batch and on half of it: the priced collectives on four"
            f" devices, by label, of {steps} steps; the bytes of each kind in the programs compiled"
            f" for eight, of {compiled}. Steps that cannot be cut into micro-batches are priced but"
            " not looked at. Deterministic: one run each."
        ),
    )
    priced = [journal.row(f"priced {n}", functools.partial(priced_row, n)) for n in range(steps)]
    # The first steps alone: every seed draws from all that there is.
    programs = [
        journal.row(f"compiled {n}", functools.partial(compiled_row, n)) for n in range(compiled)
    ]
    looked_at = [row for row in priced if row["looked at"]]
    broken = [row for row in (*looked_at, *programs) if row["grow"]]
    report.summary = {
        "steps priced": len(priced),
        "looked at": len(looked_at),
        "programs compiled": len(programs),
        "steps of which a priced collective grows": sum(bool(r["grow"]) for r in looked_at),
        "programs of which a collective grows": sum(bool(r["grow"]) for r in programs),
    }
    report.tables["Broken"] = broken
    return report.finish(chosen, met=not broken and len(looked_at) > len(priced) / 2)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=500, help="how many are priced")
    parser.add_argument("--compiled", type=int, default=60, help="how many are compiled")
    parser.add_argument(
        "--journal", type=Path, help="keeps rows, so that a run that was cut off can go on"
    )


if __name__ == "__main__":
    sys.exit(main())

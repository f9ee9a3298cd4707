"""Do independent micro-batches compute what their definition says?

Random steps and named losses in 2 and 4 micro-batches, two steps each in float64, against a
reference in plain JAX: a loop over the micro-batches that averages gradients and metrics and hands
statistics on, then one update. Methods: dp, zero2, zero3, shard, auto on one and several virtual
devices, and pipelines of two stages. Each case runs in a process of its own, which XLA may abort.

    python benchmarks/independent_micro_batches.py [--quick] [--seeds N] [--journal FILE]
"""

from __future__ import annotations

import collections
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, use_eight_devices, with_rows

use_eight_devices(fast_code=False)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from runtime import independent_cases  # noqa: E402
from runtime.pipelines import pipeline  # noqa: E402
from runtime.random_steps import random_step  # noqa: E402
from runtime.test_random_steps import _METHODS, _SLOW, _differences, _results  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot.graph import capture  # noqa: E402
from aliquot.sharding import plan_micro_batches  # noqa: E402

COUNTS = (2, 4)
RANDOM_METHODS = (("dp", "shard"), ("zero3", "shard"), ("zero2", "auto"), ("dp", "pipeline"))
NAMED_METHODS = ("dp", "zero2", "zero3", "shard", "pipeline", "dp on 1")
BAR = 1e-9


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows, _add_options)
    if chosen.case:
        print(json.dumps(_rows(chosen.case)))
        return 0
    seeds, names = range(chosen.seeds), list(independent_cases.CASES)
    cases = [*(f"seed {k}" for k in seeds), *names]
    if chosen.quick:
        cases = [*cases[:3], *names[:2]]
    journal = Journal(chosen.journal)
    made = [
        journal.row(case, functools.partial(_in_process, case))
        for case in cases
        if chosen.only in case
    ]
    rows = [row for each in made for row in each["rows"]]
    report = Report(
        name="independent_micro_batches",
        question="Independent micro-batches and their definition",
        bar="no result differs by more than 1e-9 of its largest magnitude, in float64",
        method=(
            "Two steps of each case, from one state over the same batches; state and metrics are"
            " compared. Whether a loss is averaged or summed is what the plan says; that only sums"
            " are summed is checked. Refusals are listed with their reasons. A process that XLA"
            " aborts is listed as such. Deterministic: one run each."
        ),
    )
    counts = collections.Counter(row["outcome"] for row in rows)
    report.summary = {"random steps": len(seeds), "named losses": len(names), **counts}
    refused = collections.Counter(row["why"] for row in rows if row["outcome"] == "refused")
    report.tables = {
        "Reasons of refusals": [{"reason": why, "cases": n} for why, n in refused.most_common()],
        "Others": [row for row in rows if row["outcome"] not in ("equal", "refused")],
    }
    return report.finish(chosen, met=not counts.keys() - {"equal", "refused"})


def _add_options(parser: Any) -> None:
    parser.add_argument("--seeds", type=int, default=300, help="how many random steps")
    parser.add_argument("--case", default="", help="one case, in this process; prints its rows")


def _in_process(case: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, __file__, "--case", case], capture_output=True, text=True, check=False
    )
    try:
        return {"rows": json.loads(found.stdout.splitlines()[-1])}
    except (ValueError, IndexError):
        last = [line for line in found.stderr.splitlines() if "Check failed" in line][:1]
        why = last[0].split("] ", 1)[-1] if last else found.stderr[-200:]
        return {"rows": [{"case": case, "outcome": "aborted", "why": why}]}


def _rows(case: str) -> list[dict[str, Any]]:
    jax.config.update("jax_enable_x64", True)
    if not case.startswith("seed "):
        return [_row(case, m, method, _named) for m in COUNTS for method in NAMED_METHODS]
    seed = int(case.split()[1])
    methods = RANDOM_METHODS[seed % len(RANDOM_METHODS)]
    return [_row(case, m, method, _random) for m in COUNTS for method in methods]


def _row(case: str, count: int, method: str, run: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "micro-batches": count, "method": method}
    try:
        off = run(case, count, method)
    except aq.AliquotError as error:
        # Numbers and names would make each reason one of its own.
        text = str(error).split("\n")[0].split(". ")[0]
        words = [w for w in text.split() if not any(c.isdigit() or c in "`/" for c in w)]
        return {**row, "outcome": "refused", "why": " ".join(words)[:120]}
    return {**row, "outcome": "differs" if off else "equal", "why": str(off)[:200] if off else ""}


def _random(case: str, count: int, method: str) -> Any:
    step = random_step(int(case.split()[1]))
    graph = capture(step.fn, step.state, step.batches[0])
    how = plan_micro_batches(graph, count, semantics="independent").combine.get("[1].loss")
    # A loss of no numbers is a sum in any case.
    if how == "sum" and step.loss != "sum" and step.batches[0]["x"].size:
        return f"{step.loss} is summed"
    definition = step.independent(count, how == "sum")
    found = _results(_made(step.fn, (step.state, step.batches[0]), count, method, 4), step)
    off = _differences(found, _results(jax.jit(definition), step), step.tolerance)
    if off:
        # XLA may compute an array twice, in two ways: the definition's maxima then equal none of
        # their elements, and their gradients are off. Operator by operator they are not.
        with jax.disable_jit():
            off = _differences(found, _results(definition, step), step.tolerance)
    return off


def _named(case: str, count: int, method: str) -> Any:
    made = independent_cases.CASES[case]()
    fn = independent_cases.plain(made)
    args = independent_cases.start(made), made.batch
    step = _made(fn, args, count, method, 1 if method.endswith("1") else 8)
    wanted = jax.jit(independent_cases.reference(made, count))
    found = []
    for run in (step, wanted):
        state = independent_cases.start(made)
        for _ in range(2):
            state, metrics = run(state, made.batch)
            state = jax.tree.map(np.array, state)
        found.append((state, jax.tree.map(np.array, metrics)))
    return _differences(found[0], found[1], BAR)


def _made(fn: Any, args: Any, count: int, method: str, devices: int) -> Any:
    if method == "pipeline":
        return pipeline(fn, *args, micro_batches=count, anywhere=True, semantics="independent")
    cluster = _SLOW if devices == 4 else aq.Cluster.preset(f"{devices}xcpu")
    plan = aq.plan(
        fn,
        *args,
        cluster=cluster,
        method=_METHODS[method.split()[0]],
        num_micro_batches=count,
        micro_batch_semantics="independent",
    )
    return aq.parallelize(fn, plan, devices=jax.devices()[:devices])


if __name__ == "__main__":
    sys.exit(main())

"""Do stages take what the search for them promises?

Pipelines are found by sums of layers, each layer solved on its own. Proposed stages are then solved
as wholes. Here every proposal of the searches for pipelines of models of the zoo on four clusters
is held against its stages solved as wholes: the step time that was promised beside the one that was
found, and whether stages that promised to fit do.

    python benchmarks/promises.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from _results import Journal, Report, options, say, with_rows

from aliquot.cli._model import ZooOptions
from aliquot.cli._recomputation import model_to_plan, variants_of
from aliquot.cluster import Cluster
from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.planners import PipeshardParallel, _solve_stages

MOST_ERROR = 0.05
LEAST_SHARE = 0.9
# A model, its global batch, and the policies that are searched.
MODELS = (
    ("gpt-350m", 256, ("none",)),
    ("gpt-1.3b", 512, ("none", "block")),
    ("gpt-2.6b", 1024, ("none", "block")),
    ("bert-1.3b", 512, ("none",)),
    ("llama-7b", 256, ("minimal", "block")),
    ("moe-1.3b", 512, ("none",)),
    ("t5-770m", 256, ("none",)),
)
CLUSTERS = ("8xV100-16GB", "2x8xA100-40GB", "4x8xV100-32GB", "8xH100")
_QUICK = "gpt-350m-8xV100-16GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A proposal held against its stages. `found_s` is None where they do not fit; devices then
    need `needed_share` of what they were promised to hold.
    """

    num_micro_batches: int
    num_stages: int
    promised_s: float
    found_s: float | None
    needed_share: float | None = None

    @property
    def error(self) -> float | None:
        """Found over promised, less 1."""
        return None if self.found_s is None else self.found_s / self.promised_s - 1


@contextmanager
def proposals() -> Iterator[list[Held]]:
    """Collects the proposals that searches for pipelines solve as wholes meanwhile."""
    held: list[Held] = []
    solve = _solve_stages._Stages.solve

    def solved(stages: Any, chain: Any, proposal: Any, *more: Any) -> Any:
        found = solve(stages, chain, proposal, *more)
        each = Held(
            num_micro_batches=proposal.num_micro_batches,
            num_stages=len(proposal.stages),
            promised_s=proposal.step_time_s,
            found_s=None if isinstance(found, float) else found.step_time_s,
            needed_share=found / proposal.peak_bytes if isinstance(found, float) else None,
        )
        held.append(each)
        return found

    with mock.patch.object(_solve_stages._Stages, "solve", solved):
        yield held


def answer(model: str, global_batch: int, policy: str, cluster: str) -> dict[str, Any]:
    """All proposals of a search for pipelines."""
    where = Cluster.preset(cluster)
    asked = ZooOptions(global_batch=global_batch, overrides={}, scan=False)
    (variant,) = variants_of(model_to_plan(model, asked, where))
    by_policy = {str(each.layers): each for each in variant.ways_to_recompute(None)}
    refusal = ""
    with proposals() as held:
        try:
            PipeshardParallel().decide(by_policy[policy].task(where, recomputes=policy != "none"))
        except (InfeasibleError, InputError, CaptureError) as error:
            refusal = str(error).partition("\n")[0]
    return {"held": [asdict(each) for each in held], "refusal": refusal}


def _cases(chosen: argparse.Namespace) -> Sequence[tuple[str, int, str, str]]:
    cases = [
        (model, batch, policy, cluster)
        for (model, batch, policies), cluster in itertools.product(MODELS, CLUSTERS)
        for policy in policies
    ]
    part = _QUICK if chosen.quick else chosen.only
    return [case for case in cases if part in f"{case[0]}-{case[3]}"]


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    journal = Journal(chosen.journal)
    report = Report(
        name="promises",
        question="Do stages take what the search for them promises?",
        bar=(
            f"{LEAST_SHARE:.0%} of the stages that fit within {MOST_ERROR:.0%} of what their layers"
            " promise"
        ),
        method=(
            "Every proposal of the search for pipelines, by `PipeshardParallel` with its defaults,"
            " beside the same stages solved as wholes. Where these do not fit, the search is told"
            " so and proposes others."
        ),
    )
    rows: list[dict[str, Any]] = []
    errors: list[float] = []
    for model, batch, policy, cluster in _cases(chosen):
        name = f"{model}-{cluster}-{policy}"
        found = journal.row(name, lambda: answer(model, batch, policy, cluster))  # noqa: B023
        held = [Held(**each) for each in found["held"]]
        those = [each.error for each in held if each.error is not None]
        errors += those
        too_large = [each.needed_share for each in held if each.needed_share is not None]
        rows.append(
            {
                "search": name,
                "proposals": len(held),
                "that fit": len(those),
                "least error": f"{min(those):+.1%}" if those else "",
                "most error": f"{max(those):+.1%}" if those else "",
                "do not fit": len(too_large),
                "need, of promised bytes": f"{max(too_large):.2f}" if too_large else "",
                "refused": found["refusal"].replace("|", "/"),
            }
        )
        say(f"{name}: {rows[-1]}")
    within = sum(abs(error) <= MOST_ERROR for error in errors)
    report.tables["Searches"] = rows
    report.summary = {
        "proposals that fit": len(errors),
        "of them within 5 %": within,
        "median of the error's size": f"{statistics.median(map(abs, errors)):.2%}",
        "least and most error": f"{min(errors):+.1%}, {max(errors):+.1%}",
        "proposals that do not fit as wholes": sum(row["do not fit"] for row in rows),
    }
    return report.finish(chosen, met=within >= LEAST_SHARE * len(errors))


if __name__ == "__main__":
    raise SystemExit(main())

"""Changes that `aliquot plan` tries where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import InfeasibleError
from ._progress import search_progress
from ._session import Session

if TYPE_CHECKING:
    from .._remedies import Attempt, Remedy
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan
    from ._model import Model, ZooOptions


def try_remedies(
    name: str,
    options: ZooOptions,
    built: Model,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    micro_batches: int | None,
    memory_limit_bytes: float | None,
    say: Session,
) -> tuple[Remedy, ...]:
    """Changes that were tried, with progress; for models of the zoo also recomputation and smaller
    batches.
    """
    from .._api import plan as find_plan
    from .._remedies import Attempt, coarser, find_remedies
    from ._model import resolve, user_code

    def attempt(change: str, changed: ZooOptions) -> Attempt:
        def make(time_limit_s: float) -> Plan:
            model = resolve(name, changed, where)
            return find_plan(
                model.step,
                model.state,
                model.batch,
                cluster=where,
                method=coarser(how),
                num_micro_batches=micro_batches,
                memory_limit_bytes=memory_limit_bytes,
                model=model.reference,
                time_limit_s=time_limit_s,
            )

        return Attempt(change=change, make=make)

    others = []
    if built.workload is not None and options.global_batch is not None:
        if options.recompute == "none":
            others.append([attempt("--recompute block", replace(options, recompute="block"))])
        batches = [
            options.global_batch // 2**k for k in range(1, 5) if options.global_batch % 2**k == 0
        ]
        others.append(
            [
                attempt(f"--global-batch {batch}", replace(options, global_batch=batch))
                for batch in batches
            ]
        )
    with user_code(built.name), search_progress(say) as report:
        return find_remedies(
            built.step,
            built.state,
            built.batch,
            cluster=where,
            method=how,
            num_micro_batches=micro_batches,
            memory_limit_bytes=memory_limit_bytes,
            model=built.reference,
            others=others,
            progress=report,
        )


def with_remedies(error: InfeasibleError, remedies: Sequence[Remedy]) -> InfeasibleError:
    """The error with the changes that were tried in place of general advice."""
    from .._remedies import remedies_text

    if not remedies:
        return error
    kept = [line for line in str(error).splitlines() if not line.strip().startswith("It could fit")]
    return InfeasibleError(
        "\n".join([*kept, remedies_text(remedies)]),
        required_bytes=error.required_bytes,
        available_bytes=error.available_bytes,
        parts=error.parts,
    )

"""`aliquot verify`: what the compiler that will run a plan makes of it."""

from __future__ import annotations

import typer

from ..core import InputError
from ._devices import use_host_only
from ._groups import option
from ._options import Json, ModelOfPlan, PlanFile, TrustPlan, read_plan
from ._progress import compiling_progress
from ._session import session


def verify(
    plan_file: PlanFile,
    target: str | None = option(
        "A GPU or TPU such as H100 or v5e, cpu, or a file describing a GPU; by default the plan's."
    ),
    model: ModelOfPlan = None,
    trust_plan: TrustPlan = False,
    as_json: Json = False,
) -> None:
    """Compile a plan with the compiler that will run it, without the devices, and compare with the
    prediction.
    """
    with session(as_json) as say:
        use_host_only()
        plan = read_plan(plan_file)
        from ..cluster import Cluster
        from ..verification import require_compiler, resolve_target

        require_compiler(resolve_target(target, Cluster.from_dict(plan.cluster)))
        from .._api import verify as compile_plan
        from ..report import verification
        from ._model import rebuild, unnamed, user_code

        if model is None and (reason := unnamed(plan.model, trusted=trust_plan)):
            raise InputError(
                f"{reason} Or call aliquot.verify(plan, train_step, state, batch) where the"
                " function is."
            )
        workload = rebuild(plan.model, named=model, trusted=trust_plan)
        with compiling_progress(say) as report, user_code(workload.name):
            result = compile_plan(
                plan, workload.step, workload.state, workload.batch, target=target, progress=report
            )
        answer = result.to_dict()
        say.show(verification(answer))
        say.finish(answer)
    if not result.fits:
        raise typer.Exit(1)

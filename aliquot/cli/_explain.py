"""`aliquot explain`: why a plan is as it is."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import AliquotError, InputError, PlanMismatchError, write_atomic
from ._devices import use_host_only
from ._groups import option
from ._options import Json, ModelOfPlan, PlanFile, TrustPlan, check_destination, read_plan
from ._session import Session, session

if TYPE_CHECKING:
    from ..plans import Plan
    from ..report import Alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExplainOptions:
    """What is explained beside the plan itself, and where it is written."""

    alternatives: bool = option(
        "Also trace the step again and price what could have been chosen instead.", True
    )
    model: ModelOfPlan = None
    trust_plan: TrustPlan = False
    trace: Path | None = option(
        "Write a pipeline's predicted schedule to this file, for ui.perfetto.dev.", metavar="FILE"
    )
    html: Path | None = option("Write the plan as one HTML page.", metavar="FILE")
    profiles: Path | None = option("The database that the plan was made from.", metavar="FILE")


def explain(*, plan_file: PlanFile, as_json: Json = False, asked: _ExplainOptions) -> None:
    """Explain a plan: its decisions, its predicted cost, and the cost of the best alternatives."""
    with session(as_json) as say:
        use_host_only()
        from ..report import explained, explanation, page, planned_trace

        check_destination(asked.trace, "--trace")
        check_destination(asked.html, "--html")
        plan = read_plan(plan_file)
        if asked.trace is not None:
            planned_trace(plan).save(asked.trace)
        if asked.html is not None:
            write_atomic(asked.html, page(plan, date=datetime.date.today().isoformat()))
        others, remark = (
            priced_alternatives(plan, say, asked.model, asked.trust_plan, asked.profiles)
            if asked.alternatives
            else ((), "")
        )
        say.show(explanation(plan, others, remark=remark))
        if asked.trace is not None:
            say.show(
                f"\nThe predicted schedule is in {asked.trace}. Open it at https://ui.perfetto.dev."
            )
        if asked.html is not None:
            say.show(f"\nThe page is in {asked.html}.")
        answer = {**explained(plan, others), "alternatives_remark": remark or None}
        say.finish(
            {
                **answer,
                "trace_file": str(asked.trace) if asked.trace else None,
                "html_file": str(asked.html) if asked.html else None,
            }
        )


def priced_alternatives(
    plan: Plan,
    say: Session,
    model: str | None = None,
    trusted: bool = False,
    profiles: Path | None = None,
) -> tuple[Sequence[Alternative], str]:
    """Alternatives with their prices; if the step cannot be rebuilt, a remark that says so.

    Args:
        model: what the user calls the model, if not what the plan says.
        trusted: whether the plan may name the function that makes the step.
        profiles: the database that the plan was made from, if any.
    """
    from ..plans import is_pipeline

    if is_pipeline(plan):
        return (
            (),
            ("Alternatives are not priced for plans with stages. Compare plans with aliquot diff."),
        )
    from ._model import rebuild, unnamed, user_code

    if model is None and (reason := unnamed(plan.model, trusted=trusted)):
        how = "Or call aliquot.explain(plan, step, ...) where the function is."
        return (), f"Alternatives are not priced: {reason} {how}"
    if plan.provenance.profiles and profiles is None:
        return (
            (),
            (
                "Alternatives are not priced: the plan was made from measurements. Give the same"
                " database: --profiles FILE."
            ),
        )
    from .._api import explain as price_alternatives

    try:
        say.voice.doing = "pricing what could have been chosen instead"
        workload = rebuild(plan.model, named=model, trusted=trusted)
        with user_code(workload.name):
            return (
                price_alternatives(
                    plan, workload.step, workload.state, workload.batch, profiles=profiles
                ),
                "",
            )
    except PlanMismatchError as error:
        # The plan is not what it says it is, or not for what the user says.
        advice = f"{error.advice} To read the plan as it is, add --no-alternatives."
        raise PlanMismatchError(error.violations, asked=error.asked, advice=advice) from None
    except InputError:
        raise
    except AliquotError as error:
        # The plan itself is still worth reading.
        return (), f"Alternatives are not priced: {error}"

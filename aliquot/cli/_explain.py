"""`aliquot explain`: why a plan is as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import AliquotError
from ..plans import Plan
from ._devices import use_host_only
from ._options import Json, PlanFile
from ._session import Session, session

if TYPE_CHECKING:
    from ..report import Alternative


def explain(
    plan_file: PlanFile,
    as_json: Json = False,
    alternatives: Annotated[
        bool, typer.Option(help="Also trace the step again and price what could have been chosen instead.")
    ] = True,
) -> None:
    """Say what a plan decides, what it is predicted to cost, and what the best alternatives would cost."""
    with session(as_json) as say:
        from ..report import explained, explanation

        found = Plan.load(plan_file)
        others, remark = priced_alternatives(found, say) if alternatives else ((), "")
        say.show(explanation(found, others, remark=remark))
        say.finish(explained(found, others))


def priced_alternatives(plan: Plan, say: Session) -> tuple[Sequence[Alternative], str]:
    """What else was possible, and a remark if that cannot be said because the step cannot be made again."""
    if plan.model.kind == "closure":
        return (), (
            "Alternatives are not priced: the plan was made from a function that no file names. "
            "Call aliquot.explain(plan, step, ...) where the function is."
        )
    use_host_only()
    from .._api import explain as price_alternatives
    from ._model import rebuild, user_code

    try:
        model = rebuild(plan.model)
        if model is None:
            return (), ""
        with user_code(model.name):
            return price_alternatives(plan, model.step, model.state, model.batch), ""
    except AliquotError as error:
        # The plan itself is still worth reading.
        say.note(f"alternatives are not priced: {error}")
        return (), ""

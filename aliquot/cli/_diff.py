"""`aliquot diff`: two plan files compared."""

from __future__ import annotations

from ..plans import Plan
from ..plans import diff as compare
from ._devices import use_host_only
from ._options import Json, PlanFile
from ._session import session


def diff(before: PlanFile, after: PlanFile, as_json: Json = False) -> None:
    """Compare two plans term by term: what they decide, and what they are predicted to cost."""
    with session(as_json) as say:
        use_host_only()
        from ..report import difference

        changes = compare(Plan.load(before), Plan.load(after))
        say.show(
            difference(
                changes, before.name, after.name if after.name != before.name else str(after)
            )
        )
        say.finish({"before": str(before), "after": str(after), **changes.to_dict()})

"""`aliquot diff`: two plan files compared."""

from __future__ import annotations

from ._devices import use_host_only
from ._options import Json, PlanFile, read_plan
from ._session import session


def diff(before: PlanFile, after: PlanFile, as_json: Json = False) -> None:
    """Compare two plans term by term: what they decide, and what they are predicted to cost."""
    with session(as_json) as say:
        use_host_only()
        from ..plans import diff as compare
        from ..report import difference

        changes = compare(read_plan(before), read_plan(after))
        say.show(
            difference(
                changes, before.name, after.name if after.name != before.name else str(after)
            )
        )
        say.finish({"before": str(before), "after": str(after), **changes.to_dict()})

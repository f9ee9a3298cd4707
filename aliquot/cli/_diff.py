"""`aliquot diff`: two plan files compared."""

from __future__ import annotations

from ._devices import use_host_only
from ._groups import option
from ._options import Json, PlanFile, read_plan
from ._session import session


def diff(
    before: PlanFile,
    after: PlanFile,
    every_term: bool = option(
        "List every term that differs, arrays and operators too.", False, names="--all"
    ),
    markdown: bool = option("Print Markdown, for a comment on a pull request.", False),
    as_json: Json = False,
) -> None:
    """Compare two plans: how they are laid out, and the time and memory that they are predicted to
    take.
    """
    with session(as_json) as say:
        use_host_only()
        from ..plans import diff as compare
        from ..report import difference, summarised, summarised_as_markdown

        plans = read_plan(before), read_plan(after)
        changes = compare(*plans)
        names = before.name, after.name if after.name != before.name else str(after)
        if markdown:
            say.show(summarised_as_markdown(*plans, changes, names))
        elif every_term:
            say.show(difference(changes, *names))
        else:
            say.show(summarised(*plans, changes, names))
        say.finish({"before": str(before), "after": str(after), **changes.to_dict()})

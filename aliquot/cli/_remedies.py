"""Changes that `aliquot plan` tries where nothing fits."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import InfeasibleError
from ._progress import search_progress
from ._session import Session

if TYPE_CHECKING:
    from .._remedies import Remedy
    from .._variants import Variants
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan
    from ._model import ZooOptions


def try_remedies(
    name: str,
    options: ZooOptions,
    built: Variants,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    refused: InfeasibleError,
    say: Session,
    **of_plan: Any,
) -> tuple[Remedy, ...]:
    """Changes that were tried, with progress; for models of the zoo also recomputation and smaller
    batches.

    Args:
        built: the ways in which the model was built.
        refused: what was said of the step as it was asked for.
        of_plan: other arguments of `aliquot.plan`.
    """
    from .._remedies import Attempt, coarser, remedies_for
    from .._variants import plan_variants
    from ._model import user_code
    from ._recomputation import AUTO, less_kept, model_to_plan, variants_of

    def attempt(change: str, changed: ZooOptions) -> Attempt:
        def make(time_limit_s: float) -> Plan:
            return plan_variants(
                variants_of(model_to_plan(name, changed, where)),
                cluster=where,
                method=coarser(how),
                time_limit_s=time_limit_s,
                **of_plan,
            )

        return Attempt(change=change, make=make)

    others = []
    batch = options.global_batch
    if ":" not in name and batch is not None:
        if options.recompute not in (None, AUTO):
            less = less_kept(name, options)
            others.append(
                [attempt(f"--recompute {how}", replace(options, recompute=how)) for how in less]
            )
        batches = [batch // 2**k for k in range(1, 5) if batch % 2**k == 0]
        others.append(
            [attempt(f"--global-batch {n}", replace(options, global_batch=n)) for n in batches]
        )
    with user_code(name), search_progress(say) as report:
        return remedies_for(
            built,
            cluster=where,
            method=how,
            others=others,
            refused=refused,
            progress=report,
            **of_plan,
        )


def with_remedies(error: InfeasibleError, remedies: Sequence[Remedy]) -> InfeasibleError:
    """The error with the changes that were tried in place of general advice."""
    from .._remedies import remedies_text

    if not remedies:
        return error
    told = []
    for each in remedies:
        told.append(each if each.is_known else replace(each, change=_command_with(each.change)))
    return error.reworded(f"{error.message}\n{remedies_text(told)}")


def _command_with(change: str) -> str:
    """The command as it was typed, with a change in place of the options that it names; the change
    itself where it is none of options.
    """
    if not change.startswith("--"):
        return change
    named = [word for word in change.split() if word.startswith("--")]
    kept, is_value = list[str](), False
    for word in sys.argv[1:]:
        is_left_out = is_value or word.partition("=")[0] in named
        is_value = not is_value and word in named
        kept += [] if is_left_out else [word]
    return f"{shlex.join(['aliquot', *kept])} {change.partition(' without ')[0]}"

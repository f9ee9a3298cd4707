"""`aliquot plan --max-batch`: the largest batch that fits, and the batch of highest throughput."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ..core import InputError
from ._progress import search_progress
from ._session import Session

if TYPE_CHECKING:
    from .._variants import Variants
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ._model import ZooOptions


def find_max_batch(
    name: str,
    options: ZooOptions,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    micro_batches: int | Literal["auto"] | None,
    out: Path | None,
    say: Session,
    **of_plan: Any,
) -> None:
    """Search, show what was found, and write the plan of highest throughput to `out`.

    Args:
        of_plan: other arguments of `aliquot.plan`.

    Raises:
        InputError: The model comes from a factory that decides its batch by itself.
        typer.Exit: With 1, if no batch fits.
    """
    from ._model import takes_batch, tell_model, zoo_config

    config = zoo_config(name, options.overrides)
    if config is None and not takes_batch(name):
        raise InputError(
            f"--max-batch: {name} decides its batch by itself. Give it an argument global_batch, or"
            " call aliquot.largest_batch(make, cluster=...) in Python."
        )
    tell_model(name, config, say)
    from .._questions import largest_batch_built
    from ..report import batch_table
    from ._recomputation import model_to_plan, variants_of

    def build(batch: int) -> Variants:
        return variants_of(model_to_plan(name, replace(options, global_batch=batch), where))

    parts = micro_batches if isinstance(micro_batches, int) else 1
    with search_progress(say) as report:
        batches = largest_batch_built(
            build,
            cluster=where,
            # Each micro-batch can then be split evenly.
            unit=parts * math.lcm(where.num_devices, config.batch_multiple if config else 1),
            first=options.global_batch,
            method=how,
            num_micro_batches=micro_batches,
            progress=report,
            **of_plan,
        )
    say.show(batch_table(batches))
    if out is not None and batches.fastest and batches.fastest.plan:
        batches.fastest.plan.save(out)
        say.show(f"The plan for batch {batches.fastest.global_batch} is in {out}.")
    say.finish({**batches.to_dict(), "plan_file": str(out) if out and batches.fastest else None})
    if batches.largest is None:
        raise typer.Exit(1)

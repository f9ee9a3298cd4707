"""`aliquot plan --max-batch`: the largest batch that fits, and the batch of highest throughput."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import InputError
from ._progress import search_progress
from ._session import Session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import ModelReference
    from ._model import Model, ZooOptions


def find_max_batch(
    name: str,
    options: ZooOptions,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    micro_batches: int,
    memory_limit_bytes: float | None,
    out: Path | None,
    say: Session,
) -> None:
    """Search, show what was found, and write the plan of highest throughput to `out`.

    Raises:
        InputError: The model comes from a factory, which decides its batch by itself.
        typer.Exit: With 1, if no batch fits.
    """
    if ":" in name:
        raise InputError(
            f"--max-batch: {name} decides its batch by itself. Call aliquot.largest_batch(make,"
            " cluster=...) in Python."
        )
    from .._questions import largest_batch
    from ..report import batch_table
    from ..zoo import configure
    from ._model import resolve

    models: dict[int, Model] = {}

    def make(batch: int) -> tuple[Any, Any, Any]:
        built = models[batch] = resolve(name, replace(options, global_batch=batch), where)
        return built.step, built.state, built.batch

    def reference(batch: int) -> ModelReference:
        return models[batch].reference

    unit = math.lcm(
        where.num_devices, micro_batches * configure(name, **options.overrides).batch_multiple
    )
    with search_progress(say) as report:
        batches = largest_batch(
            make,
            cluster=where,
            method=how,
            unit=unit,
            first=options.global_batch,
            num_micro_batches=micro_batches,
            memory_limit_bytes=memory_limit_bytes,
            model=reference,
            progress=report,
        )
    say.show(batch_table(batches))
    if out is not None and batches.fastest and batches.fastest.plan:
        batches.fastest.plan.save(out)
        say.show(f"The plan for batch {batches.fastest.global_batch} is in {out}.")
    say.finish({**batches.to_dict(), "plan_file": str(out) if out and batches.fastest else None})
    if batches.largest is None:
        raise typer.Exit(1)

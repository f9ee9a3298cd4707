"""`aliquot plan`: from a model's name and a cluster to a plan file."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..core import InfeasibleError
from ._devices import use_host_only
from ._groups import takes_groups
from ._interrupts import INTERRUPTED
from ._max_batch import find_max_batch
from ._model_options import MemoryLimit, ModelOptions, read_memory_limit
from ._options import (
    ClusterName,
    Json,
    ModelName,
    check_destination,
    read_cluster,
    read_time_limit,
)
from ._plan_json import no_plan, summary
from ._plan_options import MethodOptions, ProfileOptions, SearchOptions
from ._progress import search_progress
from ._remedies import try_remedies, with_remedies
from ._session import Session, session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan
    from ._model import Model, ZooOptions


@takes_groups
def plan(
    model: ModelName,
    cluster: ClusterName,
    model_options: ModelOptions,
    method_options: MethodOptions,
    profile_options: ProfileOptions,
    search_options: SearchOptions,
    memory_limit: MemoryLimit = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to run a model's training step on a cluster, and say what it is
    predicted to cost.
    """
    with session(as_json) as say:
        check_destination(out)
        time_limit_s = read_time_limit(search_options.time_limit)
        method_options.check(model_options.global_batch)
        if cluster != "detect":
            use_host_only()
        where = read_cluster(cluster)
        from ._model import find_factory

        if ":" in model:
            # Its module may register the schedule that is asked for.
            find_factory(model)
        request = _Request(
            name=model,
            where=where,
            how=method_options.read(),
            options=model_options.read(),
            memory_limit_bytes=read_memory_limit(memory_limit),
            method=method_options,
            profiles=profile_options,
            search=search_options,
        )
        if search_options.max_batch:
            _find_max_batch(request, out, say)
        else:
            _find_plan(request, time_limit_s, out, say)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The options, read: a model, a cluster, a method, and how to search."""

    name: str
    where: Cluster
    how: AbstractMethod | PipeshardParallel
    options: ZooOptions
    memory_limit_bytes: float | None
    method: MethodOptions
    profiles: ProfileOptions
    search: SearchOptions

    def make(
        self,
        model: Model,
        time_limit_s: float | None,
        say: Session,
        *,
        faster_than_s: float = math.inf,
        pipelines: bool = True,
    ) -> Plan:
        """A plan of the model, found within a time.

        Args:
            faster_than_s: one that takes as long is of no use.
            pipelines: whether method auto searches these, too.
        """
        from ..planners import Auto

        how = self.how
        if isinstance(how, Auto):
            how = replace(how, faster_than_s=faster_than_s, pipelines=pipelines)
        return make_plan(
            model,
            self.where,
            how,
            self.method.wanted_micro_batches,
            say,
            semantics=self.method.micro_batch_semantics,
            memory_limit_bytes=self.memory_limit_bytes,
            verify=self.search.verify,
            time_limit_s=time_limit_s,
            **asdict(self.profiles),
        )


def _find_max_batch(request: _Request, out: Path | None, say: Session) -> None:
    from ._recomputation import refuse_auto

    refuse_auto(request.options, request.name, "--max-batch")
    find_max_batch(
        request.name,
        request.options,
        request.where,
        request.how,
        request.method.num_micro_batches or 1,
        request.memory_limit_bytes,
        out,
        say,
    )


def _find_plan(
    request: _Request, time_limit_s: float | None, out: Path | None, say: Session
) -> None:
    from ._model import resolve
    from ._recomputation import plans_both_ways, with_either_recomputation

    options, name, where = request.options, request.name, request.where
    is_auto = plans_both_ways(name, options, request.how)
    if is_auto:
        options = replace(options, recompute="block")
    built = resolve(name, options, where)
    started = time.perf_counter()

    def make(model: Model, within_s: float | None, **less: Any) -> Plan:
        return request.make(model, within_s, say, **less)

    try:
        if is_auto:
            limit = request.memory_limit_bytes
            found = with_either_recomputation(name, options, where, make, time_limit_s, limit)
        else:
            found = make(built, time_limit_s)
    except InfeasibleError as error:
        parts, limit = request.method.num_micro_batches, request.memory_limit_bytes
        remedies = (
            try_remedies(name, options, built, where, request.how, parts, limit, say)
            if request.search.tries
            else ()
        )
        say.finish(no_plan(built, where, request.method.method, parts, error, remedies))
        raise with_remedies(error, remedies) from None
    except KeyboardInterrupt as stopped:
        _interrupted(getattr(stopped, "plan", None), time.perf_counter() - started, out, say)
        raise typer.Exit(INTERRUPTED) from None
    _deliver(found, time.perf_counter() - started, out, say)


def make_plan(
    model: Model,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    micro_batches: int | Literal["auto"] | None,
    say: Session,
    *,
    semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    verify: bool = False,
    **of_profiles: Any,
) -> Plan:
    """Plan a model, with progress on standard error.

    Args:
        of_profiles: see `aliquot.plan`.
    """
    from .._api import plan as find_plan
    from ._model import user_code

    with user_code(model.name), search_progress(say) as report:
        return find_plan(
            model.step,
            model.state,
            model.batch,
            cluster=where,
            method=how,
            num_micro_batches=micro_batches,
            micro_batch_semantics=semantics,
            memory_limit_bytes=memory_limit_bytes,
            model=model.reference,
            verify=verify,
            progress=report,
            **of_profiles,
        )


def _deliver(plan: Plan, plan_s: float, out: Path | None, say: Session) -> None:
    if out is not None:
        plan.save(out)
    say.show(str(plan))
    if out is not None:
        say.show(f"\nWritten to {out}. Read on with: aliquot explain {out}")
    say.finish(summary(plan, plan_s, out))


def _interrupted(best: Plan | None, plan_s: float, out: Path | None, say: Session) -> None:
    if best is None:
        say.note("interrupted before any plan was complete; nothing was written.")
        return
    say.note("interrupted; this is the best plan so far.")
    _deliver(best, plan_s, out, say)

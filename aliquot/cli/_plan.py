"""`aliquot plan`: from a model's name and a cluster to a plan file."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import InfeasibleError
from ._devices import use_host_only
from ._groups import option
from ._interrupts import INTERRUPTED
from ._max_batch import find_max_batch
from ._model_options import MemoryLimit, ModelOptions, read_memory_limit
from ._optimizer_options import OptimizerOptions
from ._options import Json, ModelName, NetworkGbps, check_destination, read_cluster, read_time_limit
from ._options_file import FileOptions
from ._plan_json import no_plan, summary
from ._plan_options import MethodOptions, ProfileOptions, SearchOptions
from ._progress import search_progress
from ._remedies import try_remedies, with_remedies
from ._session import Session, session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan
    from ._model import ZooOptions


def plan(
    *,
    model: ModelName,
    cluster: str = option("A preset such as 8xH100, a TOML file, or detect.", ...),
    model_options: ModelOptions,
    method_options: MethodOptions,
    profile_options: ProfileOptions,
    search_options: SearchOptions,
    optimizer_options: OptimizerOptions,
    file_options: FileOptions,
    network_gbps: NetworkGbps = None,
    memory_limit: MemoryLimit = None,
    out: Path | None = option("Write the plan to this file."),
    every: bool = option("Print arrays and collectives, too.", False, names="--all"),
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
        where = read_cluster(cluster, network_gbps)
        from ._model import find_factory

        if ":" in model:
            # Its module may register the schedule that is asked for.
            find_factory(model)
        request = _Request(
            name=model,
            where=where,
            how=method_options.read(),
            options=model_options.read(optimizer_options.read()),
            memory_limit_bytes=read_memory_limit(memory_limit),
            method=method_options,
            profiles=profile_options,
            search=search_options,
            every=every,
        )
        if search_options.max_batch:
            of_plan = request.of_plan
            find_max_batch(
                request.name,
                request.options,
                request.where,
                request.how,
                of_plan.pop("num_micro_batches"),
                out,
                say,
                verify=request.search.verify,
                **of_plan,
            )
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
    every: bool

    @property
    def of_plan(self) -> dict[str, Any]:
        """Arguments of `aliquot.plan` that are the same whatever is asked."""
        return {
            "num_micro_batches": self.method.wanted_micro_batches,
            "micro_batch_semantics": self.method.micro_batch_semantics,
            "memory_limit_bytes": self.memory_limit_bytes,
        }


def _find_plan(
    request: _Request, time_limit_s: float | None, out: Path | None, say: Session
) -> None:
    from .._variants import plan_variants
    from ._model import tell_attention, tell_model, user_code
    from ._recomputation import model_to_plan, variants_of

    name, where, how = request.name, request.where, request.how
    say.voice.doing = f"building {name}"
    model = model_to_plan(name, request.options, where)
    tell_model(name, model.workload.config if model.workload else None, say)
    tell_attention(model, where, say)
    variants = variants_of(model)
    started = time.perf_counter()
    try:
        with user_code(name), search_progress(say) as report:
            found = plan_variants(
                variants,
                cluster=where,
                method=how,
                verify=request.search.verify,
                time_limit_s=time_limit_s,
                objective=request.search.objective,
                progress=report,
                **request.of_plan,
                **asdict(request.profiles),
            )
    except InfeasibleError as error:
        remedies = (
            try_remedies(name, request.options, variants, where, how, error, say, **request.of_plan)
            if request.search.tries
            else ()
        )
        parts = request.method.num_micro_batches
        say.finish(no_plan(model, where, request.method.method, parts, error, remedies))
        raise with_remedies(error, remedies) from None
    except KeyboardInterrupt as stopped:
        best = getattr(stopped, "plan", None)
        if best is None:
            say.note("interrupted before any plan was complete; nothing was written.")
        else:
            say.note("interrupted; this is the best plan so far.")
            _deliver(best, time.perf_counter() - started, request.every, out, say)
        raise typer.Exit(INTERRUPTED) from None
    _deliver(found, time.perf_counter() - started, request.every, out, say)


def _deliver(plan: Plan, plan_s: float, every: bool, out: Path | None, say: Session) -> None:
    if out is not None:
        plan.save(out)
    say.show(plan.describe(every=every))
    if out is not None:
        say.show(f"\nWritten to {out}. Read on with: aliquot explain {out}")
    say.finish(summary(plan, plan_s, out))

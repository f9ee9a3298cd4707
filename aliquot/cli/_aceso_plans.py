"""`aliquot aceso export | import`: plans as Aceso's configurations, and the reverse."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ..core import InputError, nearest
from ._aceso_models import (
    aceso_chain,
    aceso_family,
    aceso_names,
    aceso_operators,
    aceso_settings,
    aceso_size,
)
from ._aceso_options import AcesoFile
from ._devices import use_host_only
from ._groups import option
from ._model_options import Dtype, MemoryLimit, ModelOptions, SeqLen, Settings, read_memory_limit
from ._optimizer_options import OptimizerOptions
from ._options import DescribedCluster, Json, NetworkGbps, PlanFile, read_cluster
from ._session import session


def export_plan(
    plan_file: PlanFile,
    out: Path = option("The configuration to write.", ..., metavar="CONFIG.json"),
    as_json: Json = False,
) -> None:
    """Write a plan of a GPT, T5 or Wide-ResNet as a configuration that Aceso's runtime reads."""
    with session(as_json) as say:
        use_host_only()
        from ..graph import capture
        from ..interop.aceso import configuration_of, configuration_to_dict, write_configuration
        from ..planners import apply_plan
        from ..plans import Plan, layers_recompute
        from ._model import workload_of

        plan = Plan.load(plan_file)
        if plan.model.kind != "zoo":
            raise InputError(
                f"{plan_file} is a plan of {plan.model.name or 'a function'}, and Aceso has"
                " operators for its own models alone: export plans of GPTs, T5s and"
                " Wide-ResNets of the zoo, such as gpt-1.3b."
            )
        if plan.model.settings.get("scan"):
            raise InputError(
                f"{plan_file} loops over stacked layers, and Aceso's configurations say something"
                " about each. Plan it again without --scan."
            )
        if plan.model.settings.get("attention", "plain") != "plain":
            raise InputError(
                f"{plan_file} has fused attention ({plan.model.settings['attention']}), and Aceso"
                " has operators for its parts. Plan it again with --attention plain."
            )
        workload = workload_of(plan.model)
        config = workload.config
        family = aceso_family(config)
        step = apply_plan(plan, capture(workload.train_step, workload.state, workload.batch))
        configuration = configuration_of(
            step,
            aceso_operators(step.graph, config),
            family=family,
            model_size=aceso_size(config),
            global_batch=int(workload.settings["global_batch"]),
            settings=aceso_settings(config),
            layers_recompute=layers_recompute(plan) == "block",
        )
        write_configuration(configuration, out)
        stages = ", ".join(
            f"{len(s.tensor)} operators on {s.num_devices} GPU{'s' if s.num_devices > 1 else ''}"
            for s in configuration.stages
        )
        say.show(
            f"written: {out} ({family} {configuration.model_size}, micro-batches of"
            f" {configuration.micro_batch}: {stages})"
        )
        say.finish({"configuration": str(out), "config": configuration_to_dict(configuration)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepOptions:
    """What the configuration does not say of the step and its devices."""

    network_gbps: NetworkGbps = None
    seq_len: SeqLen = None
    dtype: Dtype = None
    settings: Settings = None
    memory_limit: MemoryLimit = None


def import_plan(
    *,
    config_file: AcesoFile,
    model: str = option("A GPT, T5 or Wide-ResNet of the zoo, such as gpt-1.3b.", ...),
    cluster: DescribedCluster,
    out: Path = option("The plan to write.", ..., metavar="PLAN.json"),
    optimizer_options: OptimizerOptions,
    of_step: _StepOptions,
    as_json: Json = False,
) -> None:
    """Make a plan of a GPT, T5 or Wide-ResNet from a configuration of Aceso's: its stages, and the
    degrees of each operator.
    """
    with session(as_json) as say:
        where = read_cluster(cluster, of_step.network_gbps)
        if cluster != "detect":
            use_host_only()
        from ..core import listing, version_of
        from ..graph import capture
        from ..interop.aceso import configuration_faults, plan_of, read_configuration
        from ..planners import Task
        from ..zoo import MODELS
        from ._model import resolve

        configuration = read_configuration(config_file)
        if model not in MODELS:
            raise InputError(
                f"there is no model {model!r}: {nearest(model, MODELS, 'aliquot models')}"
            )
        options = ModelOptions(
            global_batch=configuration.global_batch,
            seq_len=of_step.seq_len,
            dtype=of_step.dtype,
            recompute="none",
            attention="plain",
            settings=of_step.settings,
        ).read(optimizer_options.read())
        limit_bytes = read_memory_limit(of_step.memory_limit)
        known = resolve(model, options, where)
        assert known.workload is not None
        config = known.workload.config
        faults = configuration_faults(
            configuration,
            aceso_family(config),
            aceso_names(config),
            aceso_settings(config),
            aceso_chain(config)["settings"],
            where,
        )
        if faults:
            raise InputError(
                listing(f"{config_file} does not fit {model} on {where.name}", faults, "")
            )
        started = time.perf_counter()
        graph = capture(known.step, known.state, known.batch)
        task = Task(
            graph=graph,
            cluster=where,
            memory_limit_bytes=limit_bytes,
            semantics=aceso_chain(config).get("micro_batch_semantics", "exact"),
        )
        plan = plan_of(
            configuration,
            aceso_operators(graph, config),
            task,
            model=known.reference,
            version=version_of("aliquot"),
            trace_s=time.perf_counter() - started,
        )
        plan.save(out)
        say.show(str(plan))
        say.show(f"Written to {out}. Read on with: aliquot explain {out}")
        say.finish(
            {
                "plan": str(out),
                "step_time_s": plan.prediction.step_time_s,
                "notes": list(plan.notes),
            }
        )

"""`aliquot aceso export | import`: plans as Aceso's configurations, and the reverse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, nearest
from ._devices import use_host_only
from ._model_options import (
    Dtype,
    MemoryLimit,
    ModelOptions,
    SeqLen,
    Settings,
    read_memory_limit,
)
from ._options import DescribedCluster, Json, PlanFile, read_cluster
from ._session import session

if TYPE_CHECKING:
    from ..graph import Graph
    from ..interop.aceso import OperatorMap
    from ..zoo import ModelConfig, T5Config, Workload


def export_plan(
    plan_file: PlanFile,
    out: Annotated[
        Path,
        typer.Option(metavar="CONFIG.json", help="The configuration to write.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """Write a plan of a GPT or T5 as a configuration that Aceso's runtime reads."""
    with session(as_json) as say:
        use_host_only()
        from ..graph import capture
        from ..interop.aceso import configuration_of, configuration_to_dict, write_configuration
        from ..planners import apply_plan
        from ..plans import Plan
        from ._model import workload_of

        plan = Plan.load(plan_file)
        if plan.model.kind != "zoo":
            raise InputError(
                f"{plan_file} is a plan of {plan.model.name or 'a function'}, and Aceso has"
                " operators for its own models alone: export plans of GPTs and T5s of the zoo,"
                " such as gpt-1.3b."
            )
        if plan.model.settings.get("scan"):
            raise InputError(
                f"{plan_file} loops over stacked layers, and Aceso's configurations say something"
                " about each. Plan it again without --scan."
            )
        workload = workload_of(plan.model)
        config = _transformer(workload, plan.model.name)
        step = apply_plan(plan, capture(workload.train_step, workload.state, workload.batch))
        configuration = configuration_of(
            step,
            _operators(step.graph, config),
            family=config.family,
            model_size=_size(config),
            global_batch=int(workload.settings["global_batch"]),
            settings=_settings(config),
            layers_recompute=workload.settings["recompute"] == "block",
        )
        write_configuration(configuration, out)
        stages = ", ".join(
            f"{len(s.tensor)} operators on {s.num_devices} GPU{'s' if s.num_devices > 1 else ''}"
            for s in configuration.stages
        )
        say.show(
            f"written: {out} ({config.family} {configuration.model_size}, micro-batches of"
            f" {configuration.micro_batch}: {stages})"
        )
        say.finish({"configuration": str(out), "config": configuration_to_dict(configuration)})


def import_plan(
    config_file: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A configuration in Aceso's JSON.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="A GPT or T5 of the zoo, such as gpt-1.3b.", show_default=False
        ),
    ],
    cluster: DescribedCluster,
    out: Annotated[
        Path, typer.Option(metavar="PLAN.json", help="The plan to write.", show_default=False)
    ],
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    settings: Settings = None,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Make a plan of a GPT or T5 from a configuration of Aceso's: its stages, and the degrees of
    each operator.
    """
    with session(as_json) as say:
        where = read_cluster(cluster)
        if cluster != "detect":
            use_host_only()
        from importlib.metadata import version

        from ..core import listing
        from ..graph import capture
        from ..interop.aceso import configuration_faults, plan_of, read_configuration
        from ..zoo import MODELS
        from ._model import resolve

        configuration = read_configuration(config_file)
        if model not in MODELS:
            raise InputError(f"there is no model {model!r}: {nearest(model, MODELS)}")
        options = ModelOptions(
            global_batch=configuration.global_batch,
            seq_len=seq_len,
            dtype=dtype,
            recompute="none",
            settings=settings,
        ).read()
        limit_bytes = read_memory_limit(memory_limit)
        known = resolve(model, options, where)
        assert known.workload is not None
        config = _transformer(known.workload, model)
        faults = configuration_faults(
            configuration,
            config.family,
            _chain(config),
            _settings(config),
            _described(config)["settings"],
            where,
        )
        if faults:
            raise InputError(
                listing(f"{config_file} does not fit {model} on {where.name}", faults, "")
            )
        started = time.perf_counter()
        graph = capture(known.step, known.state, known.batch)
        plan = plan_of(
            configuration,
            graph,
            _operators(graph, config),
            where,
            model=known.reference,
            version=version("aliquot"),
            trace_s=time.perf_counter() - started,
            memory_limit_bytes=limit_bytes,
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


def _transformer(workload: Workload, name: str) -> ModelConfig | T5Config:
    from ..zoo import ModelConfig, T5Config

    config = workload.config
    if isinstance(config, T5Config) or (isinstance(config, ModelConfig) and config.family == "gpt"):
        return config
    raise InputError(
        f"{name} is no GPT or T5: Aceso names the operators of its own models, and this command"
        " knows those of GPTs (gpt-..., scale-layer-...) and T5s (t5-...)."
    )


def _described(config: ModelConfig | T5Config) -> Mapping[str, Any]:
    """Aceso's chain of a model's family, as `chains.toml` describes it."""
    from ..interop.aceso import built_in_chains

    described: Mapping[str, Any] = built_in_chains()[config.family]
    return described


def _operators(graph: Graph, config: ModelConfig | T5Config) -> OperatorMap:
    from ..interop.aceso import map_operators

    return map_operators(graph, _chain(config), _described(config))


def _chain(config: ModelConfig | T5Config) -> list[str]:
    """Names of the operators of Aceso's chain of a model."""
    from ..interop.aceso import make_chain

    chain = make_chain(_described(config), {"num_layers": config.num_layers})
    return [operator.name for operator in chain.operators]


def _settings(config: ModelConfig | T5Config) -> dict[str, Any]:
    """The model's shape as Aceso's runtime reads it."""
    sizes = {key: getattr(config, name) for key, name in _described(config)["settings"].items()}
    if "kv_channels" in sizes:
        sizes["kv_channels"] = config.head_dim
    return {**sizes, "max_position_embeddings": config.seq_len}


def _size(config: ModelConfig | T5Config) -> str:
    return config.name.partition("-")[2].replace(".", "_").upper()

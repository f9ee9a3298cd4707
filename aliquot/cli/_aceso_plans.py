"""`aliquot aceso export | import`: plans as Aceso's configurations, and the reverse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, nearest
from ._devices import use_host_only
from ._model_options import Dtype, MemoryLimit, SeqLen, Settings, model_options
from ._options import Json, PlanFile, read_cluster
from ._session import session

if TYPE_CHECKING:
    from ..graph import Graph
    from ..interop.aceso import OperatorMap
    from ..zoo import ModelConfig, Workload


def export_plan(
    plan_file: PlanFile,
    out: Annotated[Path, typer.Option(metavar="CONFIG.json", help="The configuration to write.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Write a plan of a GPT as a configuration that Aceso's runtime reads."""
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
                f"{plan_file} is a plan of {plan.model.name or 'a function'}, and Aceso has operators for its own models "
                "alone: export plans of GPTs of the zoo, such as gpt-1.3b."
            )
        if plan.model.settings.get("scan"):
            raise InputError(
                f"{plan_file} loops over stacked layers, and Aceso's configurations say something about each. Plan it again "
                "without --scan."
            )
        workload = workload_of(plan.model)
        config = _gpt(workload, plan.model.name)
        step = apply_plan(plan, capture(workload.train_step, workload.state, workload.batch))
        configuration = configuration_of(
            step,
            _operators(step.graph, config),
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
            f"written: {out} (gpt {configuration.model_size}, micro-batches of {configuration.micro_batch}: {stages})"
        )
        say.finish({"configuration": str(out), "config": configuration_to_dict(configuration)})


def import_plan(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A configuration in Aceso's JSON.")],
    model: Annotated[str, typer.Option("--model", help="A GPT of the zoo, such as gpt-1.3b.", show_default=False)],
    cluster: Annotated[str, typer.Option(help="A preset such as 8xH100, or a TOML file.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="PLAN.json", help="The plan to write.", show_default=False)],
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    settings: Settings = None,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Make a plan of a GPT from a configuration of Aceso's: its stages, and the degrees of each operator."""
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
        options, limit_bytes = model_options(
            configuration.global_batch, seq_len, dtype, "none", False, settings, memory_limit
        )
        known = resolve(model, options, where)
        assert known.workload is not None
        config = _gpt(known.workload, model)
        faults = configuration_faults(configuration, _chain(config), _settings(config), where)
        if faults:
            raise InputError(listing(f"{config_file} does not fit {model} on {where.name}", faults, ""))
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
        say.finish({"plan": str(out), "step_time_s": plan.prediction.step_time_s, "notes": list(plan.notes)})


def _gpt(workload: Workload, name: str) -> ModelConfig:
    from ..zoo import ModelConfig

    config = workload.config
    if not isinstance(config, ModelConfig) or config.family != "gpt":
        raise InputError(
            f"{name} is no GPT: Aceso names the operators of its own models, and this command knows those of GPTs (gpt-..., "
            "scale-layer-...)."
        )
    return config


def _operators(graph: Graph, config: ModelConfig) -> OperatorMap:
    from ..interop.aceso import map_gpt

    return map_gpt(graph, _chain(config))


def _chain(config: ModelConfig) -> list[str]:
    """Names of the operators of Aceso's chain of a GPT."""
    from ..interop.aceso import built_in_chains, make_chain

    chain = make_chain(built_in_chains()["gpt"], {"num_layers": config.num_layers})
    return [operator.name for operator in chain.operators]


def _settings(config: ModelConfig) -> dict[str, Any]:
    """The model's shape as Aceso's runtime reads it."""
    return {
        "num_layers": config.num_layers,
        "seq_length": config.seq_len,
        "max_position_embeddings": config.seq_len,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.hidden_size,
    }


def _size(config: ModelConfig) -> str:
    return config.name.partition("-")[2].replace(".", "_").upper()

"""`aliquot aceso export | import`: plans as Aceso's configurations, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError
from ._devices import use_host_only
from ._options import Json, PlanFile
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
    from ..interop.aceso import built_in_chains, make_chain, map_gpt

    chain = make_chain(built_in_chains()["gpt"], {"num_layers": config.num_layers})
    return map_gpt(graph, [operator.name for operator in chain.operators])


def _settings(config: ModelConfig) -> dict[str, Any]:
    """What Aceso's runtime reads of the model's shape."""
    return {
        "num_layers": config.num_layers,
        "seq_length": config.seq_len,
        "max_position_embeddings": config.seq_len,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.hidden_size,
    }


def _size(config: ModelConfig) -> str:
    return config.name.partition("-")[2].replace(".", "_").upper()

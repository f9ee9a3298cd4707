"""`aliquot aceso`: Aceso's measured databases and configurations."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from ..core import InputError
from ._aceso_options import AcesoChain, AcesoDatabase, AcesoFile
from ._groups import argument, option
from ._options import Json
from ._session import session


def show(
    database: Path = argument("A folder that Aceso's profiler wrote.", metavar="DIR"),
    as_json: Json = False,
) -> None:
    """Show which models a database holds measurements of, and what is missing."""
    from ..interop.aceso import load_database, models_in
    from ..report import columns

    with session(as_json) as say:
        databases = [load_database(database, model) for model in models_in(database)]
        rows = [
            (
                each.model,
                str(len(each.operators)),
                _numbers(each.micro_batches),
                _numbers(each.tensor_degrees),
                _numbers(each.algorithms),
                str(sum(map(len, each.collectives.values()))),
                str(len(each.missing)),
            )
            for each in databases
        ]
        header = (
            "model",
            "operators",
            "micro-batch sizes",
            "tensor degrees",
            "algorithms",
            "collectives",
            "missing",
        )
        say.show(columns(f"Measurements in {database}", header, rows, right=(1, 5, 6)))
        for each in databases:
            for line in each.missing[:5]:
                say.note(f"missing in {each.model}: {line}")
        say.finish({each.model: _facts(each) for each in databases})


def evaluate(
    *,
    configuration: AcesoFile,
    database: AcesoDatabase,
    nodes: int = option("Number of nodes.", 1, min=1),
    gpus_per_node: int = option("GPUs of each node.", 8, min=1),
    memory_limit_mb: float | None = option("MiB that a device may use."),
    chain: AcesoChain = None,
    as_json: Json = False,
) -> None:
    """Predict iteration time and memory of a configuration with Aceso's performance model, and what
    its faults change.
    """
    from ..interop.aceso import (
        Faults,
        Judge,
        built_in_chains,
        evaluate_configuration,
        load_database,
        make_chain,
        measured_size,
        read_chain,
        read_configuration,
    )
    from ..report import columns

    with session(as_json) as say:
        read = read_configuration(configuration)
        used = sum(stage.num_devices for stage in read.stages)
        if used != nodes * gpus_per_node:
            raise InputError(
                f"{configuration} is for {used} GPUs, and {nodes} nodes of {gpus_per_node} have"
                f" {nodes * gpus_per_node}. Give --nodes and --gpus-per-node."
            )
        known = built_in_chains()
        if chain is None and read.model_name not in known:
            raise InputError(
                f"Nothing is known of the operators of {read.model_name!r}; known are"
                f" {', '.join(known)}. Describe them in a file and pass it with --chain."
            )
        description = read_chain(chain) if chain else known[read.model_name]
        operators = make_chain(description, read.settings)
        measured = load_database(
            database, f"{read.model_name}_{measured_size(description, read.model_size)}"
        )

        def judge(faults: Faults) -> Any:
            return evaluate_configuration(
                read,
                operators,
                measured,
                gpus_per_node=gpus_per_node,
                judge=Judge(name="aceso", faults=faults),
            )

        performance = judge(Faults())
        mended = {f.name: judge(replace(Faults(), **{f.name: False})) for f in fields(Faults)}
        rows = [
            (
                str(k),
                str(len(stage.tensor)),
                str(stage.num_devices),
                f"{e.busy_ms:,.2f}",
                f"{e.compute_ms:.2f}",
                f"{e.transfer_ms:.2f}",
                f"{e.memory_mb:,.0f}",
                f"{e.reserved_mb:,.0f}",
            )
            for k, (stage, e) in enumerate(zip(read.stages, performance.stages, strict=True))
        ]
        header = (
            "stage",
            "operators",
            "GPUs",
            "iteration ms",
            "compute ms",
            "transfers ms",
            "memory MiB",
            "of it reserved",
        )
        seconds = performance.iteration_time_ms / 1000
        peak = max(stage.memory_mb for stage in performance.stages)
        lines = [
            f"iteration time  {performance.iteration_time_ms:,.2f} ms (Aceso's performance model), "
            f"{read.global_batch / seconds:,.2f} samples/s"
        ]
        if memory_limit_mb is not None:
            verdict = "fits" if peak <= memory_limit_mb else "does not fit"
            lines.append(
                f"memory          {verdict}: {peak:,.0f} MiB of {memory_limit_mb:,.0f} on the"
                " fullest device"
            )
        say.show("\n".join(lines))
        say.show(
            columns(
                "Stages, times for one micro-batch but the iteration", header, rows, right=range(8)
            )
        )
        changes = [
            (
                name,
                f"{each.iteration_time_ms:,.2f}",
                f"{max(s.memory_mb for s in each.stages):,.0f}",
            )
            for name, each in mended.items()
        ]
        say.show(
            columns(
                "With one fault of the model mended",
                ("fault", "iteration ms", "most MiB"),
                changes,
                right=(1, 2),
            )
        )
        if performance.missing:
            say.note(
                f"{len(performance.missing)} collectives were never measured and count 100 s each:"
                f" {performance.missing[0]}, ..."
            )
        say.finish(
            {
                "iteration_time_ms": performance.iteration_time_ms,
                "stage_time_ms": [stage.busy_ms for stage in performance.stages],
                "stage_memory_mb": [stage.memory_mb for stage in performance.stages],
                "mended_iteration_time_ms": {
                    name: each.iteration_time_ms for name, each in mended.items()
                },
                "missing": list(performance.missing),
                "judge": "aceso",
            }
        )
        if memory_limit_mb is not None and peak > memory_limit_mb:
            raise typer.Exit(1)


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _facts(performance: Any) -> dict[str, Any]:
    return {
        "operators": list(performance.operators),
        "micro_batches": list(performance.micro_batches),
        "tensor_degrees": list(performance.tensor_degrees),
        "algorithms": list(performance.algorithms),
        "collectives": {
            f"{kind}_{n}": len(times) for (kind, n), times in performance.collectives.items()
        },
        "missing": list(performance.missing),
    }

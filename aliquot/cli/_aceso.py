"""`aliquot aceso`: Aceso's measured databases and configurations."""

from __future__ import annotations

import itertools
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
    from ..report import Column, table

    with session(as_json) as say:
        databases = [load_database(database, model) for model in models_in(database)]
        say.show(
            table(
                f"Measurements in {database}",
                databases,
                Column("model", "model"),
                Column("operators", lambda each: len(each.operators), number=True),
                Column("micro-batch sizes", "micro_batches", _numbers),
                Column("tensor degrees", "tensor_degrees", _numbers),
                Column("algorithms", "algorithms", _numbers),
                Column(
                    "collectives",
                    lambda each: sum(map(len, each.collectives.values())),
                    number=True,
                ),
                Column("missing", lambda each: len(each.missing), number=True),
            )
        )
        answer = {}
        for each in databases:
            for line in each.missing[:5]:
                say.note(f"missing in {each.model}: {line}")
            sizes = {f"{kind}_{n}": len(times) for (kind, n), times in each.collectives.items()}
            answer[each.model] = {
                "operators": list(each.operators),
                "micro_batches": list(each.micro_batches),
                "tensor_degrees": list(each.tensor_degrees),
                "algorithms": list(each.algorithms),
                "collectives": sizes,
                "missing": list(each.missing),
            }
        say.finish(answer)


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
    from ..report import Column, table

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
        seconds = performance.iteration_time_ms / 1000
        peak = _peak_mb(performance)
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
            table(
                "Stages, times for one micro-batch but the iteration",
                zip(itertools.count(), read.stages, performance.stages),
                Column("stage", lambda row: row[0], number=True),
                Column("operators", lambda row: len(row[1].tensor), number=True),
                Column("GPUs", lambda row: row[1].num_devices, number=True),
                Column("iteration ms", lambda row: f"{row[2].busy_ms:,.2f}", number=True),
                Column("compute ms", lambda row: f"{row[2].compute_ms:.2f}", number=True),
                Column("transfers ms", lambda row: f"{row[2].transfer_ms:.2f}", number=True),
                Column("memory MiB", lambda row: f"{row[2].memory_mb:,.0f}", number=True),
                Column("of it reserved", lambda row: f"{row[2].reserved_mb:,.0f}", number=True),
            )
        )
        say.show(
            table(
                "With one fault of the model mended",
                mended.items(),
                Column("fault", lambda row: row[0]),
                Column("iteration ms", lambda row: f"{row[1].iteration_time_ms:,.2f}", number=True),
                Column("most MiB", lambda row: f"{_peak_mb(row[1]):,.0f}", number=True),
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


def _peak_mb(performance: Any) -> float:
    return max(float(stage.memory_mb) for stage in performance.stages)


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))

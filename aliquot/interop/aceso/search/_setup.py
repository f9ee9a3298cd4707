"""A search problem from a user's settings: a database, a model with its size, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....core import InputError
from .._chain import built_in_chains, make_chain, measured_size, read_chain
from .._database import load_database
from .._judge import Judge
from ._problem import SearchProblem, require_measured


def read_problem(
    folder: Path,
    *,
    model: str,
    size: str,
    num_nodes: int,
    gpus_per_node: int,
    global_batch: int,
    memory_limit_mb: float,
    micro_batches: Sequence[int],
    judge: Judge,
    chain: Path | None = None,
    num_layers: int | list[int] | None = None,
) -> tuple[SearchProblem, tuple[str, ...]]:
    """The problem, and a line for each micro-batch that is left out for lack of measurements.

    Args:
        folder: folder of the database.
        chain: file that describes the operators; without it, `model` is a family of Aceso's.
        num_layers: number of layers instead of the size's own; a list of numbers of blocks if the
            model has sections.

    Raises:
        InputError: an unknown family or size, a number out of range, or missing measurements.
    """
    numbers = [
        ("the number of nodes", num_nodes),
        ("the number of GPUs of a node", gpus_per_node),
        ("the global batch", global_batch),
        ("the memory limit in MiB", memory_limit_mb),
        *(("a micro-batch", size) for size in micro_batches),
    ]
    faults = [f"{what} must be at least 1, got {value}" for what, value in numbers if value < 1]
    if not micro_batches:
        faults.append("at least one micro-batch size is needed")
    if faults:
        raise InputError(
            "The search cannot begin:\n" + "\n".join(f"  - {fault}" for fault in faults)
        )
    if chain is not None:
        description = read_chain(chain)
    else:
        families = built_in_chains()
        if model not in families:
            raise InputError(
                f"Nothing is known of the operators of {model!r}; known families are"
                f" {', '.join(families)}. Describe the operators in a TOML file and pass it with"
                " --chain."
            )
        description = families[model]
    settings = dict(
        _settings(description, model, size, own=chain is not None or num_layers is not None)
    )
    settings.pop("measured_as", None)
    if num_layers is not None:
        settings["num_layers"] = num_layers
    elif any(
        isinstance(group, dict)
        and isinstance(group.get("repeat"), str)
        and group["repeat"] not in settings
        for group in description.get("groups", ())
    ):
        raise InputError(f"{model} {size} has no number of layers of its own. Give --num-layers.")
    problem = SearchProblem(
        chain=make_chain(description, settings),
        database=load_database(folder, f"{model}_{measured_size(description, size)}"),
        model_name=model,
        model_size=size,
        settings=settings,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        global_batch=global_batch,
        micro_batches=tuple(sorted(set(micro_batches))),
        memory_limit_mb=memory_limit_mb,
        judge=judge,
    )
    return require_measured(problem)


def _settings(description: Any, model: str, size: str, *, own: bool) -> dict[str, Any]:
    sizes = description.get("sizes", {})
    if size in sizes:
        return dict(sizes[size])
    if own:
        return {}
    raise InputError(
        f"{model} has no size {size!r}. Sizes are {', '.join(sizes)}; others need --num-layers, or"
        " --chain."
    )

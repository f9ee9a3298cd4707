r"""Does what an update computes of all gradients leave alone how weights are split?

Clipping by the norm of all gradients, a test of whether they are finite and float16's loss scale
read every gradient and make one number. Folding must not take weights of one shape for equal ones
for that. Models of the zoo with few layers, and random small steps, with and without: the arrays
that share a decision, the number of decisions, and the splits under ZeRO-3 and tensor parallelism
must be the same. Random steps without repeats must decide as if nothing was folded.

    python benchmarks/clipped_steps.py [--quick] [--every-size] [--seed 0] [--steps 500] \
        [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _results import Journal, Report, options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from planners.random_steps import RandomStep, random_step

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import target_for
from aliquot.core import InfeasibleError, InputError
from aliquot.graph import Graph, capture, fold
from aliquot.planners import method_by_name
from aliquot.sharding import build_nodes, index_nodes

CLUSTER = aq.Cluster.preset("8xH100")
METHODS = ("zero3", "tp:8")
DTYPES = ("bf16", "float16")
LAYERS = 4
# One of each kind: their other sizes have the same operators.
MODELS = (
    "gpt-125m",
    "bert-base",
    "llama-7b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-moe-16b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-like-20b",
    "moe-380m",
    "t5-770m",
    "wide-resnet-250m",
)


def decisions(graph: Graph, *, repeats: bool = True) -> tuple[set[frozenset[str]], int]:
    """Inputs and outputs that share a decision, and the number of decisions; scalars have none."""
    nodes = build_nodes(index_nodes(graph, repeats=repeats), target_for(CLUSTER.device))
    paths: dict[int, set[str]] = defaultdict(set)
    for item, port in zip(graph.inputs, nodes.input_ports, strict=True):
        paths[port.node].add(item.path)
    for output, port in zip(graph.outputs, nodes.output_ports, strict=True):
        paths[port.node].add(f"new {output.path}")
    paths.pop(-1, None)
    return {frozenset(shared) for shared in paths.values()}, len(nodes.nodes)


def splits(arguments: tuple[Any, ...], method: str) -> dict[str, str] | str:
    """The splits of a plan, or the name of the error that refuses it. Of ZeRO-3 only the axes that
    split each array: which dim they split is open where several cost the same.
    """
    try:
        plan = aq.plan(*arguments, cluster=CLUSTER, method=method_by_name(method))
    except (InfeasibleError, InputError) as error:
        return type(error).__name__
    specs = plan.partition_specs().items()
    if method == "zero3":
        return {path: str(sorted(str(axis) for axis in spec if axis)) for path, spec in specs}
    return {path: str(spec) for path, spec in specs}


def model_row(model: str, dtype: str) -> dict[str, Any]:
    """One model of the zoo, plain and clipped."""
    layers = {} if model.startswith("wide-resnet") else {"num_layers": LAYERS}
    build = functools.partial(zoo.build, model, 64, overrides=layers, dtype=dtype)
    steps = []
    for norm in (None, 1.0):
        work = build(clip_norm=norm)
        steps.append((work.train_step, work.state, work.batch))
    (plain, count), (clipped, clipped_count) = [decisions(capture(*step)) for step in steps]
    row: dict[str, Any] = {"model": model, "dtype": dtype, "decisions": count}
    row["clipped"] = clipped_count
    row["shared otherwise"] = len(plain ^ clipped)
    for method in METHODS:
        one, other = [splits(step, method) for step in steps]
        row[method] = "equal" if one == other else "other splits"
    return row


def scaled(update: Any) -> Any:
    """Clipped by the norm of all arrays."""
    total = jnp.sqrt(sum(jnp.sum(jnp.square(u)) for u in jax.tree.leaves(update)))
    return jax.tree.map(lambda u: jnp.where(total < 1, u, u / total), update)


def finite(update: Any) -> Any:
    """Nothing, unless all of it is finite."""
    flags = [jnp.isfinite(u).all() for u in jax.tree.leaves(update)]
    return jax.tree.map(lambda u: jnp.where(jnp.stack(flags).all(), u, 0), update)


KINDS: dict[str, Callable[[Any], Any]] = {"clipped": scaled, "finite": finite}


def with_update(step: RandomStep, dtype: str, change: Callable[[Any], Any]) -> Graph:
    """A random step that computes in a narrow dtype, with what it adds to its state changed."""
    narrow = jnp.bfloat16 if dtype == "bf16" else jnp.float16

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(narrow) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def changed(params: Any, batch: Any) -> Any:
        new = step.fn(cast(params), cast(batch))
        update = jax.tree.map(lambda a, b: a.astype(b.dtype) - b, new, params)
        return jax.tree.map(lambda p, u: p + u, params, change(update))

    return capture(changed, step.params, step.batch)


def random_row(number: int, seed: int) -> dict[str, Any]:
    """One random step, plain, clipped and tested for finite numbers, in both dtypes."""
    rng = np.random.default_rng([seed, number])
    step = random_step(rng)
    while step.text.startswith("forward"):
        step = random_step(rng)
    row: dict[str, Any] = {"step": number, "cases": 0, "broken": [], "text": step.text}
    for dtype in DTYPES:
        plain, count = decisions(with_update(step, dtype, lambda update: update))
        for kind, change in KINDS.items():
            graph = with_update(step, dtype, change)
            row["cases"] += 1
            if decisions(graph)[0] != plain:
                row["broken"].append(f"{dtype} {kind}: shared otherwise")
            if not fold(graph).runs and decisions(graph)[0] != decisions(graph, repeats=False)[0]:
                row["broken"].append(f"{dtype} {kind}: folded otherwise")
            if kind == "clipped" and decisions(graph)[1] != count:
                row["broken"].append(f"{dtype} {kind}: other number of decisions")
    return row


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more_options)
    journal = Journal(chosen.journal)
    report = Report(
        name="clipped_steps",
        question="Splits of weights under clipping, tests of finite gradients and loss scales",
        bar="the same arrays share decisions, and splits are the same, with and without",
        method=(
            f"From shapes alone, for 8 H100. Zoo models have {LAYERS} layers of full width and a"
            " batch of 64; Wide-ResNets are whole. Under ZeRO-3 the axes that split each array are"
            " compared, under tensor parallelism the dims, too. Random steps have one to four"
            " operators and shared weights. Deterministic: one run each."
        ),
    )
    models = MODELS[:2] if chosen.quick else zoo.MODELS if chosen.every_size else MODELS
    numbers = range(5 if chosen.quick else chosen.steps)
    zoo_rows = [
        journal.row(f"{model} {dtype}", functools.partial(model_row, model, dtype))
        for model in models
        for dtype in DTYPES
    ]
    random_rows = [
        journal.row(f"{chosen.seed} {n}", functools.partial(random_row, n, chosen.seed))
        for n in numbers
    ]
    broken_models = [
        row
        for row in zoo_rows
        if row["shared otherwise"]
        or row["decisions"] != row["clipped"]
        or any(row[method] != "equal" for method in METHODS)
    ]
    broken_steps = [row for row in random_rows if row["broken"]]
    report.summary["models in two dtypes"] = len(zoo_rows)
    report.summary["of these broken"] = len(broken_models)
    report.summary["random steps"] = len(random_rows)
    report.summary["cases of these"] = sum(row["cases"] for row in random_rows)
    report.summary["broken"] = sum(len(row["broken"]) for row in random_rows)
    report.tables["Zoo models"] = zoo_rows
    report.tables["Random steps that are broken"] = broken_steps
    return report.finish(chosen, met=not broken_models and not broken_steps)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every-size", action="store_true", help="all models of the zoo")
    parser.add_argument("--seed", type=int, default=0, help="of the random steps")
    parser.add_argument("--steps", type=int, default=500, help="how many random steps")
    parser.add_argument(
        "--journal", type=Path, help="keeps rows, so that a run that was cut off can go on"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Is a parallel step the plain step? Every method, model, form, number of micro-batches and mesh,
in both precisions.

In float64 three AdamW steps are compared: the loss, and every leaf of the state against its own
largest magnitude. In float32 AdamW turns rounding into steps wherever a gradient is nearly zero, so
three SGD steps are: the loss, and every leaf against its largest change since the start.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

import aliquot as aq
from aliquot import zoo
from aliquot.planners import (
    AbstractMethod,
    DataParallel,
    ManualParallel,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)

NUM_STEPS = 3
LOSS = {"float64": 1e-9, "float32": 1e-5}
LEAF = {"float64": 1e-9, "float32": 1e-4}
_MODELS = {"gpt": "gpt-125m", "llama": "llama-7b"}
# Divisible by eight where meshes need it and by little else: choices are few and searches short.
_SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_size": 24,
    "vocab_size": 40,
    "seq_len": 6,
}
_BATCH = 32
_MESHES = {"dp": ("8",), "zero2": ("8", "4x2"), "zero3": ("8", "4x2")}
_ALL_MESHES = ("8", "4x2", "2x2x2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination. ZeRO on 4x2 splits within hosts of two devices and repeats across four."""

    method: str
    mesh: str
    model: str
    form: str
    micro_batches: int
    dtype: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest differences of a case, relative to what the bars refer to, and the leaf that
    differs most.
    """

    loss: float
    leaf: float
    path: str


def all_cases() -> list[Case]:
    """The whole table."""
    return [
        Case(
            method=method,
            mesh=mesh,
            model=model,
            form=form,
            micro_batches=micro_batches,
            dtype=dtype,
        )
        for method in ("dp", "zero2", "zero3", "manual", "shard", "program")
        for mesh in _MESHES.get(method, _ALL_MESHES)
        for model, form, micro_batches, dtype in itertools.product(
            _MODELS, ("unrolled", "scan"), (1, 4), ("float64", "float32")
        )
    ]


def covering(cases: Sequence[Any]) -> list[Any]:
    """A sample in which every pair of choices that occurs in `cases` occurs at least once, found
    greedily.
    """
    open_pairs = {pair for case in cases for pair in pairs(case)}
    chosen = []
    while open_pairs:
        best = max(cases, key=lambda case: len(open_pairs.intersection(pairs(case))))
        open_pairs.difference_update(pairs(best))
        chosen.append(best)
    return chosen


def pairs(case: Any) -> Iterator[tuple[Any, ...]]:
    """Every two choices that the case combines."""
    return itertools.combinations([(f.name, getattr(case, f.name)) for f in fields(case)], 2)


def compare(case: Case) -> Difference:
    """Run three steps both ways."""
    with jax.enable_x64(case.dtype == "float64"):
        work = _workload(case.model, case.form, case.dtype)
        start, wanted, losses = _plain(case.model, case.form, case.dtype)
        method, cluster = _method(case)
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=method,
            num_micro_batches=case.micro_batches,
        )
        step = aq.parallelize(work.train_step, plan)
        state, loss = start, 0.0
        for batch, expected in zip(_batches(), losses, strict=True):
            state, metrics = step(state, batch)
            loss = max(loss, abs(float(metrics["loss"]) - expected) / abs(expected))
        leaf, path = largest(case.dtype, start, jax.device_get(state), wanted)
    return Difference(loss=loss, leaf=leaf, path=path)


def largest(dtype: str, start: Any, found: Any, wanted: Any) -> tuple[float, str]:
    first, have, want = _by_path(start), _by_path(found), _by_path(wanted)
    reference = want if dtype == "float64" else {path: want[path] - first[path] for path in want}
    worst = (0.0, "")
    for path in want:
        # The softmax does not see what is added to all keys: their bias has a gradient of rounding
        # alone, which nothing can be compared with. Its neighbour's scale stands for it.
        scale = np.abs(reference[path.replace("k.bias", "q.bias")]).max()
        difference = np.abs(have[path] - want[path]).max()
        if difference:
            worst = max(worst, (float(difference / scale) if scale else float("inf"), path))
    return worst


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x, np.float64)
        for path, x in leaves
    }


@functools.lru_cache(maxsize=1)
def _batches() -> tuple[dict[str, Any], ...]:
    random = np.random.default_rng(0)
    shape = (2, _BATCH, _SIZES["seq_len"])
    tokens = [random.integers(0, _SIZES["vocab_size"], shape, np.int32) for _ in range(NUM_STEPS)]
    return tuple({"inputs": t[0], "targets": t[1]} for t in tokens)


@functools.cache
def _workload(model: str, form: str, dtype: str) -> Any:
    optimizer, rate = ("adamw", 1e-3) if dtype == "float64" else ("sgd", 4.0)
    config = zoo.configure(_MODELS[model], **_SIZES)
    return zoo.build(
        config,
        _BATCH,
        dtype=dtype,
        scan=form == "scan",
        optimizer=optimizer,
        learning_rate=rate,
        recompute="block",
    )


@functools.cache
def _plain(model: str, form: str, dtype: str) -> tuple[Any, Any, tuple[float, ...]]:
    """The state before and after the plain steps on one device, and their losses. Called with the
    precision set.
    """
    work = _workload(model, form, dtype)
    state = start = jax.device_get(jax.jit(work.init)(jax.random.key(0)))
    step = jax.jit(work.train_step)
    losses = []
    for batch in _batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return start, jax.device_get(state), tuple(losses)


def _method(case: Case) -> tuple[AbstractMethod, aq.Cluster]:
    shape = tuple(map(int, case.mesh.split("x")))
    within = "host" if case.mesh != "8" else None
    cluster = aq.Cluster.preset("4x2xcpu" if within and case.method.startswith("zero") else "8xcpu")
    match case.method:
        case "dp":
            return DataParallel(), cluster
        case "zero2":
            return Zero2Parallel(shard_within=within), cluster
        case "zero3":
            return Zero3Parallel(shard_within=within), cluster
        case "manual":
            return _manual(case, shape), cluster
        case "shard":
            return ShardParallel(mesh_shape=shape), cluster
    return aq.WholeProgram(mesh_shape=shape), cluster


def _manual(case: Case, shape: tuple[int, ...]) -> ManualParallel:
    """Feed-forward layers by columns and rows over the last axis, the batch over the first."""
    data, tensor = (None if len(shape) == 1 else "x"), "xyz"[len(shape) - 1]
    lead: tuple[None, ...] = (None,) if case.form == "scan" else ()
    specs: dict[str, tuple[Any, ...]] = {
        "batch.*": (data, None),
        "state.params.layers*.up.kernel": (*lead, None, tensor),
        "state.params.layers*.down.kernel": (*lead, tensor, None),
        "state.params.embed.embedding": (tensor, None),
    }
    return ManualParallel(specs=specs, mesh_shape=shape)

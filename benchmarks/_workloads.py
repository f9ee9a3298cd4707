"""Small models and the plans that the benchmarks compare on eight virtual devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

BASE = {"gpt": "gpt-125m", "llama": "llama-7b"}
MANY_TOKENS = {
    "hidden_size": 256,
    "num_heads": 8,
    "ffn_size": 512,
    "vocab_size": 1024,
    "seq_len": 128,
}
WIDE = {"hidden_size": 512, "num_heads": 8, "ffn_size": 1024, "vocab_size": 2048, "seq_len": 32}
SIZES: dict[str, tuple[int, dict[str, int]]] = {"many tokens": (32, MANY_TOKENS), "wide": (8, WIDE)}
"""Sequences in a batch and sizes: where the batch is what there is to split, and where the weights
are.
"""

COLUMN = ("q", "k", "v", "up", "gate")
ROW = ("out", "down")


def small(
    family: str,
    *,
    size: str = "many tokens",
    scan: bool = False,
    num_layers: int = 2,
    **settings: Any,
) -> Any:
    """A small GPT or Llama training step in float32."""
    global_batch, sizes = SIZES[size]
    config = zoo.configure(BASE[family], num_layers=num_layers, **sizes)
    return zoo.build(config, global_batch, **{"dtype": "float32", "scan": scan, **settings})


def megatron(mesh_shape: tuple[int, ...], *, scan: bool) -> ManualParallel:
    """Tensor parallelism over the last axis, the batch over the others: projections by columns,
    then by rows.
    """
    data, tensor = ("x",) if len(mesh_shape) == 2 else (), "y" if len(mesh_shape) == 2 else "x"
    lead: tuple[Any, ...] = (None,) if scan else ()
    specs: dict[str, tuple[Any, ...]] = {"batch.*": (data or None, None)}
    specs |= {f"state.params.layers*.{name}.kernel": (*lead, None, tensor) for name in COLUMN}
    specs |= {f"state.params.layers*.{name}.kernel": (*lead, tensor, None) for name in ROW}
    specs["state.params.embed.embedding"] = (tensor, None)
    return ManualParallel(specs=specs, mesh_shape=mesh_shape)


def methods(
    family: str, *, scan: bool, meshes: list[tuple[int, ...]]
) -> Iterator[tuple[str, AbstractMethod]]:
    """Named methods; those that choose their own mesh once, the others for each mesh."""
    yield "dp", DataParallel()
    yield "zero2", Zero2Parallel()
    yield "zero3", Zero3Parallel()
    yield "auto", aq.Auto()
    for shape in meshes:
        yield f"shard {named(shape)}", ShardParallel(mesh_shape=shape)
    for shape in meshes:
        if len(shape) <= 2:
            skipped = {"gate"} if family == "gpt" else set()
            manual = megatron(shape, scan=scan)
            specs = {p: s for p, s in manual.specs.items() if p.split(".")[-2] not in skipped}
            yield f"megatron {named(shape)}", ManualParallel(specs=specs, mesh_shape=shape)


def named(shape: tuple[int, ...]) -> str:
    """`4x2` for (4, 2)."""
    return "x".join(map(str, shape))


def step_of(work: Any, plan: Any) -> Any:
    """The parallel step of a plan, traced but not yet compiled."""
    return aq.parallelize(work.train_step, plan).prepare(work.state, work.batch)


def plan_of(work: Any, method: AbstractMethod, **options: Any) -> Any:
    """A plan for eight virtual devices."""
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=method,
        **options,
    )

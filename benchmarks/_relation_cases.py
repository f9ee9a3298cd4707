"""Cases of `plan_relations.py`: steps, clusters and options that are planned and compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot import zoo
from aliquot.planners import AbstractMethod

METHODS: dict[str, AbstractMethod] = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "program": aq.WholeProgram(),
    "auto": aq.Auto(),
    "pipeshard": aq.PipeshardParallel(),
    "pipeshard, 2 stages": aq.PipeshardParallel(num_stages=2),
    "pipeshard, 1f1b": aq.PipeshardParallel(schedule="1f1b"),
    "pipeshard, 1 stage": aq.PipeshardParallel(num_stages=1),
}
FREE = ("auto", "pipeshard", "pipeshard, 2 stages", "pipeshard, 1f1b")
CLUSTERS = (
    "4xV100-16GB",
    "8xH100",
    "7xA100-40GB",
    "2x4xA100-40GB",
    "2x8xH100",
    "4x8xA100-80GB",
    "2x8xV100-16GB",
)
SIZES = {
    "hidden_size": 256,
    "num_heads": 8,
    "ffn_size": 1024,
    "vocab_size": 2048,
    "seq_len": 128,
    "num_layers": 2,
}
ZOO: dict[str, dict[str, int]] = {"gpt-125m": SIZES, "llama-7b": SIZES, "wide-resnet-250m": {}}
RENAMED = {"up": "z_up", "down": "a_down"}
"""Names of weights in permuted cases, whose order is the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, a cluster, a method and its options.

    Attributes:
        model: a name of the zoo; empty for a residual network of `depth` layers of `width`.
        count: number of micro-batches; None lets methods that search it choose.
        memory_share: of a device that a plan may use.
    """

    model: str = ""
    width: int = 0
    depth: int = 0
    scanned: bool
    batch: int
    cluster: str
    method: str = "auto"
    count: int | None = None
    memory_share: float | None = None
    faster_links: bool = False
    faster_devices: bool = False
    more_hosts: bool = False
    permuted: bool = False

    @property
    def key(self) -> str:
        """The case's name in the journal."""
        flags = [
            name
            for name in ("scanned", "faster_links", "faster_devices", "more_hosts", "permuted")
            if getattr(self, name)
        ]
        flags += [f"{self.memory_share:g} of the memory"] if self.memory_share else []
        counts = "free" if self.count is None else str(self.count)
        size = f"{self.model or f'{self.depth}x{self.width}'} batch {self.batch} on {self.cluster}"
        return " ".join([size, self.method, f"micro-batches {counts}", *flags])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step with shapes of its arguments, and the least that it takes by counting.

    Attributes:
        flops: of products, forward and backward; other operators are not counted.
        dtype: of the products.
        state_bytes: of the arrays that live from one step to the next.
    """

    arguments: tuple[Any, Any, Any]
    flops: float
    dtype: str
    state_bytes: int


def step_of(case: Case) -> Step:
    """The step of a case."""
    if case.model:
        work = zoo.build(
            case.model, case.batch, overrides=ZOO[case.model], dtype="bf16", scan=case.scanned
        )
        arguments = work.train_step, work.state, work.batch
        flops, dtype = float(work.flops_per_step), "bfloat16"
    else:
        arguments, dtype = residual_step(case), "float32"
        # Six times rows and weights, but the first product has no gradient for its input.
        one = 2.0 * case.batch * case.width * 4 * case.width
        flops = (6 * case.depth - (0 if case.scanned else 1)) * one
    leaves = jax.tree.leaves(arguments[1])
    return Step(
        arguments=arguments,
        flops=flops,
        dtype=dtype,
        state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )


def residual_step(case: Case) -> tuple[Any, Any, Any]:
    """A residual network of two products a layer with momentum, and shapes of its arguments."""
    names = tuple(RENAMED.values() if case.permuted else RENAMED)

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w[names[0]]) @ w[names[1]], None

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            if case.scanned:
                x, _ = jax.lax.scan(layer, x, params)
            else:
                for w in params:
                    x, _ = layer(x, w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        return {
            "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu),
            "mu": mu,
        }, value

    lead = (case.depth,) if case.scanned else ()
    shapes = ((case.width, 4 * case.width), (4 * case.width, case.width))
    weights = {
        n: jax.ShapeDtypeStruct((*lead, *s), jnp.float32)
        for n, s in zip(names, shapes, strict=True)
    }
    params: Any = weights if case.scanned else [weights] * case.depth
    return (
        train_step,
        {"params": params, "mu": params},
        jax.ShapeDtypeStruct((case.batch, case.width), jnp.float32),
    )


def cluster_of(case: Case) -> aq.Cluster:
    """The cluster of a case."""
    cluster = aq.Cluster.preset(case.cluster)
    if case.faster_links:
        links = {k: getattr(cluster, k) for k in ("intra", "inter")}
        double = {
            k: replace(v, bandwidth_bytes_per_s=2 * v.bandwidth_bytes_per_s)
            for k, v in links.items()
        }
        cluster = replace(
            cluster, **double, wires=tuple(tuple(2 * w for w in row) for row in cluster.wires)
        )
    if case.faster_devices:
        device = cluster.device
        peaks = {k: 2 * v for k, v in device.peak_flops_per_s.items()}
        cluster = replace(cluster, device=replace(device, peak_flops_per_s=peaks))
    return replace(cluster, num_hosts=2 * cluster.num_hosts) if case.more_hosts else cluster


def scenarios(seed: int, count: int, of_zoo: int) -> Iterator[list[Case]]:
    """Cases that are compared with each other; the first is planned by `Auto` with all free."""
    chance = random.Random(seed)
    for _ in range(count):
        base = Case(
            width=chance.choice((512, 1024, 2048, 4096)),
            depth=chance.choice((2, 4)),
            scanned=chance.random() < 0.5,
            batch=chance.choice((64, 256, 1024, 8192)),
            cluster=chance.choice(CLUSTERS),
        )
        yield cases_of(base)
    for k in range(of_zoo):
        model = list(ZOO)[k % len(ZOO)]
        base = Case(
            model=model,
            scanned="resnet" not in model and chance.random() < 0.5,
            batch=chance.choice((32, 64, 256)),
            cluster=chance.choice(CLUSTERS),
        )
        yield cases_of(base)


def cases_of(base: Case) -> list[Case]:
    """The cases of a scenario."""
    cases = [
        base,
        *(
            replace(base, method=name)
            for name in METHODS
            if name not in ("auto", "pipeshard, 1 stage")
        ),
    ]
    cases += [
        replace(base, method=name, count=2) for name in (*FREE, "program", "pipeshard, 1 stage")
    ]
    cases += [
        replace(base, method=name, count=1) for name in ("auto", "program", "pipeshard, 1 stage")
    ]
    cases += [
        replace(base, faster_links=True),
        replace(base, faster_devices=True),
        replace(base, more_hosts=True),
        replace(base, batch=2 * base.batch),
    ]
    cases += [replace(base, memory_share=0.4), replace(base, memory_share=1e-3)]
    return cases if base.model else [*cases, replace(base, permuted=True)]

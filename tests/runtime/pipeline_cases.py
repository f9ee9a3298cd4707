"""The table of pipelines of whole models: each runs three AdamW steps in float64 as the plain step
does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from runtime.equality import largest
from runtime.pipelines import build, staging
from runtime.planned import loop_results

from aliquot import zoo
from aliquot.graph import capture

NUM_STEPS = 3
BAR = 1e-9
MICRO_BATCHES = 4
_ROWS = 16
_TEXT = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 2,
    "ffn_size": 16,
    "vocab_size": 24,
    "seq_len": 4,
}
_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt": ("gpt-125m", _TEXT),
    "llama": ("llama-7b", _TEXT),
    "moe": ("moe-380m", {**_TEXT, "num_experts": 4, "group_size": 4}),
    "t5": ("t5-770m", {**_TEXT, "seq_len": 8, "target_len": 4}),
    # The last layer has a 32nd of the image's points each way. Normalised over two values, as of
    # two examples with a point each, everything is 1 or -1 and gradients are rounding alone, which
    # nothing can be compared with.
    "wide_resnet": (
        "wide-resnet-250m",
        {"num_layers": 14, "num_channels": 4, "image_size": 64, "num_classes": 8},
    ),
}
_MESHES: dict[tuple[int, str], tuple[int, ...]] = {
    (2, "1"): (1, 1),
    (2, "2"): (2, 2),
    (2, "unequal"): (4, 1),
    (4, "1"): (1, 1, 1, 1),
    (4, "2"): (2, 2, 2, 2),
    (4, "unequal"): (1, 4, 2, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination. `mesh` is how many devices each stage has; interleaved schedules run two
    stages on each mesh.
    """

    model: str
    schedule: str
    stages: int
    mesh: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, f.name)) for f in fields(self))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each submesh."""
        count = (
            self.stages // 2
            if self.schedule.startswith("interleaved") and self.stages > 2
            else self.stages
        )
        return _MESHES[count, self.mesh]


def all_cases(models: Sequence[str] = ("tiny", *_MODELS)) -> list[Case]:
    """The whole table."""
    every = itertools.product(
        models, ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"), (2, 4), ("1", "2", "unequal")
    )
    # Groups of different sizes have different batch statistics.
    return [
        Case(model=model, schedule=schedule, stages=stages, mesh=mesh)
        for model, schedule, stages, mesh in every
        if not (model == "wide_resnet" and mesh == "unequal")
    ]


def compare(case: Case) -> tuple[float, float, str]:
    """The largest relative differences of a loss and of a leaf of the state, and that leaf's
    path.
    """
    with jax.enable_x64(True):
        fn, graph, start, batches = _workload(case.model)
        sizes = case.sizes
        independent = case.model == "wide_resnet"
        step = build(
            graph,
            staging(graph, case.stages, anywhere=case.model == "tiny"),
            sizes=sizes,
            micro_batches=MICRO_BATCHES,
            schedule=case.schedule,
            semantics="independent" if independent else "exact",
        )
        wanted, losses = _plain(case.model, independent)
        state, loss = start, 0.0
        for batch, expected in zip(batches, losses, strict=True):
            state, metrics = step(state, batch)
            loss = max(loss, abs(float(metrics["loss"]) - expected) / abs(expected))
        leaf, path = largest("float64", start, jax.device_get(state), wanted)
    return loss, leaf, path


@functools.cache
def _plain(model: str, independent: bool) -> tuple[Any, tuple[float, ...]]:
    """The state after the plain steps, and their losses; if `independent`, on independent
    micro-batches.
    """
    fn, graph, state, batches = _workload(model)
    step = jax.jit(fn)
    losses = []
    for batch in batches:
        if independent:
            flat = loop_results(
                graph,
                graph.calling.flatten((state, batch), {}).leaves,
                num_micro_batches=MICRO_BATCHES,
                semantics="independent",
            )
            state, metrics = graph.calling.finish(flat, (state, batch), {})
        else:
            state, metrics = step(state, batch)
        state = jax.device_get(state)
        losses.append(float(metrics["loss"]))
    return state, tuple(losses)


@functools.cache
def _workload(model: str) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """The step, its graph, a first state and the batches."""
    random = np.random.default_rng(0)
    if model == "tiny":
        fn, state, batches = _tiny(random)
    else:
        name, sizes = _MODELS[model]
        work = zoo.build(
            name, _ROWS, overrides=sizes, dtype="float64", learning_rate=1e-3, recompute="none"
        )
        fn, state = work.train_step, jax.device_get(jax.jit(work.init)(jax.random.key(0)))
        batches = tuple(
            jax.tree.map(lambda x: _random(random, x), work.batch) for _ in range(NUM_STEPS)
        )
    return fn, capture(fn, state, batches[0]), state, batches


def _random(random: Any, leaf: Any) -> Any:
    if np.issubdtype(leaf.dtype, np.integer):
        return random.integers(0, 8, leaf.shape).astype(leaf.dtype)
    return random.normal(size=leaf.shape).astype(leaf.dtype)


def _tiny(random: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Four residual layers between an embedding and its transpose, trained by AdamW under a bound
    for the global norm.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["inputs"]]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
        scores = x @ params["embed"].T
        picked = jnp.take_along_axis(scores, batch["targets"][:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(scores, axis=1) - picked).mean()

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {
            "loss": loss
        }

    params = {
        "embed": random.normal(size=(10, 6)),
        "layers": [random.normal(size=(6, 6)) for _ in range(4)],
    }
    words = random.integers(0, 10, (NUM_STEPS, 2, _ROWS)).astype(np.int32)
    batches = tuple({"inputs": w[0], "targets": w[1]} for w in words)
    state = {"params": params, "opt_state": optimizer.init(params)}
    return train_step, jax.device_get(state), batches

"""Small steps and methods to name plans of, and a second reading of what their plans split.

The reader looks at stored splits and at the sizes of collectives alone. All widths are multiples of
13 and nothing else is, so that exactly weights and their gradients have sizes that 169 divides.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from planners.small_steps import array

from aliquot.plans import Plan, item_bytes, summary_rows

WIDTH, HIDDEN, VOCABULARY, ROWS, POSITIONS, EXPERTS = 520, 1768, 2600, 1024, 128, 8
_OF_WEIGHTS = 13 * 13
_LITTLE_BYTES = 8192
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step with its arguments, and which dims of its batch's arrays are what."""

    step: Any
    args: tuple[Any, ...]
    examples: int = 0
    positions: int | None = None
    trains: bool = True


def _updated(loss, optimizer=OPTIMIZER, average=False):
    def step(state, batch):
        params, opt, *ema = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        if average:
            ema = [jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, ema[0], params)]
        return (params, opt, *ema), value

    return step


def _state(params, optimizer=OPTIMIZER):
    return params, jax.eval_shape(optimizer.init, params)


def _layers(params, x):
    for layer in params:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


def _mlp_loss(params, batch):
    return jnp.mean((_layers(params, batch) - batch) ** 2)


def _mlp_params(count=3):
    return [{"up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)} for _ in range(count)]


def mlp(optimizer=OPTIMIZER):
    """Layers written out."""
    args = (_state(_mlp_params(), optimizer), array(ROWS, WIDTH))
    return Step(step=_updated(_mlp_loss, optimizer), args=args)


def averaged():
    """With an average of the weights."""
    args = ((*_state(_mlp_params()), _mlp_params()), array(ROWS, WIDTH))
    return Step(step=_updated(_mlp_loss, average=True), args=args)


def scanned():
    """Layers in a loop."""

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, layer: (_layers([layer], x), None), batch, params)
        return jnp.mean((x - batch) ** 2)

    params = {"up": array(4, WIDTH, HIDDEN), "down": array(4, HIDDEN, WIDTH)}
    return Step(step=_updated(loss), args=(_state(params), array(ROWS, WIDTH)))


def indexed():
    """Layers that are rows of stacked weights."""

    def loss(params, batch):
        rows = [{name: stack[k] for name, stack in params.items()} for k in range(3)]
        return _mlp_loss(rows, batch)

    params = {"up": array(3, WIDTH, HIDDEN), "down": array(3, HIDDEN, WIDTH)}
    return Step(step=_updated(loss), args=(_state(params), array(ROWS, WIDTH)))


def models(count=8, shared=False):
    """Models by `vmap`, each with its own examples or all with the same ones."""
    one = _updated(_mlp_loss)
    of_one = _state(_mlp_params())
    state = jax.tree.map(lambda a: array(count, *a.shape, dtype=a.dtype), of_one)
    step = jax.vmap(one, in_axes=(0, None if shared else 0))
    if shared:
        return Step(step=step, args=(state, array(ROWS, WIDTH)))
    return Step(step=step, args=(state, array(count, ROWS, WIDTH)), examples=1)


def several_steps(count=8):
    """Steps in one call, by `scan`."""
    one = mlp()
    step = lambda state, batches: jax.lax.scan(one.step, state, batches)  # noqa: E731
    return Step(step=step, args=(one.args[0], array(count, ROWS, WIDTH)), examples=1)


def transformer(rows=64):
    """Attention of one head and a head of its own over the vocabulary."""

    def loss(params, batch):
        x = params["table"][batch]
        for layer in params["layers"]:
            q, k, v = (x @ layer[name] for name in "qkv")
            x = x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ layer["o"]
            x = _layers([layer], x)
        log_p = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(log_p, batch[..., None], -1))

    layer = {name: array(WIDTH, WIDTH) for name in "qkvo"} | _mlp_params(1)[0]
    params = {
        "table": array(VOCABULARY, WIDTH),
        "layers": [layer] * 4,
        "head": array(WIDTH, VOCABULARY),
    }
    args = (_state(params), array(rows, POSITIONS, dtype=jnp.int32))
    return Step(step=_updated(loss), args=args, positions=1)


def frozen():
    """Adapters beside a frozen base in 8 bits."""

    def loss(adapters, base, batch):
        x = batch
        for adapter, layer in zip(adapters, base, strict=True):
            kernel = layer["w"].astype(x.dtype) * 0.01
            x = x + jnp.tanh(x @ kernel + x @ adapter["a"] @ adapter["b"])
        return jnp.mean((x - batch) ** 2)

    def step(state, batch):
        adapters, opt, base = state
        value, grads = jax.value_and_grad(loss)(adapters, base, batch)
        updates, opt = OPTIMIZER.update(grads, opt, adapters)
        return (optax.apply_updates(adapters, updates), opt, base), value

    adapters = [{"a": array(WIDTH, 8 * 13), "b": array(8 * 13, WIDTH)} for _ in range(3)]
    base = [{"w": array(WIDTH, WIDTH, dtype=jnp.int8)} for _ in range(3)]
    return Step(step=step, args=((*_state(adapters), base), array(ROWS, WIDTH)))


def each_example():
    """Clipped gradients of one example each."""

    def step(state, batch):
        params, opt = state
        grads = jax.vmap(jax.grad(lambda p, x: _mlp_loss(p, x[None])), (None, 0))(params, batch)
        squares = [jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
        scale = 1 / jnp.maximum(1.0, jnp.sqrt(sum(squares)))
        grads = jax.tree.map(lambda g: jnp.mean(g * scale[:, None, None], 0), grads)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), jnp.mean(scale)

    return Step(step=step, args=(_state(_mlp_params(2)), array(64, WIDTH)))


def experts():
    """Experts to which every row goes, weighted by a router."""

    def loss(params, x):
        for layer in params:
            weights = jax.nn.softmax(x @ layer["router"])
            y = jnp.tanh(jnp.einsum("bd,edf->bef", x, layer["experts"]["up"]))
            x = x + jnp.einsum("be,bef,efd->bd", weights, y, layer["experts"]["down"])
        return jnp.mean(x**2)

    inner = {"up": array(EXPERTS, WIDTH, HIDDEN), "down": array(EXPERTS, HIDDEN, WIDTH)}
    params = [{"router": array(WIDTH, EXPERTS), "experts": inner} for _ in range(2)]
    return Step(step=_updated(loss), args=(_state(params), array(ROWS, WIDTH)))


def forward():
    """No gradients."""
    return Step(step=_mlp_loss, args=(_mlp_params(), array(ROWS, WIDTH)), trains=False)


STEPS = {
    make.__name__: make
    for make in (
        *(mlp, averaged, scanned, indexed, models, several_steps, transformer, frozen),
        *(each_example, experts, forward),
    )
} | {
    "sgd": lambda: mlp(optax.sgd(1e-3)),
    "two models": lambda: models(2),
    "models, same examples": lambda: models(shared=True),
    "one step in a loop": lambda: several_steps(1),
    "few rows": lambda: transformer(2),
}
_PROGRAMS = ("dp", "zero2", "zero3", "shard")
CASES = (
    *((step, method, None) for step in ("mlp", "scanned", "transformer") for method in _PROGRAMS),
    *((step, method, 4) for step in ("mlp", "scanned", "transformer") for method in _PROGRAMS),
    *(
        ("mlp", method, None)
        for method in ("blocks", "tp:4", "megatron:tp2,zero1", "megatron:fsdp")
    ),
    ("mlp", "megatron:tp2,fsdp", 4),
    ("mlp", "megatron:tp2,zero2", 4),
    ("mlp", "hsdp", None),
    ("sgd", "zero3", None),
    ("sgd", "zero2", None),
    *(("averaged", method, None) for method in ("zero3", "shard")),
    *(("indexed", method, None) for method in _PROGRAMS),
    *(("models", method, None) for method in (*_PROGRAMS, "auto")),
    ("two models", "shard", None),
    *(("models, same examples", method, None) for method in ("dp", "shard")),
    *(("several_steps", method, None) for method in ("dp", "zero3", "shard")),
    *(("one step in a loop", method, None) for method in ("dp", "shard")),
    *(
        ("transformer", f"megatron:{layout}", None)
        for layout in ("tp2,sp,zero1", "tp2,cp2", "cp8,zero1", "tp8")
    ),
    ("transformer", "megatron:tp2,pp2,zero1", 8),
    ("transformer", "megatron:pp4,fsdp", 8),
    ("few rows", "shard", None),
    *(("frozen", method, None) for method in ("dp", "zero3", "shard")),
    *(("each_example", method, None) for method in ("dp", "zero2", "zero3", "shard")),
    *(("experts", method, None) for method in ("dp", "shard")),
    *(("forward", method, None) for method in ("dp", "zero3")),
)
"""Step, method, number of micro-batches; None for the method's own."""


def untrue(case: Step, plan: Plan) -> list[str]:
    """What the line "parallelism" of a plan says that its splits and collectives do not show."""
    found = []
    for name, line in summary_rows(plan):
        if name != "parallelism":
            continue
        stages = list(plan.stages)
        if line.startswith("pipeline: "):
            # Stages of equal meshes share a line; here all have the same.
            assert len({stage.mesh_shape for stage in stages}) == 1
            line = line.partition("; ")[2]
        for axis, role in re.findall(r"(\w+) \(\d+[^)]*\): (.*?)(?=; \w+ \(\d+[^)]*\): |$)", line):
            reading = Reading(case=case, plan=plan, stages=stages, axis=axis)
            found += [f"{axis}: {fault} ({role})" for fault in reading.faults(role)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an axis of a plan splits, read from stored splits and collectives."""

    case: Step
    plan: Plan
    stages: list[Any]
    axis: str

    def faults(self, role: str):
        """What is untrue in the text of a role."""
        weights, moments = self.split("parameter"), self.split("optimizer_state")
        yield from self._faults_of_state(role, weights, moments)
        yield from self._faults_of_batch(role)
        held = self.bytes_of("parameter") / self.others()
        gathered, scattered, summed = (
            self.of_weights(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")
        )
        times = self.plan.num_micro_batches
        if "FSDP" in role and (min(weights, moments) < 0.95 or gathered < 0.9 * held):
            yield f"gathers {gathered:.3g} of {held:.3g} bytes of weights"
        if "ZeRO-3" in role and self.case.trains:
            # AdamW keeps two moments of each trained weight; frozen ones have no gradients.
            moments_bytes = self.bytes_of("optimizer_state") or math.inf
            trained = min(self.bytes_of("parameter"), moments_bytes / 2)
            total = times * trained / self.others() / self.size
            if scattered < 0.9 * total or summed > 0.1 * held:
                yield f"scatters {scattered:.3g} of {total:.3g} bytes, and sums {summed:.3g}"
        if "whole until" in role and scattered + summed > 1.5 * held:
            yield "sums gradients in each micro-batch"
        if "ZeRO-" in role and moments < 0.95:
            yield "has whole moments"
        if role.startswith(("tensor", "expert")):
            few_gathers = gathered <= 0.2 * times * held
            if weights < 0.5 or not few_gathers or all(self.is_small(use) for use in self.uses()):
                yield f"gathers {gathered / times:.3g} of {held:.3g} bytes of weights"
        if role.startswith("independent models"):
            # What all devices hold is put together again after the update.
            whole = weights < 0.5 or moments < 0.5
            if any(not (self.is_small(use) or whole and _is_weight(use)) for use in self.uses()):
                yield "exchanges more than a few numbers"

    def _faults_of_state(self, role: str, weights: float, moments: float):
        if "expert parallel: experts" in role:
            return
        share = r"(replicated|sharded(?: \((\d+)% of bytes\))?)"
        both = re.findall(f"optimizer state and parameters {share}", role)
        said = {
            "parameters": both or re.findall(f"parameters {share}", role),
            "optimizer state": both or re.findall(f"optimizer state {share}", role),
        }
        for (what, found), split in zip(said.items(), (weights, moments), strict=True):
            for word, percent in found:
                share_said = int(percent) / 100 if percent else float(word == "sharded")
                if abs(share_said - split) > 0.005:
                    yield f"says {what} {word}, of which {split:.3f} is split"
        state = sum(self.bytes_of(r) for r in ("parameter", "optimizer_state", "state", "other"))
        told = [
            r for r, what in zip(("parameter", "optimizer_state"), said) if f"{what} rep" in role
        ]
        for path, size, is_split, of_role in self.arrays():
            unsaid = of_role not in told and "whole over" not in role and max(weights, moments) > 0
            if unsaid and not is_split and size > 0.01 * state:
                yield f"does not say that {path} is whole"

    def _faults_of_batch(self, role: str):
        dims = self.batch_dims()
        inside = "inputs are replicated" in role
        if "data parallel" in role and not inside and self.case.examples not in dims:
            yield f"splits dims {dims} of the batch, and no examples"
        if "context parallel" in role and self.case.positions not in dims:
            yield f"splits dims {dims} of the batch, and no positions"
        said = re.search(r"batch (sharded|replicated)", role)
        if said and (said[1] == "sharded") != bool(dims):
            yield f"says batch {said[1]}, and splits dims {dims} of it"
        if ("the batch is split over" in role and not dims) or (inside and dims):
            yield f"splits dims {dims} of the batch"

    @property
    def size(self) -> int:
        stage = self.stages[0]
        return stage.mesh_shape[stage.axis_names.index(self.axis)]

    def others(self) -> int:
        """Pieces into which the other axes cut most weights."""
        stage = self.stages[0]
        pieces = 1
        for axis, size in zip(stage.axis_names, stage.mesh_shape, strict=True):
            other = Reading(case=self.case, plan=self.plan, stages=self.stages, axis=axis)
            if axis != self.axis and other.split("parameter") > 0.5:
                pieces *= size
        return pieces

    def arrays(self):
        """Path, bytes, whether the axis splits it, and role, of each array that stays."""
        for array_ in self.plan.inputs:
            for stage in self.stages:
                dims = stage.shardings.get(array_.path)
                if dims is not None and array_.role != "batch":
                    size = math.prod(array_.shape) * item_bytes(array_.dtype)
                    yield array_.path, size, any(self.axis in axes for axes in dims), array_.role

    def bytes_of(self, role: str) -> float:
        return sum(size for _, size, _, of_role in self.arrays() if of_role == role)

    def split(self, role: str) -> float:
        """The share of a role's bytes that the axis splits; 1 if there are none."""
        total = self.bytes_of(role)
        mine = sum(size for _, size, split, of_role in self.arrays() if split and of_role == role)
        return mine / total if total else 1.0

    def batch_dims(self) -> set[int]:
        """Dims of the batch's arrays that the axis splits."""
        return {
            dim
            for array_ in self.plan.inputs
            if array_.role == "batch"
            for stage in self.stages
            for dim, axes in enumerate(stage.shardings.get(array_.path, ()))
            if self.axis in axes
        }

    def uses(self):
        for stage in self.stages:
            found = stage.prediction.collectives if stage.prediction else ()
            yield from (use for use in found if self.axis in use.axes)
        if len(self.stages) == 1:
            yield from (use for use in self.plan.prediction.collectives if self.axis in use.axes)

    def of_weights(self, kind: str) -> float:
        """Bytes on each device of collectives of a kind whose arrays are weights or gradients."""
        return sum(use.num_bytes for use in self.uses() if use.kind == kind and _is_weight(use))

    def is_small(self, use: Any) -> bool:
        """Whether what devices exchange is a few numbers."""
        return use.num_bytes / use.count <= _LITTLE_BYTES


def _is_weight(use: Any) -> bool:
    return round(use.num_bytes / use.count) % _OF_WEIGHTS == 0

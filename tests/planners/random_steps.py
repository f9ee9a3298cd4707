"""Small random training steps and clusters: the kinds of operators that planners treat apart, few
enough to try all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aliquot as aq
from aliquot.cluster import Cluster, Device, Link

Arrays = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStep:
    """A step with the shapes of its arguments; `text` says what it does."""

    fn: Callable[..., Any]
    params: Arrays
    batch: Arrays
    text: str

    def capture(self):
        """The step as a graph."""
        return aq.capture(self.fn, self.params, self.batch)


class _Builder:
    """Chooses operators one by one, following the shape of what they are applied to."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.params: dict[str, tuple[int, ...]] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.shapes: list[tuple[int, ...]] = []

    def size(self) -> int:
        return int(self.rng.choice([2, 3, 4, 5, 8], p=[0.1, 0.25, 0.3, 0.2, 0.15]))

    def weight(self, shape: tuple[int, ...]) -> str:
        """A parameter of a shape: a new one, or one that is there already."""
        same = [name for name, known in self.params.items() if known == shape]
        if same and self.rng.random() < 0.6:
            return same[0]
        name = f"w{len(self.params)}"
        self.params[name] = shape
        return name

    def start(self) -> Arrays:
        rows = int(self.rng.choice([2, 4, 8]))
        if self.rng.random() < 0.2:
            table = self.weight((int(self.rng.choice([4, 5, 8])), self.size()))
            self.trace.append(("lookup", table))
            self.shapes.append((rows, self.params[table][1]))
            return {"tokens": jax.ShapeDtypeStruct((rows,), jnp.int32)}
        shape = (
            (rows, self.size()) if self.rng.random() < 0.75 else (rows, self.size(), self.size())
        )
        self.trace.append(("input",))
        self.shapes.append(shape)
        return {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def step(self) -> None:
        now = self.shapes[-1]
        kind = str(
            self.rng.choice(
                ["matmul", "matmul", "transpose", "tanh", "bias", "center", "residual", "reshape"]
            )
        )
        after = now
        if kind == "matmul" and len(now) == 3 and self.rng.random() < 0.5:
            after = (*now[:2], self.size())
            self.trace.append(("batched", self.weight((now[0], now[2], after[2]))))
        elif kind == "matmul":
            after = (*now[:-1], self.size())
            self.trace.append((kind, self.weight((now[-1], after[-1]))))
        elif kind == "bias":
            self.trace.append((kind, self.weight((now[-1],))))
        elif kind == "center":
            self.trace.append((kind, int(self.rng.integers(len(now)))))
        elif kind == "residual":
            same = [k for k, shape in enumerate(self.shapes) if shape == now]
            self.trace.append((kind, int(self.rng.choice(same))))
        elif kind == "transpose":
            after = (*now[:-2], now[-1], now[-2])
            self.trace.append((kind,))
        elif kind == "reshape":
            after = (
                (now[0] * now[1], now[2])
                if len(now) == 3
                else (2, now[0] // 2, now[1])
                if now[0] % 2 == 0
                else now
            )
            self.trace.append((kind, after))
        else:
            self.trace.append((kind,))
        self.shapes.append(after)


def random_step(rng: np.random.Generator) -> RandomStep:
    """A chain of one to four random operators with shared weights and residuals: forward, SGD, or
    with momentum.
    """
    builder = _Builder(rng)
    batch = builder.start()
    for _ in range(int(rng.integers(1, 5))):
        builder.step()
    mode = str(rng.choice(["forward", "sgd", "momentum"], p=[0.3, 0.5, 0.2]))
    if not builder.params:
        builder.trace.append(("bias", builder.weight(builder.shapes[-1][-1:])))
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in builder.params.items()}
    if mode == "momentum":
        shapes |= {f"m{n}": s for n, s in shapes.items()}
    return RandomStep(
        fn=_step(tuple(builder.trace), tuple(builder.params), mode),
        params=shapes,
        batch=batch,
        text=f"{mode}: {builder.trace} on {builder.params}, {[v.shape for v in batch.values()]}",
    )


def _forward(
    trace: tuple[tuple[Any, ...], ...], params: dict[str, Any], batch: dict[str, Any]
) -> Any:
    kept = []
    h: Any = None
    for kind, *args in trace:
        match kind:
            case "lookup":
                h = params[args[0]][batch["tokens"]]
            case "input":
                h = batch["x"]
            case "matmul":
                h = h @ params[args[0]]
            case "batched":
                h = jnp.einsum("bij,bjk->bik", h, params[args[0]])
            case "transpose":
                h = jnp.swapaxes(h, -1, -2)
            case "tanh":
                h = jnp.tanh(h)
            case "bias":
                h = h + params[args[0]]
            case "center":
                h = h - h.mean(axis=args[0], keepdims=True)
            case "residual":
                h = h + kept[args[0]]
            case "reshape":
                h = h.reshape(args[0])
        kept.append(h)
    return h


def _step(
    trace: tuple[tuple[Any, ...], ...], names: tuple[str, ...], mode: str
) -> Callable[..., Any]:
    def loss(params: dict[str, Any], batch: dict[str, Any]) -> Any:
        h = _forward(trace, params, batch)
        return jnp.sum(h * h)

    def train_step(params: dict[str, Any], batch: dict[str, Any]) -> Any:
        if mode == "forward":
            return _forward(trace, params, batch)
        grads = jax.grad(lambda p: loss({**params, **p}, batch))({n: params[n] for n in names})
        if mode == "sgd":
            return {n: params[n] - 0.1 * g for n, g in grads.items()}
        moments = {f"m{n}": 0.9 * params[f"m{n}"] + g for n, g in grads.items()}
        return {n: params[n] - 0.1 * moments[f"m{n}"] for n in grads} | moments

    return train_step


def random_cluster(rng: np.random.Generator, num_devices: int) -> Cluster:
    """Slow devices and links, so that bytes and FLOP of small arrays count; any target, one or two
    hosts.
    """
    hosts = 2 if num_devices > 2 and rng.random() < 0.4 else 1
    speed = float(10.0 ** rng.uniform(5, 8))
    device = Device(
        name="random",
        kind=str(rng.choice(["gpu", "tpu", "cpu"])),
        peak_flops_per_s={"float32": speed},
        memory_bytes=2**30,
        memory_bandwidth_bytes_per_s=speed * float(rng.uniform(0.3, 3)),
        source="",
    )
    latency = 10.0 ** rng.uniform(-8, -5)
    intra = Link(latency_s=latency, bandwidth_bytes_per_s=speed * 10.0 ** rng.uniform(-1, 1))
    inter = Link(latency_s=3 * latency, bandwidth_bytes_per_s=intra.bandwidth_bytes_per_s / 3)
    return Cluster(
        name="random",
        device=device,
        num_hosts=hosts,
        devices_per_host=num_devices // hosts,
        intra=intra,
        inter=inter,
    )

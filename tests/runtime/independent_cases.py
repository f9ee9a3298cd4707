"""What independent micro-batches compute, in plain JAX, and losses whose numbers they change.

`reference` is the definition: a loop over the micro-batches that averages gradients and metrics and
hands on what the forward pass writes, then one update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS = 32
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loss `(params, stats, batch) -> (loss, (stats, metrics))` with its arguments.

    Attributes:
        sums: names of the results that are sums over examples; "gradients" among them.
    """

    loss: Callable[..., Any]
    params: dict[str, Any]
    batch: dict[str, Any]
    stats: Any
    sums: frozenset[str]


def reference(case: Case, num_micro_batches: int) -> Callable[..., Any]:
    """The step of a case on micro-batches, as its definition says."""

    def step(state: Any, batch: Any) -> Any:
        stats, results = state["stats"], []
        for part in range(num_micro_batches):
            rows = jax.tree.map(lambda x, k=part: jnp.split(x, num_micro_batches)[k], batch)
            (loss, (stats, metrics)), grads = _differentiated(case)(state["params"], stats, rows)
            results.append({"gradients": grads, "loss": loss, **metrics})
        mean = {
            name: jax.tree.map(
                lambda *x, name=name: _joined(name, case, x), *(r[name] for r in results)
            )
            for name in results[0]
        }
        return _updated(state, mean.pop("gradients"), stats), mean

    return step


def plain(case: Case) -> Callable[..., Any]:
    """The step of a case on its whole batch, as a user writes it."""

    def train_step(state: Any, batch: Any) -> Any:
        (loss, (stats, metrics)), grads = _differentiated(case)(
            state["params"], state["stats"], batch
        )
        return _updated(state, grads, stats), {"loss": loss, **metrics}

    return train_step


def start(case: Case) -> dict[str, Any]:
    """The state before the first step, as copies: states are donated."""
    state = {"params": case.params, "stats": case.stats, "opt": _OPTIMIZER.init(case.params)}
    return jax.tree.map(np.array, state)


def _differentiated(case: Case) -> Callable[..., Any]:
    return jax.value_and_grad(case.loss, has_aux=True)


def _joined(name: str, case: Case, parts: tuple[Any, ...]) -> Any:
    if name == "rows":
        return jnp.concatenate(parts)
    return sum(parts) if name in case.sums else sum(parts) / len(parts)


def _updated(state: Any, grads: Any, stats: Any) -> Any:
    updates, opt = _OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}


def _normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return np.random.default_rng(seed).normal(size=shape) * scale


def _case(
    loss: Callable[..., Any],
    params: dict[str, Any],
    batch: dict[str, Any],
    stats: Any = None,
    sums: tuple[str, ...] = (),
) -> Case:
    return Case(loss=loss, params=params, batch=batch, stats=stats or {}, sums=frozenset(sums))


def _classes(seed: int, count: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, count, shape or (ROWS,)).astype(np.int32)


def _two_layers() -> dict[str, Any]:
    return {"w": _normal(0, 6, 4, scale=0.5), "v": _normal(1, 4, 3, scale=0.5)}


def _images() -> dict[str, Any]:
    return {"x": _normal(2, ROWS, 6), "y": _classes(3, 3)}


def _cross_entropy(scores: Any, y: Any) -> Any:
    return jax.nn.logsumexp(scores, 1) - jnp.take_along_axis(scores, y[:, None], 1)[:, 0]


def mean_of_examples() -> Case:
    def loss(p: Any, stats: Any, b: Any) -> Any:
        scores = jnp.tanh(b["x"] @ p["w"]) @ p["v"]
        right = jnp.sum((jnp.argmax(scores, 1) == b["y"]).astype(jnp.int32))
        each = _cross_entropy(scores, b["y"])
        return each.mean(), (stats, {"right": right, "rows": each, "root": jnp.sqrt(each.mean())})

    return _case(loss, _two_layers(), _images(), sums=("right",))


def sum_of_examples() -> Case:
    def loss(p: Any, stats: Any, b: Any) -> Any:
        each = _cross_entropy(jnp.tanh(b["x"] @ p["w"]) @ p["v"], b["y"])
        return each.sum(), (stats, {"mean": each.mean()})

    return _case(loss, _two_layers(), _images(), sums=("gradients", "loss"))


def batch_norm() -> Case:
    def loss(p: Any, stats: Any, b: Any) -> Any:
        h = b["x"] @ p["w"]
        mean, variance = h.mean(0), h.var(0)
        new = {
            "mean": 0.9 * stats["mean"] + 0.1 * mean,
            "variance": 0.9 * stats["variance"] + 0.1 * variance,
        }
        h = jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-5))
        return _cross_entropy(h @ p["v"], b["y"]).mean(), (new, {})

    return _case(loss, _two_layers(), _images(), {"mean": np.zeros(4), "variance": np.ones(4)})


def summed_batch_norm() -> Case:
    made = batch_norm()

    def loss(p: Any, stats: Any, b: Any) -> Any:
        value, rest = made.loss(p, stats, b)
        h = b["x"] @ p["w"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        return jnp.sum(jnp.tanh(h @ p["v"])), (rest[0], {"mean": value})

    return _case(loss, made.params, made.batch, made.stats, ("gradients", "loss"))


def normalised_by_running_statistics() -> Case:
    """What the forward pass reads is what the micro-batch before wrote."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        h = b["x"] @ p["w"]
        center = 0.5 * stats["center"] + 0.5 * h.mean(0)
        return jnp.mean(((h - center) @ p["v"]) ** 2), ({"center": center}, {})

    return _case(loss, _two_layers(), _images(), {"center": np.zeros(4)})


def contrastive() -> Case:
    def loss(p: Any, stats: Any, b: Any) -> Any:
        one, other = b["one"] @ p["w"], b["other"] @ p["w"]
        scores = one @ other.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores))), (stats, {})

    batch = {"one": _normal(2, ROWS, 6), "other": _normal(3, ROWS, 6)}
    return _case(loss, {"w": _normal(0, 6, 4, scale=0.3)}, batch)


def preference_pairs() -> Case:
    def loss(p: Any, stats: Any, b: Any) -> Any:
        count = b["chosen"].shape[0]
        scores = jnp.tanh(jnp.concatenate([b["chosen"], b["rejected"]]) @ p["w"]) @ p["v"]
        margin = scores[:count, 0] - scores[count:, 0]
        return -jnp.mean(jax.nn.log_sigmoid(margin)), (stats, {"accuracy": jnp.mean(margin > 0)})

    batch = {"chosen": _normal(2, ROWS, 6), "rejected": _normal(3, ROWS, 6)}
    return _case(loss, _two_layers(), batch)


def grouped_rewards() -> Case:
    """Rewards are normalised in groups of four, and tokens by the number of all."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        rewards = b["reward"].reshape(-1, 4)
        spread = rewards.std(1, keepdims=True) + 1e-4
        gain = ((rewards - rewards.mean(1, keepdims=True)) / spread).reshape(-1)
        each = jax.nn.log_softmax(jnp.tanh(b["x"] @ p["w"]) @ p["v"])[:, :, 0]
        mask = b["mask"]
        total = -jnp.sum(each * gain[:, None] * mask) / jnp.maximum(mask.sum(), 1)
        return total, (stats, {"reward": rewards.mean()})

    mask = (np.random.default_rng(4).random((ROWS, 5)) < 0.6).astype(np.float64)
    batch = {"x": _normal(2, ROWS, 5, 6), "reward": _normal(3, ROWS), "mask": mask}
    return _case(loss, _two_layers(), batch)


def packed_tokens() -> Case:
    """Each row holds several documents, whose positions and means are their own."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        h = jnp.tanh(p["embedding"][b["tokens"]])
        same = b["document"][:, :, None] == b["document"][:, None, :]
        weight = jnp.where(same & (jnp.tril(jnp.ones((6, 6))) > 0), 1.0, 0.0)
        h = jnp.einsum("bqk,bkd->bqd", weight / weight.sum(-1, keepdims=True), h)
        scores = (h @ p["embedding"].T).reshape(-1, 7)
        counts = b["document"].reshape(-1) > 0
        each = _cross_entropy(scores, b["tokens"].reshape(-1)) * counts
        return each.sum() / jnp.maximum(counts.sum(), 1), (stats, {})

    document = np.sort(_classes(4, 3, ROWS, 6), axis=1)
    batch = {"tokens": _classes(2, 7, ROWS, 6), "document": document}
    return _case(loss, {"embedding": _normal(0, 7, 4, scale=0.5)}, batch)


def graphs() -> Case:
    """A message for each edge of each example's graph; the readout is flattened over all nodes."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        def messages(nodes: Any, senders: Any, receivers: Any) -> Any:
            sent = jnp.tanh(nodes @ p["w"])[senders]
            return jnp.zeros((5, 4)).at[receivers].add(sent)

        h = jax.vmap(messages)(b["nodes"], b["senders"], b["receivers"]).reshape(-1, 4)
        centered = h - h.mean(0)
        return jnp.mean((centered @ p["v"]) ** 2), (stats, {})

    batch = {
        "nodes": _normal(2, ROWS, 5, 6),
        "senders": _classes(3, 5, ROWS, 8),
        "receivers": _classes(4, 5, ROWS, 8),
    }
    return _case(loss, _two_layers(), batch)


def chunks() -> Case:
    """A loss in chunks of the batch; how many there are depends on its size."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        def chunk(total: Any, part: Any) -> Any:
            x, y = part
            each = _cross_entropy(jnp.tanh(x @ p["w"]) @ p["v"], y)
            return total + jnp.sum(each), jnp.max(each)

        pieces = b["x"].reshape(-1, 2, 6), b["y"].reshape(-1, 2)
        total, largest = jax.lax.scan(chunk, jnp.zeros(()), pieces)
        return total / b["y"].shape[0], (stats, {"largest": largest.mean()})

    return _case(loss, _two_layers(), _images())


def hardest_examples() -> Case:
    """The mean of the half with the largest losses, a regularised maximum, and noise."""

    def loss(p: Any, stats: Any, b: Any) -> Any:
        noise = 0.1 * jax.random.normal(jax.random.key(0), b["x"].shape)
        each = _cross_entropy(jnp.tanh((b["x"] + noise) @ p["w"]) @ p["v"], b["y"])
        worst = jax.lax.top_k(each, each.shape[0] // 2)[0]
        decay = 0.01 * jnp.sum(p["w"] ** 2)
        value = worst.mean() + jnp.log(jnp.mean(jnp.exp(each))) + decay
        return value, (stats, {"largest": each.max(), "decay": decay})

    return _case(loss, _two_layers(), _images())


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        mean_of_examples,
        sum_of_examples,
        batch_norm,
        summed_batch_norm,
        normalised_by_running_statistics,
        contrastive,
        preference_pairs,
        grouped_rewards,
        packed_tokens,
        graphs,
        chunks,
        hardest_examples,
    )
}

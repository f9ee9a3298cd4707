"""The training step that Alpa's benchmark of 2022 timed, on the zoo's parts, and the compiler that
ran it.

A GPT on the frame of a BERT: norms after the sums, no mask but padding, embeddings as products with
one-hot rows, the softmax in float16. Parameters in float16, beside a float32 copy that AdamW
updates with float32 moments; no loss scale.

Reference: `benchmark/alpa/benchmark_2d_one_case_gpt_bert.py`, `alpa/model/bert_model.py` and
    `alpa/model/model_util.py` of
the Alpa repository (Apache-2.0), as of 2022.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import aliquot as aq
from aliquot import zoo
from aliquot.zoo import _gpt
from aliquot.zoo._attention import merge_heads, split_heads
from aliquot.zoo._network import _make, _module, _once
from aliquot.zoo._precision import Precision, abstract

SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_len")
"""What says how large a model is."""

HALF = Precision(compute="float16", params="float16")


def of_2022(cluster: aq.Cluster) -> aq.Cluster:
    """The cluster as the compiler of 2022 used it: XLA's GPU backend ran collectives one by one
    with everything else, and Alpa switched asynchronous all-reduces off besides
    (`alpa/global_env.py`).
    """
    figures = {**cluster.device.calibration, "overlap_fraction": 0.0}
    return replace(cluster, device=replace(cluster.device, calibration=figures))


class Attention(_gpt.Attention):
    """Every position sees every other; the softmax stays in float16."""

    def __call__(self, x: jax.Array, source: jax.Array | None = None) -> jax.Array:
        source = x if source is None else source
        q, k, v = (
            split_heads(part, self.num_heads)
            for part in (self.q(x), self.k(source), self.v(source))
        )
        scores = jnp.einsum("bshe,bthe->bhst", q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k)
        return self.out(
            merge_heads(jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, axis=-1), v))
        )


class Block(_gpt.Block):
    """Norms after the sums."""

    def __init__(self, config: zoo.ModelConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, precision, rngs=rngs)
        self.attn = Attention(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attn(x)).astype(x.dtype)
        return self.norm2(x + self.mlp(x)).astype(x.dtype)


class Ends(_gpt.Ends):
    """Embeddings by products, and a norm behind them in place of the last."""

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        table = self.embed.embedding[...]
        x = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table + self.position[...]
        return self.norm(x).astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(x)


def alpa_step(
    spec: Mapping[str, Any], *, recompute: bool, groups: int | None = None
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]:
    """Step, state and batch of one of its cases; `spec` has the sizes by the file's names.

    Args:
        recompute: whether the inside of a block is worked out again in the backward pass.
        groups: work out again so many equal groups of blocks instead, each as one, embeddings with
            the first and the loss with the last: Alpa's `coarse_grained_remat`, whose layers are
            all of the forward pass.
    """
    sizes = {name: spec[name] for name in SIZES}
    config = zoo.configure("gpt-2.6b", **sizes)
    assert isinstance(config, zoo.ModelConfig)
    ends_def, ends_shapes, _ = _module(lambda key: _make(Ends, config, HALF, key))
    block_def, block_shapes, _ = _module(lambda key: _make(Block, config, HALF, key))
    block = _once(
        lambda layer, x: nnx.merge(block_def, layer)(x),
        recompute="block" if recompute and groups is None else "none",
        scan=False,
    )
    optimizer = optax.adamw(1e-8, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))

    edges = [k * config.num_layers // (groups or 1) for k in range((groups or 1) + 1)]

    def group(k: int, ends_params: Any, layers: Any, x: Any, batch: Any) -> jax.Array:
        ends = nnx.merge(ends_def, ends_params)
        if k == 0:
            x = ends.embed_tokens(batch["inputs"])
        for layer in layers:
            x = block(layer, x)
        if k < len(edges) - 2:
            return x
        chosen = jax.nn.one_hot(batch["targets"], config.vocab_size)
        return -jnp.sum(chosen * jax.nn.log_softmax(ends.logits(x), axis=-1), axis=-1).mean()

    def loss(params: Any, batch: Any) -> jax.Array:
        ends_params = {name: part for name, part in params.items() if name != "layers"}
        x: Any = None
        for k, (first, last) in enumerate(itertools.pairwise(edges)):
            once = functools.partial(group, k)
            run = jax.checkpoint(once) if recompute and groups is not None else once
            x = run(ends_params, params["layers"][first:last], x, batch)
        return x

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        params = jax.tree.map(lambda x: x.astype(jnp.float16), master)
        return {"params": params, "master": master, "opt_state": opt_state}, {"loss": value}

    params = {
        **ends_shapes,
        "layers": [jax.tree.map(lambda x: x, block_shapes) for _ in range(config.num_layers)],
    }
    master = jax.tree.map(lambda x: abstract(x.shape, "float32"), params)
    state = {
        "params": params,
        "master": master,
        "opt_state": jax.eval_shape(optimizer.init, master),
    }
    tokens = abstract((spec["batch"], config.seq_len), "int32")
    return train_step, state, {"inputs": tokens, "targets": tokens}

"""The training step that Alpa's benchmark of 2022 timed, on the zoo's parts.

A GPT on the frame of a BERT: norms after the sums, no mask but padding, embeddings as products with one-hot rows, the
softmax in float16. Parameters in float16, beside a float32 copy that AdamW updates with float32 moments; no loss scale.

Reference: `benchmark/alpa/benchmark_2d_one_case_gpt_bert.py`, `alpa/model/bert_model.py` and `alpa/model/model_util.py` of
the Alpa repository (Apache-2.0), as of 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from aliquot import zoo
from aliquot.zoo import _gpt
from aliquot.zoo._attention import merge_heads, split_heads
from aliquot.zoo._network import _make, _module, _once
from aliquot.zoo._precision import Precision, abstract

HALF = Precision(compute="float16", params="float16")


class Attention(_gpt.Attention):
    """Every position sees every other; the softmax stays in float16."""

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (split_heads(part(x), self.num_heads) for part in (self.q, self.k, self.v))
        scores = jnp.einsum("bshe,bthe->bhst", q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k)
        return self.out(merge_heads(jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, axis=-1), v)))


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


def alpa_step(spec: dict[str, Any], *, recompute: bool) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]:
    """Step, state and batch of one of its cases; `spec` has the sizes by the file's names."""
    sizes = {name: spec[name] for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_len")}
    config = zoo.configure("gpt-2.6b", **sizes)
    ends_def, ends_shapes, _ = _module(lambda key: _make(Ends, config, HALF, key))
    block_def, block_shapes, _ = _module(lambda key: _make(Block, config, HALF, key))
    block = _once(
        lambda layer, x: nnx.merge(block_def, layer)(x), recompute="block" if recompute else "none", scan=False
    )
    optimizer = optax.adamw(1e-8, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))

    def loss(params: Any, batch: Any) -> jax.Array:
        ends = nnx.merge(ends_def, {name: part for name, part in params.items() if name != "layers"})
        x = ends.embed_tokens(batch["inputs"])
        for layer in params["layers"]:
            x = block(layer, x)
        chosen = jax.nn.one_hot(batch["targets"], config.vocab_size)
        each = -jnp.sum(chosen * jax.nn.log_softmax(ends.logits(x), axis=-1), axis=-1)
        return each.mean()

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        params = jax.tree.map(lambda x: x.astype(jnp.float16), master)
        return {"params": params, "master": master, "opt_state": opt_state}, {"loss": value}

    params = {**ends_shapes, "layers": [jax.tree.map(lambda x: x, block_shapes) for _ in range(config.num_layers)]}
    master = jax.tree.map(lambda x: abstract(x.shape, "float32"), params)
    state = {"params": params, "master": master, "opt_state": jax.eval_shape(optimizer.init, master)}
    tokens = abstract((spec["batch"], config.seq_len), "int32")
    return train_step, state, {"inputs": tokens, "targets": tokens}

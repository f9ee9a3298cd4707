"""cuDNN's attention on CPUs: plain attention that takes what the kernel takes, in any precision,
and returns what it returns.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_HEADS_FIRST = 1


def _wide(q: Any) -> Any:
    return jnp.promote_types(q.dtype, jnp.float32)


def _shared(x: Any, heads: int) -> Any:
    """Keys or values, once for each head of the queries."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def _scores(q: Any, k: Any, params: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, _shared(k, q.shape[2])) * params["scale"]
    if params["mask_type"].name == "CAUSAL":
        rows, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
        scores = jnp.where(rows >= keys, scores, -jnp.inf)
    return scores


def _forward(q: Any, k: Any, v: Any, *_: Any, **params: Any) -> list[Any]:
    if params["layout"] == _HEADS_FIRST:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = _scores(q, k, params)
    sums = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - sums[..., None]), _shared(v, q.shape[2]))
    out = jnp.swapaxes(out, 1, 2) if params["layout"] == _HEADS_FIRST else out
    return [out.astype(q.dtype), sums.astype(_wide(q))][: 1 + params["is_training"]]


def _backward(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> list[Any]:
    """From the given normalisers and result, as the kernel: those may be of more keys."""
    sums, out, grad = rest[-3:]
    if params["layout"] == _HEADS_FIRST:
        q, k, v, out, grad = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, out, grad))
    heads = q.shape[2]
    weights = jnp.exp(_scores(q, k, params) - sums[..., None])
    of_weights = jnp.einsum("btnh,bsnh->bnts", grad, _shared(v, heads))
    inner = jnp.einsum("btnh,btnh->bnt", grad, out)
    of_scores = weights * (of_weights - inner[..., None]) * params["scale"]

    def summed(x: Any) -> Any:
        """Over the heads of the queries that share one of keys."""
        return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3)

    grads = [
        jnp.einsum("bnts,bsnh->btnh", of_scores, _shared(k, heads)),
        summed(jnp.einsum("bnts,btnh->bsnh", of_scores, q)),
        summed(jnp.einsum("bnts,btnh->bsnh", weights, grad)),
    ]
    if params["layout"] == _HEADS_FIRST:
        grads = [jnp.swapaxes(g, 1, 2) for g in grads]
    return [g.astype(q.dtype) for g in grads]


def heads_first_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """The kernel on arrays of shape (batch, heads, sequence, size)."""
    module: Any = sys.modules[_MODULE]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mask = module.MaskType.CAUSAL if is_causal else module.MaskType.NO_MASK
    out = module.dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask_type=mask, qkv_layout="BNTH"
    )
    return jnp.swapaxes(out, 1, 2)


@functools.cache
def _lowered() -> None:
    module = sys.modules[_MODULE]
    for name, function in (("fwd", _forward), ("bwd", _backward)):
        primitive = getattr(module, f"_dot_product_attention_{name}_p")
        lowering = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
    shapes = module._dot_product_attention_fwd_abstract

    def with_wide_sums(q: Any, *others: Any, **params: Any) -> Any:
        """For 16-bit floats, what JAX says itself."""
        out, *sums = shapes(q, *others, **params)
        return (out, *(s.update(dtype=_wide(q)) for s in sums))

    for primitive in (
        module._dot_product_attention_fwd_p,
        module._dot_product_attention_fwd_p_wrapper,
    ):
        primitive.def_abstract_eval(with_wide_sums)


@pytest.fixture
def cudnn_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with cuDNN's attention run on CPUs, and in wider floats than the kernel takes."""
    # Its module is imported when the kernel is first asked for.
    __import__(_MODULE)
    _lowered()
    for check in ("check_layout", "check_is_flash_attention"):
        monkeypatch.setattr(sys.modules[_MODULE], check, lambda *_, **__: None)
    monkeypatch.setattr("aliquot.runtime.spmd._mesh.missing_kernels", lambda *_: "")

"""Experts without a capacity: each token goes through those that it has chosen; none is dropped.

They are one operator, `experts`, and one for its gradients. Written with a sort, lookups and
grouped products, their rows would stand in an order that depends on the data, and a split of the
tokens would not pass. One operator can declare that it is a sum over tokens, of which tokens,
experts and the elements inside experts may all be split (`rules/experts.py`).

Reference: T. Gale, D. Narayanan, C. Young, M. Zaharia, "MegaBlocks: efficient sparse training with
mixture-of-experts", MLSys 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..core import InputError, listing

Activation: TypeAlias = Callable[..., Any]
_FIRST_MATRIX = 3
ROOM = 1.25
"""Rows for which there is room where experts are split, as a multiple of what devices would send
each other if all experts were chosen equally often. Other rows take further rounds.
"""


def experts(
    tokens: Any,
    chosen: Any,
    weights: Any,
    into: Sequence[Any],
    out: Any,
    *,
    activation: Activation,
) -> Any:
    """The weighted sum of what each token's experts make of it. No token is dropped.

    Expert `e` computes `activation(x @ into[0][e], x @ into[1][e], ...) @ out[e]`. A plan may split
    the experts over devices: tokens then travel to their experts and back. The hidden arrays of the
    forward pass are not kept, but computed again in the backward pass. Derivatives of first order
    only, in reverse mode.

    Args:
        tokens: `(..., features)`.
        chosen: `(..., k)`, integers: the numbers of the experts that each token goes through.
        weights: `(..., k)`: of each of them. The router's gradient comes through these.
        into: matrices `(experts, features, inner)`: one, or two for gated experts.
        out: `(experts, inner, features)`.
        activation: makes one array of as many as there are in `into`, element by element, such as
            `lambda gate, up: jax.nn.silu(gate) * up`. Give the same function each time.

    Raises:
        InputError: shapes or dtypes do not fit; all faults are listed.
    """
    into = tuple(into)
    faults = _faults(tokens, chosen, weights, into, out)
    if faults:
        raise InputError(listing("These experts cannot be computed", faults, "See help(experts)."))
    return _differentiable(activation, tokens, chosen, weights, *into, out)


def _faults(tokens: Any, chosen: Any, weights: Any, into: tuple[Any, ...], out: Any) -> list[str]:
    faults = []
    if tokens.ndim < 2:
        faults.append(f"tokens have shape {tokens.shape}, and need (..., features)")
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        faults.append(f"chosen are {chosen.dtype}, and numbers of experts are integers")
    if chosen.shape != weights.shape or chosen.shape[:-1] != tokens.shape[:-1]:
        faults.append(
            f"chosen {chosen.shape} and weights {weights.shape} need one row for each of the tokens"
            f" {tokens.shape}"
        )
    if not into:
        faults.append("into has no matrix")
    if out.ndim != 3 or any(matrix.ndim != 3 for matrix in into):
        return [*faults, "into and out need matrices for all experts: (experts, rows, columns)"]
    count, inner, _ = out.shape
    wanted = (count, tokens.shape[-1], inner)
    faults += [
        f"into[{k}] has shape {matrix.shape}, and for out {out.shape} and tokens {tokens.shape}"
        f" needs {wanted}"
        for k, matrix in enumerate(into)
        if matrix.shape != wanted
    ]
    kinds = {str(array.dtype) for array in (tokens, *into, out)}
    if len(kinds) > 1:
        faults.append(f"tokens and matrices have dtypes {', '.join(sorted(kinds))}: cast to one")
    return faults


def run_experts(
    tokens: Any, chosen: Any, weights: Any, *matrices: Any, activation: Activation
) -> Any:
    """The experts that `matrices` hold, in JAX's own operators. Numbers below zero, or above the
    last, stand for experts that are elsewhere: these add nothing.
    """
    *into, out = matrices
    count, top = out.shape[0], chosen.shape[-1]
    numbers = chosen.reshape(-1).astype(jnp.int32)
    is_here = (numbers >= 0) & (numbers < count)
    numbers = jnp.where(is_here, numbers, count)
    order = jnp.argsort(numbers, stable=True)
    sizes = jnp.zeros(count + 1, jnp.int32).at[numbers].add(1)[:count]
    rows = tokens.reshape(-1, tokens.shape[-1])[order // top]
    shares = jnp.where(is_here, weights.reshape(-1), 0)[order][:, None]
    hidden = activation(*(jax.lax.ragged_dot(rows, matrix, sizes) for matrix in into))
    # Shares are factors of the last product, which is linear. Applied before it, their gradient
    # needs no result of it.
    wide = jnp.promote_types(hidden.dtype, shares.dtype)
    hidden = (hidden.astype(wide) * shares.astype(wide)).astype(tokens.dtype)
    hidden = jnp.where(is_here[order][:, None], hidden, 0)
    made = jax.lax.ragged_dot(hidden, out, sizes)
    # Kernels leave undefined what lies behind the last group.
    made = jnp.where(is_here[order][:, None], made, 0)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    by_token = made[back].reshape(-1, top, made.shape[-1])
    total = by_token.astype(jnp.promote_types(made.dtype, jnp.float32)).sum(1)
    return total.astype(made.dtype).reshape(*tokens.shape[:-1], made.shape[-1])


def run_gradients(
    tokens: Any, chosen: Any, weights: Any, *rest: Any, activation: Activation
) -> list[Any]:
    """The gradients of tokens, weights and matrices, given that of the result as the last
    argument.
    """
    *matrices, gradient = rest

    def forward(tokens: Any, weights: Any, *matrices: Any) -> Any:
        return run_experts(tokens, chosen, weights, *matrices, activation=activation)

    _, backward = jax.vjp(forward, tokens, weights, *matrices)
    return list(backward(gradient))


def _primitive(name: str, run: Callable[..., Any], results: Callable[..., Any]) -> Any:
    """A primitive that is computed as `run` where no plan says otherwise."""
    primitive: Any = Primitive(name)
    primitive.multiple_results = run is run_gradients
    primitive.def_abstract_eval(results)
    primitive.def_impl(jax.jit(run, static_argnames="activation"))
    mlir.register_lowering(
        primitive, mlir.lower_fun(run, multiple_results=primitive.multiple_results)
    )

    def mapped(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
        fronted = [
            jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(arrays, dims, strict=True)
        ]
        if all(d is None for d in dims[_FIRST_MATRIX:]):
            # More tokens of the same experts.
            return primitive.bind(*fronted[:_FIRST_MATRIX], *arrays[_FIRST_MATRIX:], **params), 0
        # Grouped products have no general `vmap`.
        out = jax.lax.map(lambda one: run(*one, **params), tuple(fronted))
        return out, [0] * len(out) if primitive.multiple_results else 0

    batching.primitive_batchers[primitive] = mapped
    return primitive


def _result(tokens: Any, chosen: Any, weights: Any, *matrices: Any, activation: Activation) -> Any:
    return tokens.update(shape=(*tokens.shape[:-1], matrices[-1].shape[-1]), weak_type=False)


def _results(
    tokens: Any, chosen: Any, weights: Any, *rest: Any, activation: Activation
) -> list[Any]:
    return [array.update(weak_type=False) for array in (tokens, weights, *rest[:-1])]


_forward = _primitive("experts", run_experts, _result)
_backward = _primitive("experts_gradients", run_gradients, _results)
EXPERTS = (_forward.name, _backward.name)
"""Names of the operators of experts without a capacity: forward, and that of the gradients."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(activation: Activation, *arrays: Any) -> Any:
    return _forward.bind(*arrays, activation=activation)


def _forward_keeping(activation: Activation, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    return _differentiable(activation, *arrays), arrays


def _gradients(activation: Activation, arrays: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
    tokens, weights, *matrices = _backward.bind(*arrays, gradient, activation=activation)
    return tokens, None, weights, *matrices


_differentiable.defvjp(_forward_keeping, _gradients)

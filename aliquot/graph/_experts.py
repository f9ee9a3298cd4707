"""Experts without a capacity: each token goes through those that it has chosen; none is dropped.

They are one operator, `experts`, and one for its gradients. Written with a sort, lookups and
grouped products, their rows would stand in an order that depends on the data, and a split of the
tokens would not pass. One operator can declare that it is a sum over tokens, of which tokens,
experts and the elements inside experts may all be split (`rules/experts.py`).

With magnitudes by which to scale, their products are of 8-bit floats. What is to be scaled is cast
before the operator, so it travels and is kept in 8 bits; what experts hold inside is cast there.

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
from ._eight_bits import NARROW, WIDE, magnitude, to_eight_bits, unscaling

Activation: TypeAlias = Callable[..., Any]
FIRST_MATRIX = 3
"""The operand that is the first of the matrices, behind tokens, choices and weights."""
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
    amax: Sequence[Sequence[Any]] | None = None,
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
        amax: makes all products, forward and backward, multiply 8-bit floats: e4m3, and e5m2 for
            gradients. Three sequences with a scalar for each matrix in `into` and for `out`: the
            largest magnitudes of what the matrix multiplies, of the matrix itself, and of the
            gradient of the product, as a step before saw them. Arrays are scaled by these, and what
            is larger is clipped; zeros leave an array as it is. The "gradients" of the first and
            third are the magnitudes that this step saw; of those of the matrices they are zero.

    Raises:
        InputError: shapes or dtypes do not fit; all faults are listed.
    """
    into = tuple(into)
    faults = _faults(tokens, chosen, weights, into, out)
    if amax is not None and [len(each) for each in amax] != [len(into) + 1] * 3:
        faults.append(
            f"amax has {[len(each) for each in amax]} magnitudes, and needs three times"
            f" {len(into) + 1}, one for each matrix in into and for out"
        )
    if faults:
        raise InputError(listing("These experts cannot be computed", faults, "See help(experts)."))
    if amax is None:
        return _differentiable(activation, tokens, chosen, weights, *into, out)
    scales = tuple(tuple(jnp.asarray(a, jnp.float32) for a in each) for each in amax)
    return _in_eight_bits(activation, scales, tokens, chosen, weights, (*into, out))


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
    tokens: Any,
    chosen: Any,
    weights: Any,
    *matrices: Any,
    activation: Activation,
    wide: str | None = None,
) -> Any:
    """The experts that `matrices` hold, in JAX's own operators. Numbers below zero, or above the
    last, stand for experts that are elsewhere: these add nothing.

    With `wide`, the dtype of the result, tokens and matrices are 8-bit floats, and their magnitudes
    `(3, matrices)`, as in `experts`, stand behind the matrices.
    """
    rows = _Rows(chosen, weights, matrices[0].shape[0])
    taken = tokens.reshape(-1, tokens.shape[-1])[rows.token]
    if wide is None:
        *into, out = matrices
        pre = [jax.lax.ragged_dot(taken, matrix, rows.sizes) for matrix in into]
        made = jax.lax.ragged_dot(rows.shared(activation, *pre, rows.shares), out, rows.sizes)
    else:
        *into, out, amax = matrices
        pre = _scaled_products(taken, into, amax, rows.sizes, wide)
        hidden = rows.shared(activation, *pre, rows.shares)
        narrow = to_eight_bits(hidden, amax[0, -1], NARROW)
        (made,) = _scaled_products(narrow, [out], amax[:, -1:], rows.sizes, wide)
    # Kernels leave undefined what lies behind the last group.
    by_token = rows.by_choice(rows.only_here(made))
    total = by_token.astype(jnp.promote_types(made.dtype, jnp.float32)).sum(1)
    return total.astype(made.dtype).reshape(*tokens.shape[:-1], made.shape[-1])


class _Rows:
    """Tokens, once for each expert that they chose, in the order of the experts."""

    def __init__(self, chosen: Any, weights: Any, num_experts: int) -> None:
        self.top = chosen.shape[-1]
        numbers = chosen.reshape(-1).astype(jnp.int32)
        is_here = (numbers >= 0) & (numbers < num_experts)
        numbers = jnp.where(is_here, numbers, num_experts)
        self.order = jnp.argsort(numbers, stable=True)
        self.sizes = jnp.zeros(num_experts + 1, jnp.int32).at[numbers].add(1)[:num_experts]
        self.token = self.order // self.top
        self.shares = jnp.where(is_here, weights.reshape(-1), 0)[self.order][:, None]
        self.is_here = is_here[self.order][:, None]

    def only_here(self, rows: Any) -> Any:
        """Rows, with zeros for those of experts that are elsewhere."""
        return jnp.where(self.is_here, rows, 0)

    def shared(self, activation: Activation, *pre_and_shares: Any) -> Any:
        """What the last product reads. Shares are factors of it, as it is linear. Applied before
        it, their gradient needs no result of it.
        """
        *pre, shares = pre_and_shares
        hidden = activation(*pre)
        wide = jnp.promote_types(hidden.dtype, shares.dtype)
        hidden = (hidden.astype(wide) * shares.astype(wide)).astype(pre[0].dtype)
        return self.only_here(hidden)

    def by_choice(self, rows: Any) -> Any:
        """`(tokens, top, ...)`, in the order of the tokens."""
        places = jnp.arange(self.order.size, dtype=self.order.dtype)
        back = jnp.zeros_like(self.order).at[self.order].set(places)
        return rows[back].reshape(-1, self.top, rows.shape[-1])


def _scaled_products(
    rows: Any, matrices: Sequence[Any], amax: Any, sizes: Any, dtype: str
) -> list[Any]:
    """Grouped products of 8-bit floats, without their scales."""
    return [
        jax.lax.ragged_dot(rows, matrix, sizes, preferred_element_type=dtype)
        * unscaling((amax[0, k], NARROW), (amax[1, k], NARROW)).astype(dtype)
        for k, matrix in enumerate(matrices)
    ]


def run_gradients(
    tokens: Any,
    chosen: Any,
    weights: Any,
    *rest: Any,
    activation: Activation,
    wide: str | None = None,
) -> list[Any]:
    """The gradients of tokens, weights and matrices, given that of the result as the last
    argument. With `wide` also the magnitudes that each token had in the experts,
    `(..., matrices)`: of the gradient of each product by `into`, and of what `out` multiplies.
    """
    *matrices, gradient = rest
    if wide:
        *matrices, amax = matrices
        return _scaled_gradients(
            tokens, chosen, weights, matrices, amax, gradient, activation, wide
        )

    def forward(tokens: Any, weights: Any, *matrices: Any) -> Any:
        return run_experts(tokens, chosen, weights, *matrices, activation=activation)

    _, backward = jax.vjp(forward, tokens, weights, *matrices)
    return list(backward(gradient))


def _scaled_gradients(
    tokens: Any,
    chosen: Any,
    weights: Any,
    matrices: Sequence[Any],
    amax: Any,
    gradient: Any,
    activation: Activation,
    wide: str,
) -> list[Any]:
    *into, out = matrices
    rows = _Rows(chosen, weights, out.shape[0])
    taken, dmade = (x.reshape(-1, x.shape[-1])[rows.token] for x in (tokens, gradient))
    pre = _scaled_products(taken, into, amax, rows.sizes, wide)
    hidden, backward = jax.vjp(
        functools.partial(rows.shared, activation), *map(rows.only_here, pre), rows.shares
    )

    def before(k: int, after: Any) -> Any:
        """The gradient of the rows that matrix `k` multiplies."""
        made = jax.lax.ragged_dot_general(
            after, matrices[k], rows.sizes, _BY_COLUMNS, preferred_element_type=wide
        )
        return made * unscaling((amax[1, k], NARROW), (amax[2, k], WIDE)).astype(wide)

    def of_matrix(k: int, rows8: Any, after: Any) -> Any:
        made = jax.lax.ragged_dot_general(
            rows8, after, rows.sizes, _OVER_ROWS, preferred_element_type=wide
        )
        return made * unscaling((amax[0, k], NARROW), (amax[2, k], WIDE)).astype(wide)

    *dpre, dshares = backward(rows.only_here(before(len(into), dmade)))
    narrow = [to_eight_bits(each, amax[2, k], WIDE) for k, each in enumerate(dpre)]
    drows = sum(before(k, each) for k, each in enumerate(narrow))
    by_token = rows.by_choice(rows.only_here(drows))
    dtokens = by_token.astype(jnp.promote_types(wide, jnp.float32)).sum(1).astype(wide)
    hidden8 = to_eight_bits(hidden, amax[0, -1], NARROW)
    seen = jnp.stack([jnp.max(jnp.abs(x), -1).astype(jnp.float32) for x in (*dpre, hidden)], -1)
    return [
        dtokens.reshape(tokens.shape),
        rows.by_choice(dshares).reshape(weights.shape),
        *(of_matrix(k, taken, each) for k, each in enumerate(narrow)),
        of_matrix(len(into), hidden8, dmade),
        rows.by_choice(seen).max(1).reshape(*tokens.shape[:-1], len(matrices)),
    ]


_BY_COLUMNS, _OVER_ROWS = (
    jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((mine,), (others,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )
    for mine, others, groups in ((1, 2, [0]), (0, 0, []))
)


def _primitive(name: str, run: Callable[..., Any], results: Callable[..., Any]) -> Any:
    """A primitive that is computed as `run` where no plan says otherwise."""
    primitive: Any = Primitive(name)
    primitive.multiple_results = run is run_gradients
    primitive.def_abstract_eval(results)
    primitive.def_impl(jax.jit(run, static_argnames=("activation", "wide")))
    mlir.register_lowering(
        primitive, mlir.lower_fun(run, multiple_results=primitive.multiple_results)
    )

    def mapped(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
        fronted = [
            jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(arrays, dims, strict=True)
        ]
        if all(d is None for d in dims[FIRST_MATRIX:]):
            # More tokens of the same experts.
            return primitive.bind(*fronted[:FIRST_MATRIX], *arrays[FIRST_MATRIX:], **params), 0
        # Grouped products have no general `vmap`.
        out = jax.lax.map(lambda one: run(*one, **params), tuple(fronted))
        return out, [0] * len(out) if primitive.multiple_results else 0

    batching.primitive_batchers[primitive] = mapped
    return primitive


def _result(
    tokens: Any,
    chosen: Any,
    weights: Any,
    *matrices: Any,
    activation: Activation,
    wide: str | None = None,
) -> Any:
    out = matrices[-2 if wide else -1]
    return tokens.update(
        shape=(*tokens.shape[:-1], out.shape[-1]), dtype=_dtype(tokens, wide), weak_type=False
    )


def _results(
    tokens: Any,
    chosen: Any,
    weights: Any,
    *rest: Any,
    activation: Activation,
    wide: str | None = None,
) -> list[Any]:
    matrices = rest[: -2 if wide else -1]
    results = [
        array.update(dtype=_dtype(array, wide), weak_type=False) for array in (tokens, *matrices)
    ]
    results.insert(1, weights.update(weak_type=False))
    if wide:
        shape = (*tokens.shape[:-1], len(matrices))
        results.append(tokens.update(shape=shape, dtype=jnp.dtype("float32"), weak_type=False))
    return results


def _dtype(array: Any, wide: str | None) -> Any:
    return jnp.dtype(wide) if wide else array.dtype


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_eight_bits(
    activation: Activation, amax: Any, tokens: Any, chosen: Any, weights: Any, matrices: Any
) -> Any:
    return _in_eight_bits_keeping(activation, amax, tokens, chosen, weights, matrices)[0]


def _in_eight_bits_keeping(
    activation: Activation, amax: Any, tokens: Any, chosen: Any, weights: Any, matrices: Any
) -> tuple[Any, Any]:
    of_inputs, of_matrices, _ = amax
    # What travels between devices is 8-bit floats, too.
    narrow = [to_eight_bits(tokens, of_inputs[0], NARROW), chosen, weights]
    narrow += [to_eight_bits(m, a, NARROW) for m, a in zip(matrices, of_matrices, strict=True)]
    # All matrices in `into` multiply the same.
    inputs = (*of_inputs[:1] * (len(matrices) - 1), of_inputs[-1])
    scales = jnp.stack([jnp.stack(each) for each in (inputs, *amax[1:])])
    wide = str(tokens.dtype)
    made = _forward.bind(*narrow, scales, activation=activation, wide=wide)
    return made, (narrow, scales, magnitude(tokens))


def _eight_bit_gradients(activation: Activation, kept: Any, gradient: Any) -> tuple[Any, ...]:
    narrow, scales, of_tokens = kept
    after = to_eight_bits(gradient, scales[2, -1], WIDE)
    tokens, weights, *matrices, by_token = _backward.bind(
        *narrow, scales, after, activation=activation, wide=str(gradient.dtype)
    )
    rows = tuple(range(by_token.ndim - 1))
    *of_pre, of_hidden = (magnitude(by_token[..., k], rows) for k in range(len(matrices)))
    inputs = (of_tokens,) * len(of_pre) + (of_hidden,)
    amax = inputs, (jnp.zeros(()),) * len(inputs), (*of_pre, magnitude(gradient))
    return amax, tokens, None, weights, tuple(matrices)


_in_eight_bits.defvjp(_in_eight_bits_keeping, _eight_bit_gradients)

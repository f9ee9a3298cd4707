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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..core import InputError, listing
from ._eight_bits import NARROW, WIDE, magnitude, to_eight_bits, unscaling

Activation: TypeAlias = Callable[..., Any]
FIRST_MATRIX = 3
"""The operand that is the first of the matrices, behind tokens, choices and weights."""
ROOM = 1.25
"""Rows for which there is room, as a multiple of those that each expert would have, or that devices
would send each other, if all experts were chosen equally often. Other rows take further rounds.
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
    if amax is not None and list(map(len, amax)) != [len(into) + 1] * 3:
        faults.append(
            f"amax has {list(map(len, amax))} magnitudes, and needs three times"
            f" {len(into) + 1}, one for each matrix in into and for out"
        )
    if faults:
        raise InputError(listing("These experts cannot be computed", faults, "See help(experts)."))
    if amax is None:
        return _differentiable(activation, tokens, chosen, weights, *into, out)
    as_float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    scales = tuple(tuple(map(as_float32, each)) for each in amax)
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
    room: float = ROOM,
) -> Any:
    """The experts that `matrices` hold, in JAX's own operators. Numbers below zero, or above the
    last, stand for experts that are elsewhere: these add nothing.

    With `wide`, the dtype of the result, tokens and matrices are 8-bit floats, and their magnitudes
    `(3, matrices)`, as in `experts`, stand behind the matrices.

    Args:
        room: for how many rows each expert has places at a time, as a multiple of the mean. Rows
            that find none take further rounds.
    """
    *held, amax = matrices if wide else (*matrices, None)
    *into, out = held

    def one_round(rows: _Rows) -> list[Any]:
        products = _Products(rows, held, amax, wide)
        taken = rows.of_tokens(tokens)
        pre = [products.after(k, taken) for k in range(len(into))]
        hidden = rows.shared(activation, *pre, rows.shares)
        # Kernels leave undefined what lies behind the last group.
        made = rows.only_here(products.after(len(into), products.narrow(hidden, 0, len(into))))
        return [_sum_of_choices(rows.by_choice(made))]

    (total,) = _by_round(one_round, chosen, weights, out.shape[0], room)
    dtype = jnp.dtype(wide or tokens.dtype)
    return total.astype(dtype).reshape(*tokens.shape[:-1], out.shape[-1])


def run_gradients(
    tokens: Any,
    chosen: Any,
    weights: Any,
    *rest: Any,
    activation: Activation,
    wide: str | None = None,
    room: float = ROOM,
) -> list[Any]:
    """The gradients of tokens, weights and matrices, given that of the result as the last
    argument. With `wide` also the magnitudes that each token had in the experts,
    `(..., matrices)`: of the gradient of each product by `into`, and of what `out` multiplies.
    """
    *matrices, gradient = rest
    *matrices, amax = matrices if wide else (*matrices, None)
    *into, out = matrices

    def one_round(rows: _Rows) -> list[Any]:
        products = _Products(rows, matrices, amax, wide)
        taken, dmade = rows.of_tokens(tokens), rows.of_tokens(gradient)
        pre = [rows.only_here(products.after(k, taken)) for k in range(len(into))]
        hidden, backward = jax.vjp(functools.partial(rows.shared, activation), *pre, rows.shares)
        *dpre, dshares = backward(rows.only_here(products.before(len(into), dmade)))
        narrow = [products.narrow(each, 2, k) for k, each in enumerate(dpre)]
        drows = sum(products.before(k, each) for k, each in enumerate(narrow))
        hidden8 = products.narrow(hidden, 0, len(into))
        results = [
            _sum_of_choices(rows.by_choice(rows.only_here(drows))),
            rows.by_choice(dshares),
            *(products.of_matrix(k, taken, each) for k, each in enumerate(narrow)),
            products.of_matrix(len(into), hidden8, dmade),
        ]
        if wide:
            seen = [jnp.max(jnp.abs(x), -1).astype(jnp.float32) for x in (*dpre, hidden)]
            results.append(rows.by_choice(jnp.stack(seen, -1)).max(1))
        return results

    of_tokens, of_weights, *of_matrices = _by_round(
        one_round, chosen, weights, out.shape[0], room, largest=bool(wide)
    )
    results = [
        of_tokens.astype(jnp.dtype(wide or tokens.dtype)).reshape(tokens.shape),
        of_weights.reshape(weights.shape),
        *of_matrices,
    ]
    if wide:
        results[-1] = results[-1].reshape(*tokens.shape[:-1], len(matrices))
    return results


def _by_round(
    one_round: Callable[[_Rows], list[Any]],
    chosen: Any,
    weights: Any,
    num_experts: int,
    room: float,
    *,
    largest: bool = False,
) -> list[Any]:
    """What `one_round` makes of the rows of all experts, added up.

    TPUs have kernels that multiply consecutive rows by one matrix for each group, so rows stand in
    the order of their experts. Elsewhere such products would multiply each row by all matrices;
    there each expert has equally many places, and products are batched. Rows that find no place
    take further rounds. With `largest`, the last result is the largest of all rounds, not the sum.
    """
    ordered = _Ordered.of(chosen, num_experts)
    most = chosen.size
    # Kernels take sizes that are multiples of 16.
    places = min(most, 16 * math.ceil(room * most / num_experts / 16))

    def grouped(ordered: _Ordered, weights: Any) -> list[Any]:
        return one_round(_Rows.in_groups(ordered, weights))

    def batched(ordered: _Ordered, weights: Any) -> list[Any]:
        total = one_round(_Rows.in_places(ordered, weights, places, 0))
        if places == most:
            return total
        rounds = -(-jnp.max(ordered.sizes) // places)

        def turn(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            number, total = state
            more = one_round(_Rows.in_places(ordered, weights, places, number))
            added = [a + b for a, b in zip(total, more, strict=True)]
            if largest:
                added[-1] = jnp.maximum(total[-1], more[-1])
            return number + 1, added

        first = jnp.ones_like(rounds), total
        return jax.lax.while_loop(lambda state: state[0] < rounds, turn, first)[1]

    total: list[Any] = jax.lax.platform_dependent(ordered, weights, tpu=grouped, default=batched)
    return total


def _sum_of_choices(rows: Any) -> Any:
    """`(tokens, features)` from `(tokens, top, features)`, in float32 at least."""
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32)).sum(1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "place", "expert", "starts", "sizes"],
    meta_fields=["top"],
)
@dataclass(frozen=True, slots=True)
class _Ordered:
    """All choices in the order of their experts; those of experts elsewhere come last.

    Attributes:
        order: `(choices,)`: which choice stands at each place of that order.
        place: `(choices,)`: where each choice stands.
        expert: `(choices,)`: of each choice; the number of experts if it is elsewhere.
        starts, sizes: `(experts,)`: where the choices of each expert begin, and their number.
        top: choices of each token.
    """

    order: Any
    place: Any
    expert: Any
    starts: Any
    sizes: Any
    top: int

    @staticmethod
    def of(chosen: Any, num_experts: int) -> _Ordered:
        expert = chosen.reshape(-1).astype(jnp.int32)
        is_here = (expert >= 0) & (expert < num_experts)
        expert = jnp.where(is_here, expert, num_experts)
        order = jnp.argsort(expert, stable=True)
        numbers = jnp.arange(order.size, dtype=order.dtype)
        place = jnp.zeros_like(order).at[order].set(numbers)
        sizes = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)[:num_experts]
        starts = jnp.cumsum(sizes) - sizes
        return _Ordered(order, place, expert, starts, sizes, chosen.shape[-1])


class _Rows(msgspec.Struct, frozen=True):
    """Rows of tokens, once for each expert that they chose, where products find them.

    Attributes:
        choice: `(rows,)`: the choice that each row is of.
        is_here: `(rows, 1)`: whether there is such a choice, and its expert is here.
        place: `(choices,)`: the row of each choice.
        has_row: `(choices,)`: whether it has one.
        shares: `(rows, 1)`: its weight.
        sizes: `(experts,)`: rows of each expert, one expert after the other; None if each has
            equally many.
        top: choices of each token.
    """

    choice: Any
    is_here: Any
    place: Any
    has_row: Any
    shares: Any
    sizes: Any
    top: int

    @staticmethod
    def in_groups(ordered: _Ordered, weights: Any) -> _Rows:
        """All rows, in the order of their experts."""
        is_here = ordered.expert < ordered.sizes.size
        return _Rows(
            ordered.order,
            is_here[ordered.order][:, None],
            ordered.place,
            is_here,
            jnp.where(is_here, weights.reshape(-1), 0)[ordered.order][:, None],
            ordered.sizes,
            ordered.top,
        )

    @staticmethod
    def in_places(ordered: _Ordered, weights: Any, places: int, number: Any) -> _Rows:
        """Those that have one of the `places` of each expert in round `number`."""
        rank = number * places + jnp.arange(places, dtype=jnp.int32)
        is_here = (rank < ordered.sizes[:, None]).reshape(-1)
        choice = ordered.order[jnp.where(is_here, (ordered.starts[:, None] + rank).reshape(-1), 0)]
        expert = jnp.minimum(ordered.expert, ordered.sizes.size - 1)
        rank_of = ordered.place - ordered.starts[expert] - number * places
        has_row = (ordered.expert < ordered.sizes.size) & (rank_of >= 0) & (rank_of < places)
        return _Rows(
            choice,
            is_here[:, None],
            jnp.where(has_row, expert * places + rank_of, 0),
            has_row,
            jnp.where(is_here, weights.reshape(-1)[choice], 0)[:, None],
            None,
            ordered.top,
        )

    def of_tokens(self, tokens: Any) -> Any:
        """The rows of an array `(..., features)` of all tokens."""
        return tokens.reshape(-1, tokens.shape[-1])[self.choice // self.top]

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
        """`(tokens, top, ...)`, in the order of the tokens; zeros for choices without a row."""
        found = jnp.where(self.has_row[:, None], rows[self.place], 0)
        return found.reshape(-1, self.top, rows.shape[-1])


class _Products(msgspec.Struct, frozen=True):
    """The products of an expert's rows with its matrices, for all experts at once.

    Attributes:
        matrices: `(experts, ...)`.
        amax: magnitudes by which 8-bit floats are scaled, `(3, matrices)`; None without.
        wide: dtype of the results; None for that of the matrices.
    """

    rows: _Rows
    matrices: Sequence[Any]
    amax: Any
    wide: str | None

    def after(self, k: int, rows: Any) -> Any:
        """Rows times matrix `k`."""
        return self._unscaled(self._product(rows, self.matrices[k], 1), (0, NARROW), (1, NARROW), k)

    def before(self, k: int, rows: Any) -> Any:
        """The gradients of the rows that matrix `k` multiplies, from those of the products."""
        return self._unscaled(self._product(rows, self.matrices[k], 2), (1, NARROW), (2, WIDE), k)

    def of_matrix(self, k: int, rows: Any, after: Any) -> Any:
        """The gradient of matrix `k`."""
        return self._unscaled(self._product(rows, after, 0), (0, NARROW), (2, WIDE), k)

    def narrow(self, rows: Any, magnitudes: int, k: int) -> Any:
        """Rows as 8-bit floats, if products are of these."""
        if self.amax is None:
            return rows
        return to_eight_bits(rows, self.amax[magnitudes, k], WIDE if magnitudes == 2 else NARROW)

    def _unscaled(self, made: Any, left: tuple[int, Any], right: tuple[int, Any], k: int) -> Any:
        if self.amax is None:
            return made
        scales = ((self.amax[magnitudes, k], kind) for magnitudes, kind in (left, right))
        return made * unscaling(*scales).astype(self.wide)

    def _product(self, rows: Any, other: Any, summed: int) -> Any:
        """For each expert, its rows times its matrix in `other`, summed over dim `summed` of that;
        with dim 0, `other` are rows, too, and the sum is over rows.
        """
        over_rows = summed == 0
        if self.rows.sizes is not None:
            numbers = jax.lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(((0 if over_rows else 1,), (summed,)), ((), ())),
                lhs_ragged_dimensions=[0],
                rhs_group_dimensions=[] if over_rows else [0],
            )
            return jax.lax.ragged_dot_general(
                rows, other, self.rows.sizes, numbers, preferred_element_type=self.wide
            )
        count = self.matrices[0].shape[0]
        rows = rows.reshape(count, -1, rows.shape[-1])
        if over_rows:
            other = other.reshape(count, -1, other.shape[-1])
        dims = (((1 if over_rows else 2,), (summed or 1,)), ((0,), (0,)))
        made = jax.lax.dot_general(rows, other, dims, preferred_element_type=self.wide)
        return made if over_rows else made.reshape(-1, made.shape[-1])


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
    results = []
    for array in (tokens, *matrices):
        results.append(array.update(dtype=_dtype(array, wide), weak_type=False))
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


def _gradients(activation: Activation, arrays: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
    tokens, weights, *matrices = _backward.bind(*arrays, gradient, activation=activation)
    return tokens, None, weights, *matrices


_differentiable.defvjp(lambda *given: (_differentiable(*given), given[1:]), _gradients)


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
    scales = jnp.stack(list(map(jnp.stack, (inputs, *amax[1:]))))
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

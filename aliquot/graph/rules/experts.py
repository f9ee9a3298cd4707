"""Experts without a capacity: tokens, experts and the elements inside experts may be split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._experts import EXPERTS, FIRST_MATRIX, ROOM
from .._rule import DimRule, DimRuleFn, Exchange, HasShape, Inside, register_dim_rule
from .._traits import Traits
from ._factors import Factors

_TOKENS, _CHOSEN, _WEIGHTS = range(FIRST_MATRIX)


def _experts(is_backward: bool) -> DimRuleFn:
    """`y[t] = sum_k weights[t, k] * out[e] @ activation(into[e] @ x[t])` with `e = chosen[t, k]`.

    Each token is computed by itself. The elements inside experts are summed by the last product.
    If experts are split, so are the tokens, over the same devices: rows go to the experts and come
    back. Work is counted as if all experts were chosen equally often. With products of 8-bit
    floats, magnitudes are read, and the gradients come with those of each token.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        tokens, chosen, _, *others = operands
        wide = params.get("wide")
        matrices = others[: len(others) - is_backward - bool(wide)]
        count, inner, made = matrices[-1].shape
        top, features, num_into = chosen.shape[-1], tokens.shape[-1], len(matrices) - 1
        f = Factors()
        lead = list(map(f.split, tokens.shape[:-1]))
        dim = next((d for d, size in enumerate(tokens.shape[:-1]) if size > 1), -1)
        e = f.split(math.gcd(count, tokens.shape[dim]) if dim >= 0 else count)
        exchange = None
        if dim >= 0 and e != "1":
            # Split along with the tokens, over the same devices.
            # Rows of features for each choice, and what is said of each choice.
            often = ROOM * top
            sends = {_TOKENS: often, _CHOSEN: ROOM, _WEIGHTS: ROOM}
            returns = {0: often}
            if is_backward:
                sends[len(operands) - 1] = often
                returns[1] = ROOM
                if wide:
                    returns[2 + len(matrices)] = often
            exchange = Exchange(factor=e, beside=lead[dim], sends=sends, returns=returns)
        rest = f.whole(count // f.sizes.get(e, 1))
        of_experts = (e + rest).replace("1", "") or "1"
        n, m = f.split(inner), f.whole(features)
        choice, width = f.whole(top), f.whole(made)
        x, per_choice = (*lead, m), (*lead, choice)
        into = (of_experts, m, n)
        each = [x, per_choice, per_choice, *[into] * num_into, (of_experts, n, width)]
        scales = [(f.whole(3), f.whole(len(matrices)))] if wide else []
        rows = float(math.prod(chosen.shape))
        itemsize = jnp.dtype(wide or tokens.dtype).itemsize
        # Forward each matrix once. Backward those that lead in once more, and then two products for
        # each matrix: the gradients of what it reads, and its own.
        products = 3 * num_into + 2 if is_backward else num_into + 1
        of_tokens = frozenset((*lead, e)) - {"1"}
        # The gradients hold twice as many at once, and those of the matrices for one round beside
        # their sums over rounds, which the loop copies.
        held = 2 * num_into + 1 if is_backward else num_into + 1
        # What products read of these is cast, to one byte each.
        cast = rows * inner * (1 + num_into * is_backward) if wide else 0.0
        copies = itemsize * sum(math.prod(matrix.shape) for matrix in matrices)
        inside = (
            Inside(
                num_bytes=ROOM * rows * (features + made) * itemsize,
                passes=2.0 * (3 if is_backward else 1),
                divided_by=of_tokens,
            ),
            Inside(
                num_bytes=ROOM * (rows * inner * held * itemsize + cast),
                passes=2.0,
                divided_by=of_tokens | {n},
            ),
            Inside(
                num_bytes=2.0 * copies if is_backward else 0.0,
                passes=1.0,
                divided_by=frozenset({e, n}) - {"1"},
            ),
        )
        work = 2.0 * products * rows * features * inner
        results_of = [(*lead, width)]
        linear = [0, 0, 1, *[0] * num_into, 2]
        if is_backward:
            results_of = [x, per_choice, *each[FIRST_MATRIX:]]
            linear = [0, 0, 0, *[0] * num_into, 0, 1]
        sums = frozenset(range(len(results_of))) if is_backward else frozenset[int]()
        if wide:
            # Rounding is not linear.
            linear = [0] * len(operands)
        if wide and is_backward:
            # The largest of all parts of what is inside, which are at once those of the whole.
            results_of.append((*lead, scales[0][1]))
        return f.rule(
            [*each, *scales, (*lead, width)] if is_backward else [*each, *scales],
            results_of,
            linear=tuple(linear),
            contracts=True,
            flops_per_point=work / max(math.prod(size for size in f.sizes.values() if size), 1),
            partial=sums,
            exchange=exchange,
            inside=inside,
        )

    return declare


for _name, _is_backward in zip(EXPERTS, (False, True), strict=True):
    register_dim_rule(_name, traits=Traits(costly=True, runs_on_pieces=True))(
        _experts(_is_backward)
    )

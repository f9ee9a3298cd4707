"""Fused attention by cuDNN (`jax.nn.dot_product_attention(..., implementation="cudnn")`): batch and
heads may be split, and sequences at the price of a ring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._jax_compat import ATTENTION
from .._rule import DimRule, DimRuleFn, Dims, HasShape, Ring, Scores, register_dim_rule, whole
from .._traits import Traits
from ._factors import Factors

# Two products in the forward pass. In the backward pass, the scores again, and one product for each
# gradient: of the scores and of the three operands.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_CAUSAL = frozenset({"CAUSAL", "PADDING_CAUSAL"})
_OF_NO_POSITIONS = frozenset({"NO_MASK", "CAUSAL"})
_HEADS_FIRST = 1
_BIAS, _LENGTHS, _PAGES, _GIVEN_FORWARD = 3, slice(4, 8), slice(8, 10), 10


def _attention(products: int) -> DimRuleFn:
    """Examples and heads are independent and may be split. So may a sequence that attends to
    itself, by a ring; lengths, biases and windows speak of positions, for which it stays whole.

    If several heads of the queries share one head of keys and values, the shared heads are the
    factor. With dropout or functions of the scores, the operator is not split: both depend on the
    position in the whole array, which a piece does not know.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        pages = any(math.prod(o.shape) for o in operands[_PAGES])
        if params["dropout_rate"] or params.get("score_mod") is not None or pages:
            return whole(operands, results)
        return _by_batch_and_heads(operands, results, params, products)

    return declare


def _by_batch_and_heads(
    operands: Sequence[HasShape],
    results: Sequence[tuple[int, ...]],
    params: Mapping[str, Any],
    products: int,
) -> DimRule:
    head, place = (1, 2) if params["layout"] == _HEADS_FIRST else (2, 1)
    query, key = operands[0].shape, operands[1].shape
    batch, length, heads, shared = query[0], query[place], query[head], key[head]
    mask = getattr(params["mask_type"], "name", "")
    f = Factors()
    b, n = f.split(batch), f.split(shared)
    group = f.whole(heads // shared)
    goes_round = (
        mask in _OF_NO_POSITIONS
        and length == key[place]
        and not params.get("sliding_window_length")
        and not any(math.prod(o.shape) for o in (operands[_BIAS], *operands[_LENGTHS]))
    )
    # Each device has two chunks of what is causal, an early one and a late one.
    chunks = 2 if mask in _CAUSAL else 1
    s = f.split(length // chunks) if goes_round and length % chunks == 0 else "1"
    of_sequence = s if s == "1" or chunks == 1 else s + f.whole(chunks)

    def of_heads(count: int) -> str:
        return n if count == shared else (n + group).replace("1", "") or "1"

    def tokens(shape: Sequence[int]) -> Dims:
        sequence = f.whole(shape[place]) if s == "1" else of_sequence
        sizes = {head: of_heads(shape[head]), place: sequence, 3: f.whole(shape[3])}
        return (b, *(sizes[d] for d in (1, 2, 3)))

    def bias(shape: Sequence[int]) -> Dims:
        if len(shape) < 4:
            return f.wholes(shape)
        lead = b if shape[0] == batch else f.whole(shape[0])
        return (
            lead,
            of_heads(heads) if shape[1] == heads else f.whole(shape[1]),
            *f.wholes(shape[2:]),
        )

    def lengths(shape: Sequence[int]) -> Dims:
        return (b, *f.wholes(shape[1:])) if shape[0] == batch else f.wholes(shape)

    def statistics(shape: Sequence[int]) -> Dims:
        # Each segment of a packed sequence has its own statistics.
        segments = f.whole(shape[0] // batch).replace("1", "")
        sequence = f.whole(shape[2]) if s == "1" else of_sequence
        return ((b + segments if b != "1" else segments or "1"), of_heads(heads), sequence)

    given = [tokens(o.shape) for o in operands[:_BIAS]]
    given.append(bias(operands[_BIAS].shape))
    given += [lengths(o.shape) for o in operands[_LENGTHS]]
    given += [f.wholes(o.shape) for o in operands[_PAGES]]
    if len(operands) > _GIVEN_FORWARD:
        activation, *others = operands[_GIVEN_FORWARD:]
        given += [statistics(activation.shape), *(tokens(o.shape) for o in others)]
        # The gradient of a bias that examples or heads share is the sum over them.
        result_dims = [tokens(shape) if k < 3 else bias(shape) for k, shape in enumerate(results)]
        summed = frozenset(range(3, len(results)))
    else:
        result_dims = [tokens(shape) if len(shape) == 4 else statistics(shape) for shape in results]
        summed = frozenset()
    seen = min(key[place], params.get("sliding_window_length") or key[place])
    # A causal mask removes half of the scores, which the kernel does not compute.
    part = 0.5 if mask in _CAUSAL and seen == key[place] else 1.0
    scores = Scores(
        rows=float(batch * heads * length),
        keys=part * seen,
        is_backward=products == _BACKWARD_PRODUCTS,
    )
    ring = None
    if s != "1":
        returns = (1, 2) if scores.is_backward else ()
        ring = Ring(factor=s, travels=(1, 2), returns=returns, balanced=chunks > 1)
    width = (query[3] + operands[2].shape[3]) / 2
    flops = 2.0 * products * scores.rows * scores.keys * width
    return f.rule(
        given,
        result_dims,
        contracts=True,
        flops_per_point=flops / math.prod(size for size in f.sizes.values() if size),
        scores=scores,
        summed=summed,
        ring=ring,
    )


for _name, _products in zip(ATTENTION, (_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS), strict=True):
    register_dim_rule(_name, traits=Traits(costly=True, runs_on_pieces=True))(_attention(_products))

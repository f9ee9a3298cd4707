"""Recomputation by name: what a layer keeps for its backward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Iterable

from ._errors import nearest

RECOMPUTE = {
    "none": "keeps everything",
    "fused": "keeps the inputs and results of products, as Megatron and compiled PyTorch do",
    "minimal": "keeps the results of products with weights, and computes all else again",
    "narrow": "as minimal, but computes results again that are wider than what they are made of",
    "save_qkv": "keeps what enters a block, queries, keys and values",
    "save_attention": "keeps what enters a block, and the result of attention",
    "block": "keeps only what enters a block",
}
"""Ways to recompute, from the one that keeps most to the one that keeps least and computes most
again, with what a block then keeps from its forward to its backward pass.

`fused` is what the kernels of Megatron-Core and Transformer Engine, and compiled PyTorch, keep
without recomputation; `none` is what JAX's differentiation asks for. `minimal` is
`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, MaxText's policy of that name;
`save_qkv` and `save_attention` are its `save_qkv_proj` and `save_out_proj` without offloading.
"""

FUSED_ATTENTION = (
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
    "pallas_call",
)
"""Primitives that compute attention in one kernel. Its backward pass reads the result and the
logarithms of the sums, which are kept wherever the results of products, or of attention, are.
"""

MAXTEXT_RECOMPUTE = {
    "none": "none",
    "full": "block",
    "minimal": "minimal",
    "minimal_flash": "minimal",
    "minimal_with_context": "minimal",
    "save_qkv_proj": "save_qkv",
    "save_out_proj": "save_attention",
    "qkv_proj_offloaded": "save_qkv",
    "minimal_offloaded": "minimal",
    "save_dot_except_mlp": "save_qkv",
    "save_dot_except_mlpwi": "narrow",
    "save_dot_with_context_except_mlp": "save_attention",
}
"""The way that is nearest to each of MaxText's policies. `full` is also Megatron-LM's and
torchtitan's.
"""

_ELSEWHERE = {
    **MAXTEXT_RECOMPUTE,
    # jax.checkpoint_policies.
    "nothing_saveable": "block",
    "everything_saveable": "none",
    "dots_with_no_batch_dims_saveable": "minimal",
}

RECOMPUTE_AUTO = "auto"
"""In place of a name: the fastest of them."""

_OF_ATTENTION = ("save_qkv", "save_attention")


def recompute_ways(*, has_attention: bool) -> tuple[str, ...]:
    """The ways that a model has, from the one that keeps most to the one that keeps least.

    >>> recompute_ways(has_attention=False)
    ('none', 'fused', 'minimal', 'narrow', 'block')
    """
    return tuple(name for name in RECOMPUTE if has_attention or name not in _OF_ATTENTION)


def unknown_recompute(name: str, known: Iterable[str]) -> str:
    """What to say to a name that is none of these, which may be that of another system.

    >>> unknown_recompute("full", ["none", "block"])
    "there is no recompute 'full': write 'block', which keeps only what enters a block. Known: \
none, block."
    """
    ours, names = _ELSEWHERE.get(name.casefold(), ""), list(known)
    if ours not in names:
        return f"there is no recompute {name!r}: {nearest(name, names)}"
    listed = ", ".join(names)
    return (
        f"there is no recompute {name!r}: write {ours!r}, which {RECOMPUTE[ours]}. Known: {listed}."
    )


def recompute_parts(recompute: str) -> tuple[str, int | None]:
    """The name of a way to recompute, and the n of which every n-th layer recomputes; None for an n
    that is no number from 1 to 9,999.

    >>> recompute_parts("block:2"), recompute_parts("none"), recompute_parts("block:0")
    (('block', 2), ('none', 1), ('block', None))
    """
    name, colon, every = recompute.partition(":")
    if not colon:
        return name, 1
    return name, int(every) if every.isdecimal() and 0 < int(every[:5]) < 10_000 else None

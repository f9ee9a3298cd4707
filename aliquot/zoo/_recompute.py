"""Recomputation by name: what a block keeps for its backward pass, and what it computes again.

Names and their checks do not need JAX, so that a command line can list them quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core import nearest

RECOMPUTE = {
    "none": "keeps everything",
    "block": "keeps only what enters a block",
    "minimal": "keeps the results of products with weights, and computes all else again",
    "save_qkv": "keeps what enters a block, queries, keys and values",
    "save_attention": "keeps what enters a block, and the result of attention",
}
"""Ways to recompute, with what a block then keeps from its forward to its backward pass.

`minimal` is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, MaxText's policy of that
name; the last two are its `save_qkv_proj` and `save_out_proj` without offloading.
"""

WITHOUT_NAMES = ("none", "block", "minimal")
"""Those that need no attention in the model."""

BY_MEMORY = ("none", "minimal", "save_qkv", "save_attention", "block")
"""The ways from the one that keeps most to the one that keeps least, and computes most again."""

# Of fused attention, the backward pass reads the result and the logarithms of the sums.
_FUSED = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper", "pallas_call")
_KEPT = {
    "save_qkv": ("query", "key", "value"),
    "save_attention": ("attention",),
}


def recompute_ways(*, has_attention: bool) -> tuple[str, ...]:
    """The ways that a model has, from the one that keeps most to the one that keeps least.

    >>> recompute_ways(has_attention=False)
    ('none', 'minimal', 'block')
    """
    return tuple(name for name in BY_MEMORY if has_attention or name in WITHOUT_NAMES)


def recompute_faults(recompute: str, *, scan: bool, has_attention: bool) -> list[str]:
    """Reasons why a model cannot recompute like this; empty if it can.

    >>> recompute_faults("block:0", scan=False, has_attention=True)
    ["recompute='block:0': the number after the colon must be at least 1; each layer of that \
number recomputes."]
    """
    name, colon, every = recompute.partition(":")
    known = recompute_ways(has_attention=has_attention)
    if name not in known:
        return [f"there is no recompute {name!r}: {nearest(name, known)}"]
    if not colon:
        return []
    if not every.isdecimal() or not 0 < int(every) < 10_000:
        return [
            f"recompute={recompute!r}: the number after the colon must be at least 1; each layer"
            " of that number recomputes."
        ]
    if scan and int(every) > 1:
        return [
            f"recompute={recompute!r} does not go with scan, in which all layers are one: leave"
            f" out the scan or ':{every}'."
        ]
    return []


def recompute_every(recompute: str) -> int:
    """The n of which every n-th layer recomputes.

    >>> recompute_every("block:2"), recompute_every("none")
    (2, 1)
    """
    return int(recompute.partition(":")[2] or 1)


def recomputed(
    block: Callable[..., Any], recompute: str, *, prevent_cse: bool
) -> Callable[..., Any]:
    """A block that keeps for its backward pass what `recompute` says."""
    import jax

    name = recompute.partition(":")[0]
    if name == "none":
        return block
    policies = jax.checkpoint_policies
    policy: Callable[..., Any] | None = None
    if name == "minimal":
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, _fused_attention
        )
    elif name == "save_attention":
        policy = policies.save_from_both_policies(
            policies.save_only_these_names(*_KEPT[name]), _fused_attention
        )
    elif name == "save_qkv":
        policy = policies.save_only_these_names(*_KEPT[name])
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _FUSED

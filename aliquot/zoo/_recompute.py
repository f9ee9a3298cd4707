"""Recomputation by name: what a block keeps for its backward pass, and what it computes again.

Names and their checks do not need JAX, so that a command line can list them quickly.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from ..core import FUSED_ATTENTION, recompute_parts, recompute_ways, unknown_recompute

MULTIPLIED = "multiplied"
"""The name of what linear layers multiply by their kernels."""
# Arrays with that name, by the id of those without, which are kept so that no other gets their id:
# each gets one name, however many kernels it is multiplied by, as each name is kept. None if there
# are no names: a block that keeps everything would keep an array beside the same with a name.
_NAMED: contextvars.ContextVar[dict[int, tuple[Any, Any]] | None] = contextvars.ContextVar(
    "what is multiplied", default=None
)
_KEPT = {
    "fused": ("query", "key", "value", "attention", MULTIPLIED),
    "save_qkv": ("query", "key", "value"),
    "save_attention": ("attention",),
}


def recompute_faults(recompute: str, *, scan: bool, has_attention: bool) -> list[str]:
    """Reasons why a model cannot recompute like this; empty if it can.

    >>> recompute_faults("block:0", scan=False, has_attention=True)
    ["recompute='block:0': the number after the colon must be at least 1; each layer of that \
number recomputes."]
    """
    name, every = recompute_parts(recompute)
    known = recompute_ways(has_attention=has_attention)
    if name not in known:
        return [unknown_recompute(name, known)]
    if every is None:
        return [
            f"recompute={recompute!r}: the number after the colon must be at least 1; each layer"
            " of that number recomputes."
        ]
    if scan and every > 1:
        return [
            f"recompute={recompute!r} does not go with scan, in which all layers are one: leave"
            f" out the scan or ':{every}'."
        ]
    return []


def recomputed(
    block: Callable[..., Any], recompute: str, *, prevent_cse: bool
) -> Callable[..., Any]:
    """A block that keeps for its backward pass what `recompute` says."""
    import jax

    name, _ = recompute_parts(recompute)
    if name == "none":
        return block
    policies = jax.checkpoint_policies
    policy: Callable[..., Any] | None = None
    if name == "fused":
        block = _naming_multiplied(block)
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_from_both_policies(
                policies.save_only_these_names(*_KEPT[name]), _fused_attention
            ),
        )
    elif name == "minimal":
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, _fused_attention
        )
    elif name == "narrow":
        policy = policies.save_from_both_policies(_narrow_products, _fused_attention)
    elif name == "save_attention":
        policy = policies.save_from_both_policies(
            policies.save_only_these_names(*_KEPT[name]), _fused_attention
        )
    elif name == "save_qkv":
        policy = policies.save_only_these_names(*_KEPT[name])
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)


def named_product(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """`jax.lax.dot_general`; what the kernel is multiplied by has a name if blocks keep it by
    that.
    """
    import jax
    from jax.ad_checkpoint import checkpoint_name

    names = _NAMED.get()
    if names is not None:
        if id(x) not in names:
            names[id(x)] = x, checkpoint_name(x, MULTIPLIED)
        x = names[id(x)][1]
    return jax.lax.dot_general(x, kernel, *args, **kwargs)


def _naming_multiplied(block: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        before = _NAMED.set({})
        try:
            return block(*args, **kwargs)
        finally:
            _NAMED.reset(before)

    return named


def _narrow_products(primitive: Any, *arrays: Any, **params: Any) -> bool:
    import math

    import jax

    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    if not kept(primitive, *arrays, **params):
        return False
    (of_left, of_right), _ = params["dimension_numbers"]
    left, right = (array.shape for array in arrays[:2])
    size = math.prod(n for k, n in enumerate(left) if k not in of_left)
    size *= math.prod(n for k, n in enumerate(right) if k not in of_right)
    # Blocks multiply activations by weights, in this order.
    return bool(size <= math.prod(left))


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in FUSED_ATTENTION

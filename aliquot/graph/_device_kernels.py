"""Operators that only some kinds of devices can run: the kernels of their libraries."""

from __future__ import annotations

from ._jax_compat import ATTENTION
from ._kernels import KERNEL
from ._types import Graph

_GPU = ("gpu", "cuda")
# Of `jax.lax.platform_dependent`.
_CHOOSES = "platform_index"


def missing_kernels(graph: Graph, platform: str) -> str:
    """The kernels of a step that a platform lacks, for readers; empty if it has all.

    Args:
        platform: as JAX calls it: `"cpu"`, `"tpu"`, and `"gpu"` or `"cuda"`.
    """
    if any(op.name == _CHOOSES for op in graph.ops):
        # The step itself has another way for other platforms.
        return ""
    attention = sum(op.name in ATTENTION for op in graph.ops)
    if attention and platform not in _GPU:
        return f"cuDNN's attention ({attention} operators), which only GPUs have"
    compiled = sum(op.name == KERNEL and not op.params.get("interpret") for op in graph.ops)
    if compiled and platform == "cpu":
        return f"{compiled} kernels in Pallas, which CPUs only interpret"
    return ""

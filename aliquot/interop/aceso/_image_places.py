"""Places of the operators of a captured Wide-ResNet in Aceso's chain of convolutions.

In the chain, the normalisation after a convolution includes the rectifier that follows inside a
block. A block's `downsample` includes the projection of the shortcut, with its normalisation if the
model has one, and the sum of both branches; the last rectifier is an operator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_CONVOLUTIONS = ("block-conv1", "block-conv", "block-downsample")
"""Convolutions inside blocks, by role."""
CONVOLUTIONS = ("conv1", *BLOCK_CONVOLUTIONS)
"""All convolutions, by role."""
# The primitives of a rectifier: its value, and where its gradient passes.
_RECTIFIER = ("max", "gt")
_BEFORE_BLOCKS = ("maxpool", "block-relu")


def place_of_image_operator(
    name: str, rank: int, read: Sequence[int], parameters: int | None, roles: Sequence[str]
) -> int:
    """The place in the chain of an operator that works on activations.

    Args:
        name: name of its primitive.
        rank: the most dims of its results: statistics have one, and images four.
        read: places of the activations that it reads; empty for the batch.
        parameters: place of the parameters that it reads, if any.
        roles: roles of the chain's operators.
    """
    last = max(read, default=0)
    if parameters is not None:
        return max(parameters, last)
    role = roles[last]
    if role in ("conv1", "block-conv1", "block-conv"):
        # Operators on the result of a convolution belong to its normalisation.
        return last + 1
    if role == "block-bn" and roles[min(read)] in _BEFORE_BLOCKS:
        # The sum of both branches, one of which is the block's input.
        return last + 1
    if role in ("bn1", "block-downsample") and name in _RECTIFIER and rank > 1:
        return last + 1
    if role == "relu1" and name == "reduce_window_max":
        return last + 1
    if role == "block-relu" and roles[last + 1] == "avgpool" and name == "reduce_sum":
        return last + 1
    return last

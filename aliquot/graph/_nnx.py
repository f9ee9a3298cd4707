"""Flax NNX objects as arguments: a step may change them in place, so their new state is part of its
result.

Flax and Equinox are used only if the user has already imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_module(argument: Any) -> bool:
    """True if the argument is an NNX object (a module, an optimizer, metrics, random streams)."""
    nnx = _nnx()
    return (
        nnx is not None
        and isinstance(argument, nnx.Pytree | nnx.Module)
        and not isinstance(argument, nnx.Variable)
    )


def holds_module(argument: Any) -> bool:
    """True if there is an NNX object anywhere in the argument."""
    if _nnx() is None:
        return False
    return any(map(is_module, jax.tree_util.tree_leaves(argument, is_leaf=is_module)))


def inside_equinox(tree: Any) -> list[bool]:
    """For each leaf, whether it belongs to an Equinox module: the Python numbers there are
    settings, not state.
    """
    equinox = sys.modules.get("equinox")

    def is_equinox(part: Any) -> bool:
        return equinox is not None and isinstance(part, equinox.Module)

    parts = jax.tree_util.tree_leaves(tree, is_leaf=is_equinox)
    inside: list[bool] = []
    for part in parts:
        inside += [is_equinox(part)] * len(jax.tree_util.tree_leaves(part))
    return inside


def split(objects: Mapping[str, Any]) -> tuple[Any, Any]:
    """The objects, by argument name, as a static definition and a tree of their arrays. Shared
    parts appear once.
    """
    definition, state = _nnx().split(dict(objects))
    return definition, _nnx().to_pure_dict(state)


def merge(definition: Any, state: Any) -> dict[str, Any]:
    """New objects from a definition and a tree of arrays."""
    merged: dict[str, Any] = _nnx().merge(definition, state)
    return merged


def update(objects: Mapping[str, Any], state: Any) -> None:
    """Write a tree of arrays back into the user's own objects."""
    _nnx().update(dict(objects), state)

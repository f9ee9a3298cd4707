"""Parallel training steps as an expert writes them in plain JAX: PartitionSpecs for the state,
constraints on activations.

The step is the zoo's, untouched. `jax.jit` gets the splits of state and batch; inside, the residual
stream is constrained where a block begins and ends, and the logits where they are made, as
published JAX training code does. Parameters are matched by the last words of their paths, and
optimizer state follows its parameter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLUMN = ("q", "k", "v", "up", "gate")
ROW = ("out", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandPlan:
    """A plan by hand.

    Attributes:
        name: as the field calls it.
        mesh_shape: devices for data and for tensors.
        split: `split(path, shape, scan)` gives the PartitionSpec of a parameter.
        optimizer_split: the same for its optimizer state.
        residual, logits: what activations are constrained to.
        classic: whether it is one of the plans of the textbooks, rather than a refinement of one.
    """

    name: str
    mesh_shape: tuple[int, int]
    split: Callable[[str, tuple[int, ...], bool], P]
    optimizer_split: Callable[[str, tuple[int, ...], bool], P]
    residual: P
    logits: P
    classic: bool = True

    def compile(self, work: Any) -> tuple[Any, Any, Any]:
        """The compiled step, and the shardings of state and batch."""
        mesh = jax.make_mesh(self.mesh_shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        state = self._state_shardings(work, mesh)
        batch = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), work.batch)
        metrics = {"loss": NamedSharding(mesh, P())}

        def train_step(s: Any, b: Any) -> Any:
            return work.train_step(s, b)

        step = jax.jit(
            train_step,
            in_shardings=(state, batch),
            out_shardings=(state, metrics),
            donate_argnums=0,
        )
        with self._constraints(mesh):
            return step.lower(work.state, work.batch).compile(), state, batch

    def _state_shardings(self, work: Any, mesh: Mesh) -> Any:
        scan = bool(work.settings["scan"])

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            split = self.split if name.startswith("params") else self.optimizer_split
            return NamedSharding(mesh, split(name, leaf.shape, scan and ".layers." in f".{name}."))

        return jax.tree_util.tree_map_with_path(sharding, work.state)

    @contextlib.contextmanager
    def _constraints(self, mesh: Mesh) -> Iterator[None]:
        """While tracing, constrain the residual stream around each block, and the logits."""
        from aliquot.zoo import _gpt, _llama

        def around(call: Any, spec: P) -> Any:
            def constrained(module: Any, x: Any) -> Any:
                sharding = NamedSharding(mesh, self.residual)
                inner = jax.lax.with_sharding_constraint(x, sharding) if x.ndim == 3 else x
                return jax.lax.with_sharding_constraint(
                    call(module, inner), NamedSharding(mesh, spec)
                )

            return constrained

        with contextlib.ExitStack() as stack:
            for family in (_gpt, _llama):
                for owner, name, spec in (
                    (family.Block, "__call__", self.residual),
                    (family.Ends, "embed_tokens", self.residual),
                    (family.Ends, "logits", self.logits),
                ):
                    stack.enter_context(
                        mock.patch.object(owner, name, around(getattr(owner, name), spec))
                    )
            yield


def _replicated(path: str, shape: tuple[int, ...], stacked: bool) -> P:
    return P()


def _largest_dim(path: str, shape: tuple[int, ...], stacked: bool) -> P:
    """Fully sharded: the largest dim that eight devices divide, never the dim of the layers."""
    dims = [d for d in range(int(stacked), len(shape)) if shape[d] % 8 == 0]
    if not dims:
        return P()
    largest = max(dims, key=lambda d: shape[d])
    return P(*[("data" if d == largest else None) for d in range(len(shape))])


def _megatron(path: str, shape: tuple[int, ...], stacked: bool) -> P:
    """Column-parallel in, row-parallel out, vocabulary-parallel embedding and head."""
    if math.prod(shape) == 1:
        return P()
    *_, owner, leaf = path.split(".")
    lead = (None,) if stacked else ()
    if leaf == "kernel" and owner in COLUMN or path.endswith("head.kernel"):
        return P(*lead, None, "tensor")
    if leaf == "kernel" and owner in ROW:
        return P(*lead, "tensor", None)
    if leaf == "bias" and owner in COLUMN:
        return P(*lead, "tensor")
    return P("tensor", None) if leaf == "embedding" else P()


def _megatron_and_data(path: str, shape: tuple[int, ...], stacked: bool) -> P:
    """Megatron's distributed optimizer: what a matrix leaves free is split over the data axis."""
    split = _megatron(path, shape, stacked)
    dims = [*split, *[None] * (len(shape) - len(split))]
    free = [d for d in range(int(stacked), len(shape)) if dims[d] is None and shape[d] % 8 == 0]
    if free:
        dims[max(free, key=lambda d: shape[d])] = "data"
    return P(*dims)


def hand_plans() -> list[HandPlan]:
    """Data parallel, ZeRO-3, Megatron's tensor parallelism, data by tensor parallelism on two
    meshes, and ZeRO-1 of two.
    """
    by_batch: dict[str, Any] = {"residual": P("data", None, None), "logits": P("data", None, None)}
    by_both = {"residual": P("data", None, None), "logits": P("data", None, "tensor")}
    tensor: dict[str, Any] = {"split": _megatron, "optimizer_split": _megatron, **by_both}
    spread = {**tensor, "optimizer_split": _megatron_and_data, "classic": False}
    return [
        HandPlan(
            name="data",
            mesh_shape=(8, 1),
            split=_replicated,
            optimizer_split=_replicated,
            **by_batch,
        ),
        HandPlan(
            name="zero3",
            mesh_shape=(8, 1),
            split=_largest_dim,
            optimizer_split=_largest_dim,
            **by_batch,
        ),
        HandPlan(name="tensor", mesh_shape=(1, 8), **tensor),
        HandPlan(name="data 4 x tensor 2", mesh_shape=(4, 2), **tensor),
        HandPlan(name="data 2 x tensor 4", mesh_shape=(2, 4), **tensor),
        HandPlan(
            name="data, ZeRO-1",
            mesh_shape=(8, 1),
            split=_replicated,
            optimizer_split=_largest_dim,
            classic=False,
            **by_batch,
        ),
        HandPlan(name="data 4 x tensor 2, ZeRO-1", mesh_shape=(4, 2), **spread),
    ]

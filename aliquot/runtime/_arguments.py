"""Checks of a call's arguments against those that were planned for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import InputError, PlanMismatchError
from ..graph import FlatCall, Graph, changed_state
from ._in_place import InPlace
from ._state_call import arrays_of, misplaced_arguments
from .transport import PiecedArray


class Arguments:
    """Flattens and checks the arguments of calls of one step. `types` holds each input's shape and
    dtype. Each of several processes may pass its own rows alone.

    Args:
        graph: the step.
        in_place: the arrays that need no check; None if all do.
    """

    def __init__(self, graph: Graph, in_place: InPlace | None = None) -> None:
        self._graph, self._in_place = graph, in_place
        self._seen: tuple[Any, tuple[tuple[int, Any], ...]] | None = None
        self._expected = graph.calling.call.skeleton()
        self.types = types_of(graph)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> FlatCall:
        """The flat arrays of a call. Raises `PlanMismatchError` listing every difference,
        `CaptureError` if the call has other arguments than the traced one.
        """
        call: FlatCall = self._graph.calling.flatten(args, kwargs)
        self._check_call(call)
        return call

    def leaves(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """The arrays of a call, in the order of the step's inputs, and the positions of those that
        are not known to lie where the step needs them.
        """
        names = tuple(kwargs)
        flat, tree = jax.tree.flatten((tuple(args), tuple(kwargs.values())))
        # Fast path: the structure, and every leaf that is no array, are those of an earlier call.
        known = self._seen
        if (
            known is not None
            and known[0] == (names, tree)
            and all(flat[k] is static for k, static in known[1])
        ):
            skipped = {k for k, _ in known[1]}
            leaves = [leaf for k, leaf in enumerate(flat) if k not in skipped] if skipped else flat
            every = range(len(leaves))
            unknown = every if self._in_place is None else self._in_place.unknown(leaves)
            if all(hasattr(leaves[k], "dtype") for k in unknown):
                self._check_types(leaves, unknown)
                return leaves, unknown
        call: FlatCall = self.call(args, kwargs)
        statics = tuple((k, leaf) for k, leaf in enumerate(flat) if not hasattr(leaf, "dtype"))
        arrays = [leaf for leaf in flat if hasattr(leaf, "dtype")]
        # Flattening with paths is slow, so it is done once for each structure. Where objects hide
        # their arrays from `jax.tree`, it is done in every call.
        if not self._graph.calling.modules and list(map(id, arrays)) == list(map(id, call.leaves)):
            self._seen = ((names, tree), statics)
        return call.leaves, range(len(call.leaves))

    def _check_call(self, call: FlatCall) -> None:
        if call.skeleton() != self._expected:
            problems = self._graph.calling.differences(call) or ("its structure differs",)
            self._refuse(self._misplaced(call.parts, call.leaves) or problems)
        self._check_types(call.leaves, numbers=call.numbers)

    def _check_types(
        self,
        leaves: Sequence[Any],
        positions: Sequence[int] | None = None,
        numbers: Collection[str] = (),
    ) -> None:
        positions = range(len(leaves)) if positions is None else positions
        self.check_alive(leaves, positions)
        wrong, paths, advice = [], set(), ""
        for position in positions:
            path, leaf = self._graph.inputs[position].path, leaves[position]
            shape, dtype = self.types[position]
            # JAX converts 64-bit NumPy arrays to 32 bits, unless its 64-bit types are enabled.
            if leaf.dtype != dtype and canonical(leaf.dtype) != dtype:
                wrong.append(f"{path} is {leaf.dtype}, planned {dtype}")
                paths.add(path)
                if path in numbers and jnp.issubdtype(dtype, jnp.floating):
                    advice = f"Write {path} as {np.asarray(leaf, dtype)}: it is a whole number."
                elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
                    advice = (
                        f"Pass a typed key as {path}: jax.random.key(seed), or"
                        " jax.random.wrap_key_data(key) of one that jax.random.PRNGKey made."
                    )
            if tuple(leaf.shape) != shape and not _may_be_part(leaf, shape):
                wrong.append(f"{path} is {tuple(leaf.shape)}, planned {shape}")
                paths.add(path)
        if wrong:
            misplaced = self._misplaced(self._graph.calling.call.parts, leaves)
            self._refuse(misplaced or wrong, advice if len(paths) == 1 else "")

    def _misplaced(self, paths: Sequence[tuple[str, ...]], leaves: Sequence[Any]) -> list[str]:
        """One sentence for each place of a call where the step takes another argument."""
        calling = self._graph.calling
        taken, found = arrays_of(calling.call.parts, calling.call.leaves), arrays_of(paths, leaves)
        in_order = {name: taken[name] for name in calling.names if name in taken}
        return misplaced_arguments(in_order, [found.get(name, []) for name in in_order])

    def check_alive(self, leaves: Sequence[Any], positions: Sequence[int] | None = None) -> None:
        """Refuse arrays that hold no numbers: tracers, descriptions, and those that an earlier call
        has donated. Raises `InputError` naming them.

        Args:
            leaves: the arrays of a call.
            positions: those to look at; by default all.
        """
        looked_at = [
            (self._graph.inputs[k].path, leaves[k])
            for k in (range(len(leaves)) if positions is None else positions)
        ]
        for is_so, most, text in _WITHOUT_NUMBERS:
            paths = [path for path, leaf in looked_at if is_so(leaf)]
            if paths:
                more = f" and {len(paths) - most} more" if len(paths) > most else ""
                raise InputError(
                    text.format(name=self._graph.name, which=", ".join(paths[:most]) + more)
                )

    def _refuse(self, problems: Sequence[str], advice: str = "") -> None:
        where = f" in process {jax.process_index()}" if jax.process_count() > 1 else ""
        advice = advice or (
            "Plan it again for these arguments: each call of aliquot.plan or aliquot.parallelize"
            " makes one plan."
        )
        for changed in changed_state(self._graph):
            if any(problem.startswith(f"{changed.path} is ") for problem in problems):
                advice = f"The step itself takes {changed}. {changed.advice}"
                break
        raise PlanMismatchError(
            problems,
            asked=(
                f"{self._graph.name} is called{where} with other arguments than it was planned for"
            ),
            advice=advice,
        )


def types_of(graph: Graph) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each input of a step."""
    return [(tuple(leaf.shape), canonical(leaf.dtype)) for leaf in graph.calling.call.leaves]


def canonical(dtype: Any) -> Any:
    """The dtype that JAX makes of one; random keys have dtypes of their own, which stay."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def is_deleted(leaf: Any) -> bool:
    """True if a call has donated an array."""
    if isinstance(leaf, PiecedArray):
        return any(map(is_deleted, leaf.pieces))
    # A tracer has no buffer that could be deleted.
    return (
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
    )


# What holds no numbers: how it is recognized, how many are named, and what is said of them.
_WITHOUT_NUMBERS: tuple[tuple[Callable[[Any], bool], int, str], ...] = (
    (
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
        1,
        "{name} is called with shapes in place of arrays: {which} is a jax.ShapeDtypeStruct, which"
        " is enough for a plan and holds no numbers. Pass arrays: step.init(init, key) makes the"
        " state on its devices, and a batch may be NumPy's.",
    ),
    (
        lambda leaf: isinstance(leaf, jax.core.Tracer),
        1,
        "{name} is called inside a function that JAX traces (jit, grad, vmap or make_jaxpr):"
        " {which} has no numbers yet. A parallel step runs compiled programs on several devices;"
        " call it outside, or plan the function around it.",
    ),
    (
        is_deleted,
        3,
        "{name} is called with arrays that no longer exist: {which}. A call donates the state that"
        " it replaces, so that both need not be held. Pass the state that the last call returned;"
        " to keep an old one, copy it first: jax.tree.map(jnp.copy, state).",
    ),
)


def _may_be_part(leaf: Any, shape: tuple[int, ...]) -> bool:
    """True if an array may be this process's part of a larger array of this shape."""
    return (
        jax.process_count() > 1
        and len(leaf.shape) == len(shape)
        and all(mine <= whole for mine, whole in zip(leaf.shape, shape, strict=True))
        and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable)
    )

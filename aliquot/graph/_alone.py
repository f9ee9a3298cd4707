"""Evaluation of single operators on operands of other shapes: the shapes and numbers of their
results.

Numbers are computed by the host's CPU, through a separate client, so that JAX neither searches for
accelerators nor touches them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from . import _jax_compat as compat

Shape: TypeAlias = tuple[int, ...]


class LoneOperator:
    """One operator, taken out of its step. Two are equal if they compute the same on equal
    operands.
    """

    def __init__(self, eqn: Any) -> None:
        self._eqn = eqn
        self._dtypes = [v.aval.dtype for v in eqn.invars]
        self._literals = {k: v.val for k, v in enumerate(eqn.invars) if compat.is_literal(v)}
        self._key = self._comparable() or (id(eqn),)

    @staticmethod
    def of(eqn: Any) -> LoneOperator | None:
        """The operator of an equation; None if it takes or makes something other than arrays, or
        has effects.
        """
        arrays = all(
            hasattr(v.aval, "shape") and hasattr(v.aval, "dtype")
            for v in (*eqn.invars, *eqn.outvars)
        )
        return LoneOperator(eqn) if arrays and not eqn.effects else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoneOperator) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _comparable(self) -> tuple[Any, ...] | None:
        """Key of its computation without the shapes of its operands; None if its parameters cannot
        be compared.
        """
        try:
            params = tuple(
                (name, _hashable(value)) for name, value in sorted(self._eqn.params.items())
            )
            # By text: NaN is not equal to itself, and 1 is equal to True.
            literals = tuple((k, str(value)) for k, value in sorted(self._literals.items()))
            key = self._eqn.primitive, params, tuple(map(str, self._dtypes)), literals
            hash(key)
        except TypeError:
            return None
        return key

    def shapes_made(self, shapes: Sequence[Shape]) -> tuple[Shape, ...] | None:
        """Shapes of its results for operands of other shapes; None if it does not take these, or
        makes other dtypes.
        """
        structs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, self._dtypes, strict=True)]
        try:
            with _quietly():
                structs_made = jax.eval_shape(
                    lambda *arrays: compat.bind(self._eqn, arrays), *structs
                )
        except Exception:  # Whatever a library's own checks raise.
            return None
        outvars = self._eqn.outvars
        same = len(structs_made) == len(outvars) and all(
            m.dtype == v.aval.dtype for m, v in zip(structs_made, outvars, strict=True)
        )
        return tuple(tuple(m.shape) for m in structs_made) if same else None

    def operands(self, shapes: Sequence[Shape], draw: int) -> list[NDArray[Any]]:
        """Random operands of these shapes, always the same for the same shapes and number of the
        draw.

        Floats lie between 0 and 1 in the first draw, on both sides of 0 in the second, and are
        small whole numbers in the third. Integers are small enough to index every dim.
        """
        random = np.random.default_rng(draw)
        # Dims of size one are ignored: an index into them could only be 0.
        fewest = min((n for n in itertools.chain(*shapes) if n > 1), default=2)
        made = []
        for k, (shape, dtype) in enumerate(zip(shapes, self._dtypes, strict=True)):
            # A literal is part of what the operator computes, the same in every draw.
            if k in self._literals:
                made.append(np.asarray(self._literals[k]))
            else:
                made.append(_random(random, shape, dtype, draw, min(fewest, 2 + draw)))
        return made

    def run(
        self, draws: Sequence[Sequence[Sequence[NDArray[Any]]]]
    ) -> list[list[list[NDArray[Any]]]] | None:
        """Results for several lists of operands, for each draw; None if they cannot be compiled or
        run for the host.

        One program takes all lists of a draw; the shapes are the same in every draw.
        """

        def program(given: Sequence[Sequence[Any]]) -> list[list[Any]]:
            results = []
            for operands in given:
                arrays = []
                for o, d in zip(operands, self._dtypes, strict=True):
                    if _is_key(d):
                        arrays.append(jax.random.wrap_key_data(o, impl=compat.key_generator(d)))
                    else:
                        arrays.append(o.astype(d))
                made = []
                for r in compat.bind(self._eqn, arrays):
                    made.append(jax.random.key_data(r) if _is_key(r.dtype) else r)
                results.append(made)
            return results

        device = compat.host_device()
        try:
            with _quietly(), jax.default_device(device):
                jitted = jax.jit(program)
                results_of_calls = [
                    jitted(jax.device_put(list(map(list, calls)), device)) for calls in draws
                ]
                return [jax.tree.map(np.asarray, results) for results in results_of_calls]
        except Exception:  # Nothing is lost: the operator then runs whole.
            return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress warnings, checks and the caller's mesh in a trial run."""
    with compat.plain_context(), warnings.catch_warnings(), jax.transfer_guard("allow"):
        warnings.simplefilter("ignore")
        yield


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _random(
    random: np.random.Generator, shape: Shape, dtype: Any, draw: int, below: int
) -> NDArray[Any]:
    # Random keys as their words, because NumPy has no type for keys.
    if _is_key(dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        key: NDArray[Any] = random.integers(0, 2**32, words.shape, dtype=np.uint32)
        return key
    numbers: NDArray[Any]
    if jnp.issubdtype(dtype, jnp.bool_):
        numbers = random.integers(0, 2, shape)
    elif jnp.issubdtype(dtype, jnp.integer):
        numbers = random.integers(0, below, shape)
    else:
        numbers = _floats(random, shape, draw)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            numbers = numbers + 1j * _floats(random, shape, draw)
    typed: NDArray[Any] = numbers.astype(dtype)
    return typed


def _floats(random: np.random.Generator, shape: Shape, draw: int) -> NDArray[Any]:
    if draw == 0:
        return random.uniform(0.05, 0.95, shape)
    if draw == 1:
        return 4 * random.standard_normal(shape)
    return random.integers(1, 5, shape).astype(np.float64)


def _hashable(value: Any) -> Any:
    """A parameter as something that can be compared by value."""
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_hashable, value))
    # True is 1 and 1.0 for a dictionary.
    return type(value), value

"""Fused attention to a sequence of which each device has a part, by a ring.

Keys and values go from device to device, while each computes the scores of its own queries with the
part that it has. Results of parts are joined by their normalisers (the logarithms of the sums of
exponentials). The backward pass goes round once more: with the normalisers of the whole sequence
each part gives its summands of all gradients, and those of keys and values travel with these.

Of a causal mask, a device with an early part would need few keys, and one with a late part all. So
the sequence is cut into twice as many chunks as there are devices, and each has an early and a late
one: the first with the last, the second with the last but one. Then each step of the ring is a
rectangle of scores without a mask, of the same area on all devices, but for the first step, in
which each device attends to its own chunks under the mask.

References: H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for
near-infinite context", 2023; W. Brandon et al., "Striped attention: faster ring attention for
causal transformers", 2023; the balanced chunks are those of Megatron-LM's context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec

from ...graph import attention_on_piece

Arrays: TypeAlias = tuple[Any, ...]
_QUERY, _KEY, _VALUE = range(3)
# Of the backward operator: normalisers, result and its gradient stand behind what the forward one
# takes.
_GIVEN_FORWARD = 10
_HEADS_FIRST = 1


def attention_by_ring(eqn: Any, operands: Sequence[Any], axes: Sequence[str]) -> list[Any]:
    """The results of cuDNN's attention for this device's part of the sequence, under `shard_map`.

    Args:
        eqn: of the forward or of the backward operator.
        operands: their parts on this device.
        axes: the mesh axes that split the sequence.
    """
    mask = eqn.params["mask_type"]
    ring = _Ring(
        eqn=eqn,
        others=tuple(operands[_VALUE + 1 : _GIVEN_FORWARD]),
        axes=tuple(axes),
        size=jax.lax.axis_size(tuple(axes)),
        dim=2 if eqn.params["layout"] == _HEADS_FIRST else 1,
        is_causal=mask.name == "CAUSAL",
    )
    given = (*operands[: _VALUE + 1], *operands[_GIVEN_FORWARD:])
    if ring.is_causal:
        given = tuple(map(ring.balanced, given))
    results = ring.backward(*given) if len(given) > _VALUE + 1 else ring.forward(*given)
    if ring.is_causal:
        results = tuple(ring.balanced(x, back=True) for x in results)
    # In inference the operator has one result.
    return list(results[: len(eqn.outvars)])


class _Ring(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One attention on a ring of `size` devices; `dim` is that of the sequence, but in arrays of
    normalisers, in which it is the last.
    """

    eqn: Any
    others: Arrays
    axes: tuple[str, ...]
    size: int
    dim: int
    is_causal: bool

    def forward(self, q: Any, k: Any, v: Any) -> Arrays:
        """The result, and its normalisers."""

        def kernel(mask: str, q: Any, k: Any, v: Any) -> Arrays:
            out, sums = self._run((q, k, v, *self.others), mask)
            return out.astype(wide), sums

        wide = jnp.promote_types(q.dtype, jnp.float32)

        def late(out: Any, sums: Any) -> Arrays:
            """As results of all queries: the early ones see nothing."""
            return self._padded(out, self.dim, 0.0), self._padded(sums, -1, -jnp.inf)

        def join(step: Any, state: Arrays, k: Any, v: Any) -> Arrays:
            """The results so far, with those of one more part of the keys."""
            out, sums = self._part(
                step,
                lambda: kernel("NO_MASK", q, k, v),
                lambda: kernel("NO_MASK", q, self._early(k), self._early(v)),
                lambda: late(*kernel("NO_MASK", self._late(q), k, v)),
            )
            total = jnp.logaddexp(state[1], sums)
            shares = [self._as_result(jnp.exp(s - total)) for s in (state[1], sums)]
            return state[0] * shares[0] + out * shares[1], total

        first = kernel("CAUSAL" if self.is_causal else "NO_MASK", q, k, v)
        out, sums = self._round(first, k, v, join)
        return out.astype(q.dtype), sums

    def backward(self, q: Any, k: Any, v: Any, sums: Any, out: Any, grad: Any) -> Arrays:
        """The gradients of queries, keys and values."""
        wide = jnp.promote_types(q.dtype, jnp.float32)

        def kernel(mask: str, q: Any, k: Any, v: Any, *rest: Any) -> Arrays:
            grads = self._run((q, k, v, *self.others, *rest), mask)
            return tuple(g.astype(wide) for g in grads[: _VALUE + 1])

        def early(dq: Any, dk: Any, dv: Any) -> Arrays:
            return dq, *(self._padded(d, self.dim, 0.0, behind=True) for d in (dk, dv))

        def late(dq: Any, dk: Any, dv: Any) -> Arrays:
            return self._padded(dq, self.dim, 0.0), dk, dv

        def add(step: Any, state: Arrays, k: Any, v: Any) -> Arrays:
            """The gradients so far, those of keys and values one device further, with the summands
            of these keys and values.
            """
            dq, *travelling = state
            more = self._part(
                step,
                lambda: kernel("NO_MASK", q, k, v, sums, out, grad),
                lambda: early(
                    *kernel("NO_MASK", q, self._early(k), self._early(v), sums, out, grad)
                ),
                lambda: late(
                    *kernel(
                        "NO_MASK",
                        self._late(q),
                        k,
                        v,
                        self._late(sums, -1),
                        self._late(out),
                        self._late(grad),
                    )
                ),
            )
            of_keys = zip(self._passed_on(*travelling), more[1:], strict=True)
            return dq + more[0], *(so_far + each for so_far, each in of_keys)

        mask = "CAUSAL" if self.is_causal else "NO_MASK"
        dq, dk, dv = self._round(kernel(mask, q, k, v, sums, out, grad), k, v, add)
        # One more step brings the sums home.
        dk, dv = self._passed_on(dk, dv)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def balanced(self, x: Any, *, back: bool = False) -> Any:
        """This device's early and late chunk of an array of which it has two neighbouring ones; or
        `back`.
        """
        n, dim = self.size, x.ndim - 1 if x.ndim < 4 else self.dim
        owner = [min(c, 2 * n - 1 - c) for c in range(2 * n)]
        # Of each device's neighbouring chunks one is even and one is odd, and so it is afterwards.
        even = [(c // 2, owner[c]) for c in range(0, 2 * n, 2)]
        odd = [(c // 2, owner[c]) for c in range(1, 2 * n, 2)]
        first, second = jnp.split(x, 2, dim)
        is_even = jax.lax.axis_index(self.axes) % 2 == 0

        def swapped(a: Any, b: Any) -> Arrays:
            return jnp.where(is_even, a, b), jnp.where(is_even, b, a)

        if back:
            first, second = swapped(first, second)
            even, odd = [(b, a) for a, b in even], [(b, a) for a, b in odd]
        first = jax.lax.ppermute(first, self.axes, even)
        second = jax.lax.ppermute(second, self.axes, odd)
        if not back:
            first, second = swapped(first, second)
        return jnp.concatenate([first, second], dim)

    def _round(
        self, state: Arrays, k: Any, v: Any, step: Callable[[Any, Arrays, Any, Any], Arrays]
    ) -> Arrays:
        """`step(number, state, k, v)` with the keys and values of each of the other devices.

        They are sent on before the step that reads them, and what the next step reads arrives while
        this one computes.
        """

        def body(number: Any, carried: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            state, here = carried
            following = self._passed_on(*here)
            return step(number, state, *here), following

        last = self.size - 1
        state, here = jax.lax.fori_loop(1, last, body, (state, self._passed_on(k, v)))
        return step(last, state, *here)

    def _passed_on(self, *arrays: Any) -> Arrays:
        following = [(d, (d + 1) % self.size) for d in range(self.size)]
        return tuple(jax.lax.ppermute(x, self.axes, following) for x in arrays)

    def _part(
        self,
        step: Any,
        whole: Callable[[], Arrays],
        early: Callable[[], Arrays],
        late: Callable[[], Arrays],
    ) -> Arrays:
        """What a device computes in a step: with keys from a device before it, of which it sees the
        early chunk, or from one behind it, of which its late queries see both.
        """
        if not self.is_causal:
            return whole()
        # Keys that have come further than a device's own number began behind it.
        chosen: Arrays = jax.lax.cond(step <= jax.lax.axis_index(self.axes), early, late)
        return chosen

    def _early(self, x: Any) -> Any:
        return jax.lax.slice_in_dim(x, 0, x.shape[self.dim] // 2, axis=self.dim)

    def _late(self, x: Any, dim: int | None = None) -> Any:
        dim = self.dim if dim is None else dim
        length = x.shape[dim]
        return jax.lax.slice_in_dim(x, length // 2, length, axis=dim)

    def _padded(self, x: Any, dim: int, value: float, *, behind: bool = False) -> Any:
        """A half with another half of one value before it, or behind."""
        other = jnp.full_like(x, value)
        return jnp.concatenate([x, other] if behind else [other, x], dim)

    def _as_result(self, sums: Any) -> Any:
        """Normalisers (batch, heads, sequence) as factors of a result."""
        return sums[..., None] if self.dim == 2 else jnp.swapaxes(sums, 1, 2)[..., None]

    def _run(self, operands: Arrays, mask: str) -> list[Any]:
        params = {**self.eqn.params, "mask_type": type(self.eqn.params["mask_type"])[mask]}
        if len(operands) == _GIVEN_FORWARD:
            params["is_training"] = True
        return attention_on_piece(self.eqn.replace(params=params), operands)

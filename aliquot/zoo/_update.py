"""The update of a training step: optimizers, dynamic loss scaling, and their states.

The optimizers here update every array independently of the others (clipping needs only the norm of
all), so one traced function can
update the layers of an unrolled model one after another. Optax maps each of its operations over
each array: for all layers at once, that would take half the time of tracing a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any

INITIAL_LOSS_SCALE = 2.0**15
GROWTH_STEPS = 2000


Rate = float | Callable[[Any], Any]


def adamw(rate: Rate, weight_decay: float | None, momentum: float) -> optax.GradientTransformation:
    """AdamW with the usual constants for language models: second moment over 20 steps, weight decay
    0.1, unless given, on every array.

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2;
    the constants are those of Brown et al., "Language Models are Few-Shot Learners", 2020, appendix
    B.
    """
    decay = 0.1 if weight_decay is None else weight_decay
    return optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=decay)


def sgd(rate: Rate, weight_decay: float | None, momentum: float) -> optax.GradientTransformation:
    """Gradient descent, without state if it has no momentum. Decayed weights are added to the
    gradients.
    """
    descent = optax.sgd(rate, momentum or None)
    return (
        optax.chain(optax.add_decayed_weights(weight_decay), descent) if weight_decay else descent
    )


def adafactor(
    rate: Rate, weight_decay: float | None, momentum: float
) -> optax.GradientTransformation:
    """Adafactor with optax's constants: second moments of matrices by their rows and columns, and a
    rate relative to the size of each array. The weight decay is a share of each weight per step.

    Reference: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
    2018, algorithms 4 and 5.
    """
    return optax.adafactor(rate, weight_decay_rate=weight_decay)


OPTIMIZERS: dict[str, Callable[[Rate, float | None, float], optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": sgd,
    "adafactor": adafactor,
}


class Update:
    """Applies an optimizer to a tree of parameters with `layers`, after undoing the loss scale if
    there is one, and clipping the gradients if that is asked for.

    Where parameters are in 16 bits, the optimizer updates its master copy of them in more bits.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        *,
        dynamic_scale: bool,
        rounded_params: str | None = None,
        rate: Rate = 0.0,
        clip_norm: float | None = None,
        reports_norm: bool = False,
    ) -> None:
        """
        Args:
            rounded_params: dtype of parameters beside a master copy; None if there is no such copy.
            rate: the learning rate of the optimizer; if it changes, figures tell it.
            clip_norm: larger gradients, as a whole, are scaled down to this norm.
            reports_norm: whether the norm of the gradients is a figure although nothing is clipped.
        """
        self.optimizer, self.dynamic_scale = optimizer, dynamic_scale
        self._rounded_params = rounded_params
        self._rate, self._clip_norm = rate, clip_norm
        self._needs_norm = reports_norm or clip_norm is not None
        self._update_part = jax.jit(self._plain_part)
        self._update_part_if = jax.jit(self._guarded_part)
        self._finite = jax.jit(_all_finite)
        self._squares = jax.jit(_sum_of_squares)

    def init(self, params: Tree) -> dict[str, Tree]:
        """The training state without its step number, from parameters as the network makes them."""
        opt_state = self.optimizer.init(params)
        state: dict[str, Tree] = {"params": params, "opt_state": opt_state}
        if self._rounded_params is not None:
            state["params"] = jax.tree.map(lambda p: p.astype(self._rounded_params), params)
            state["opt_state"] = {"master": params, "optimizer": opt_state}
        if self.dynamic_scale:
            state["loss_scale"] = {
                "scale": jnp.full((), INITIAL_LOSS_SCALE, jnp.float32),
                "good_steps": jnp.zeros((), jnp.int32),
            }
        return state

    def scale(self, state: Tree, loss: jax.Array) -> jax.Array:
        """The loss to differentiate: unchanged, or scaled so that float16 gradients do not
        vanish.
        """
        return (
            loss * state["loss_scale"]["scale"].astype(loss.dtype) if self.dynamic_scale else loss
        )

    def norm(self, state: Tree, grads: Tree) -> jax.Array | None:
        """The norm of all gradients together, without their scale; None if nothing needs it."""
        if not self._needs_norm:
            return None
        unscale = 1 / state["loss_scale"]["scale"] if self.dynamic_scale else None
        return jnp.sqrt(sum(self._squares(part, unscale) for part in _cut(grads)))

    def figures(self, state: Tree, norm: jax.Array | None) -> dict[str, jax.Array]:
        """What an update reports, given the state before it."""
        found: dict[str, jax.Array] = {}
        if norm is not None:
            found["grad_norm"] = norm.astype(jnp.float32)
        if callable(self._rate):

            def is_schedule(node: Tree) -> bool:
                return isinstance(node, optax.ScaleByScheduleState)

            nodes = jax.tree.leaves(state["opt_state"], is_leaf=is_schedule)
            (count,) = [node.count for node in nodes if is_schedule(node)]
            found["learning_rate"] = jnp.asarray(self._rate(count), jnp.float32)
        return found

    def __call__(self, state: Tree, grads: Tree, norm: jax.Array | None = None) -> dict[str, Tree]:
        """The state after the update, without its step number.

        Args:
            norm: of the gradients, where `norm` gives one.

        Under a dynamic loss scale, a step whose gradients are not all finite changes neither
        parameters nor moments, and halves the scale. After 2000 finite steps in a row the scale
        doubles.

        Reference: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
        """
        if not self.dynamic_scale:
            params, opt_state = self._by_parts(
                state, grads, lambda *part: self._update_part(*part, norm)
            )
            return {"params": params, "opt_state": opt_state}
        loss_scale = state["loss_scale"]
        finite = jnp.stack([self._finite(part) for part in _cut(grads)]).all()
        params, opt_state = self._by_parts(
            state,
            grads,
            lambda *part: self._update_part_if(*part, norm, 1 / loss_scale["scale"], finite),
        )
        scale, good_steps = loss_scale["scale"], loss_scale["good_steps"] + 1
        grows = good_steps >= GROWTH_STEPS
        return {
            "params": params,
            "opt_state": opt_state,
            "loss_scale": {
                "scale": jnp.where(
                    finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, 1.0)
                ),
                "good_steps": jnp.where(finite & ~grows, good_steps, 0),
            },
        }

    def _by_parts(
        self, state: Tree, grads: Tree, update_part: Callable[..., tuple[Tree, Tree]]
    ) -> tuple[Tree, Tree]:
        """New parameters and optimizer state, each part of them updated by itself; see `_cut`."""
        structure: Any = jax.tree.structure(state["params"])

        def like_params(node: Tree) -> bool:
            return bool(jax.tree.structure(node) == structure)

        # Moments have the same tree as the parameters and are cut like it; everything else, such as
        # a count of steps, goes to every part.
        outer: Any
        nodes, outer = jax.tree.flatten(state["opt_state"], is_leaf=like_params)
        is_cut = [like_params(node) for node in nodes]
        params = _cut(state["params"])
        node_parts = zip(
            *(_cut(n) if c else [n] * len(params) for n, c in zip(nodes, is_cut, strict=True)),
            strict=True,
        )
        opt_states = (
            [outer.unflatten(part) for part in node_parts]
            if nodes
            else [state["opt_state"]] * len(params)
        )
        new = [update_part(*part) for part in zip(_cut(grads), opt_states, params, strict=True)]
        new_nodes = zip(*(outer.flatten_up_to(opt_state) for _, opt_state in new), strict=True)
        joined = [
            _join(list(parts)) if c else parts[0]
            for parts, c in zip(new_nodes, is_cut, strict=True)
        ]
        return _join([part for part, _ in new]), outer.unflatten(joined)

    def _plain_part(
        self, grads: Tree, opt_state: Tree, params: Tree, norm: jax.Array | None
    ) -> tuple[Tree, Tree]:
        weights, inner = params, opt_state
        if self._rounded_params is not None:
            weights, inner = opt_state["master"], opt_state["optimizer"]
            grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)
        if self._clip_norm is not None and norm is not None:
            most = self._clip_norm
            # As `optax.clip_by_global_norm` does it, but the norm is that of all parts.
            grads = jax.tree.map(
                lambda g: jnp.where(norm < most, g, g / norm.astype(g.dtype) * most), grads
            )
        updates, inner = self.optimizer.update(grads, inner, weights)
        weights = optax.apply_updates(weights, updates)
        if self._rounded_params is None:
            return weights, inner
        new = jax.tree.map(lambda w: w.astype(self._rounded_params), weights)
        return new, {"master": weights, "optimizer": inner}

    def _guarded_part(
        self,
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        norm: jax.Array | None,
        unscale: jax.Array,
        finite: jax.Array,
    ) -> tuple[Tree, Tree]:
        new = self._plain_part(
            jax.tree.map(lambda g: g * unscale.astype(g.dtype), grads), opt_state, params, norm
        )
        kept: tuple[Tree, Tree] = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), new, (params, opt_state)
        )
        return kept


def _cut(tree: Tree) -> list[Tree]:
    """A tree in parts: first everything outside of the layers, then each layer; a scanned model is
    one part.
    """
    if not isinstance(tree["layers"], list):
        return [tree]
    return [{name: part for name, part in tree.items() if name != "layers"}, *tree["layers"]]


def _join(parts: list[Tree]) -> Tree:
    return parts[0] if "layers" in parts[0] else {**parts[0], "layers": parts[1:]}


def _all_finite(tree: Tree) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _sum_of_squares(tree: Tree, unscale: jax.Array | None) -> jax.Array:
    """The sum over all elements of their squares, in at least 32 bits."""
    if unscale is not None:
        tree = jax.tree.map(lambda g: g * unscale.astype(g.dtype), tree)
    leaves = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in jax.tree.leaves(tree)]
    squares = [jnp.sum(jnp.square(leaf)) for leaf in leaves]
    return sum(squares[1:], start=squares[0])

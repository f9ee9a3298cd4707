"""From a model's name to something to plan and train: a pure training step with its state and batch.

`build` is the whole public surface; everything it makes is lazy or abstract, so a 175-billion-parameter step is built
in about a second on a laptop and holds no array.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import InputError, MissingExtraError, nearest
from ._config import MODELS, ModelConfig, configure
from ._precision import PRECISIONS, abstract, precision

if TYPE_CHECKING:
    import jax

    from ._network import Network
    from ._update import Update

_OPTIMIZERS = ("adamw", "sgd")
_RECOMPUTE = ("none", "block")
_LOSS_SCALING = ("none", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step with what it needs, as a planner and a runtime want them.

    `train_step(state, batch)` returns `(new_state, {"loss": scalar})` and is pure. `state` and `batch` are trees of
    `jax.ShapeDtypeStruct`: the state holds `params`, `opt_state`, `step` and, under dynamic loss scaling, `loss_scale`;
    the batch holds `inputs` and `targets`, token ids of shape `(global_batch, seq_len)`. `init(key)` makes a real state
    and may be jitted, so that it can be born sharded. `build(**settings)` makes this workload again, and `settings` is
    plain data. `num_parameters` counts elements, a tied embedding once. `flops_per_step` counts forward and backward
    over the global batch, without recomputation and without the update; `ModelConfig.flops_per_token` says how.
    """

    config: ModelConfig
    train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    init: Callable[[jax.Array], Any]
    state: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    settings: dict[str, Any]
    num_parameters: int
    flops_per_step: int


def build(
    model: str | ModelConfig | Mapping[str, Any],
    global_batch: int,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "bf16",
    recompute: str = "block",
    scan: bool = False,
    optimizer: str = "adamw",
    learning_rate: float = 3e-4,
    loss_scaling: str | None = None,
) -> Workload:
    """A language model's training step; no array is created.

    Args:
        model: A name in `MODELS`, or a configuration of one's own (as such, or as a mapping of its fields).
        global_batch: Sequences per step, over all devices.
        overrides: Fields of the configuration to change, as for `configure`.
        dtype: What the model computes in: `"bf16"`, `"float16"` or `"float32"`, on float32 parameters; or `"float64"`
            throughout, for comparisons.
        recompute: `"block"` keeps only what enters each block and computes its inside again in the backward pass;
            `"none"` keeps everything.
        scan: Whether to stack the layers and loop over them instead of writing them out.
        optimizer: `"adamw"`, or `"sgd"` without momentum.
        learning_rate: Constant over the steps.
        loss_scaling: `"dynamic"` or `"none"`; by default dynamic for float16, where small gradients would vanish.

    Raises:
        InputError: an unknown name or a value out of range; the message lists all of them.
        MissingExtraError: Flax or Optax is not installed.
    """
    config = _config(model, overrides)
    if loss_scaling is None:
        loss_scaling = "dynamic" if dtype == "float16" else "none"
    _check(
        global_batch,
        learning_rate,
        dtype=dtype,
        recompute=recompute,
        optimizer=optimizer,
        loss_scaling=loss_scaling,
    )
    dtypes = precision(dtype)
    _require_extra()
    from ._network import Network
    from ._update import OPTIMIZERS, Update

    network = Network(config, dtypes, recompute=recompute, scan=scan)
    update = Update(OPTIMIZERS[optimizer](learning_rate), dynamic_scale=loss_scaling == "dynamic")
    state, num_parameters = _abstract_state(network, update)
    name, changed = _named(config)
    settings = {
        "model": name,
        "global_batch": global_batch,
        "overrides": changed,
        "dtype": dtype,
        "recompute": recompute,
        "scan": scan,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "loss_scaling": loss_scaling,
    }
    return Workload(
        config=config,
        train_step=_train_step(network, update),
        init=_init(network, update),
        state=state,
        batch=_abstract_batch(config, global_batch),
        settings=settings,
        num_parameters=num_parameters,
        flops_per_step=config.flops_per_token * config.seq_len * global_batch,
    )


def _config(model: str | Mapping[str, Any] | ModelConfig, overrides: Mapping[str, Any] | None) -> ModelConfig:
    if isinstance(model, str):
        return configure(model, **(overrides or {}))
    if overrides:
        raise InputError(
            f"overrides ({', '.join(overrides)}) change a named model, but a whole configuration was given: "
            "put the values into it, for example with dataclasses.replace."
        )
    if isinstance(model, ModelConfig):
        return model
    try:
        return ModelConfig(**model)
    except TypeError as error:
        raise InputError(f"A model's settings are not those of a ModelConfig: {error}.") from None


def _named(config: ModelConfig) -> tuple[str | dict[str, Any], dict[str, Any]]:
    """The `model` and `overrides` from which `_config` makes this configuration again, as short as they can be."""
    own = dataclasses.asdict(config)
    base = MODELS.get(config.name)
    if base is None or base.family != config.family:
        return own, {}
    overrides = {key: value for key, value in own.items() if value != getattr(base, key)}
    if overrides and configure(config.name, **overrides) != config:
        overrides = {key: value for key, value in own.items() if key not in ("name", "family")}
    return config.name, overrides


def _check(global_batch: int, learning_rate: float, **choices: str) -> None:
    known = {"recompute": _RECOMPUTE, "optimizer": _OPTIMIZERS, "loss_scaling": _LOSS_SCALING, "dtype": PRECISIONS}
    faults = [
        f"there is no {option} {value!r}: {nearest(value, known[option])}"
        for option, value in choices.items()
        if value not in known[option]
    ]
    if global_batch < 1:
        faults.append(f"global_batch={global_batch} must be at least 1 sequence.")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        faults.append(f"learning_rate={learning_rate} must be a positive number.")
    if faults:
        raise InputError(f"This training step cannot be built: {' '.join(faults)}")


def _require_extra() -> None:
    for package in ("flax", "optax"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("zoo", package)


def _abstract_state(network: Network, update: Update) -> tuple[dict[str, Any], int]:
    import jax

    params = network.shapes()
    state = {"params": params, **jax.eval_shape(update.init, params), "step": abstract((), "int32")}
    return state, sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _abstract_batch(config: ModelConfig, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = abstract((global_batch, config.seq_len), "int32")
    return {"inputs": tokens, "targets": tokens}


def _init(network: Network, update: Update) -> Callable[[jax.Array], dict[str, Any]]:
    import jax.numpy as jnp

    def init(key: jax.Array) -> dict[str, Any]:
        params = network.init(key)
        return {"params": params, **update.init(params), "step": jnp.zeros((), jnp.int32)}

    return init


def _train_step(
    network: Network, update: Update
) -> Callable[[dict[str, Any], dict[str, jax.Array]], tuple[dict[str, Any], dict[str, jax.Array]]]:
    import jax

    def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def scaled_loss(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            loss = network.loss(params, batch["inputs"], batch["targets"])
            return update.scale(state, loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(state["params"])
        return {**update(state, grads), "step": state["step"] + 1}, {"loss": loss}

    return train_step

"""Building of a pure training step, with the shapes of its state and batch, from a model's name.

`build` is the only public function. It creates no array, only functions and shapes, so the step of
a model of 175 billion parameters is built in about a second on a laptop.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..cluster import Device
from ..core import InputError, MissingExtraError, nearest, shortened
from ._config import LARGEST, AbstractConfig, AbstractTextConfig, ModelConfig, MoEConfig
from ._fused import choose_attention
from ._image_config import WideResNetConfig
from ._mixtral_config import MixtralConfig
from ._precision import PRECISIONS, Precision, abstract, fp8_faults, precision, precision_name
from ._recompute import recompute_faults
from ._schedule import LearningRate, rate_faults, schedule
from ._sizes import MODELS, as_fields, configure, from_fields
from ._t5_config import T5Config
from ._unet_config import UNetConfig

if TYPE_CHECKING:
    import jax

    from ._network import AbstractNetwork
    from ._update import Update

P = ParamSpec("P")
R = TypeVar("R")
_OPTIMIZERS = ("adamw", "adafactor", "sgd")
_LOSS_SCALING = ("none", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step with everything that planning and running it takes.

    `train_step(state, batch)` returns `(new_state, metrics)` and is pure; the metrics are scalars,
    `loss` and, with experts, `balance_loss`; where the step needs them, also `learning_rate` and
    `grad_norm`. `evaluate(state, batch)` returns the metrics of the model alone. `state` and
    `batch` are trees of `jax.ShapeDtypeStruct`: the state holds `params`, `opt_state`, `step`,
    under dynamic loss scaling `loss_scale`, and with BatchNorm `batch_stats`, with 8-bit products
    `amax`, the magnitudes by which they are scaled; the batch holds
    `inputs` and `targets`, token ids of shape `(global_batch, seq_len)`, or `images` and `labels`,
    or for a U-Net what `UNetConfig.batch` says;
    BERT's targets are -1 where nothing is to be predicted. `init(key)` makes a real state and may
    be jitted, so that its arrays are created sharded. `build(**settings)` makes this workload
    again, and `settings` is plain data. `num_parameters` counts elements, a tied embedding once.
    `flops_per_step` counts forward and backward over the global batch, without recomputation and
    without the update; see `flops_per_example` of the configuration. `attention` says which
    attention it has and why; it is empty for models of images.
    """

    config: AbstractConfig
    train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], dict[str, jax.Array]]
    init: Callable[[jax.Array], Any]
    state: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    settings: dict[str, Any]
    num_parameters: int
    flops_per_step: int
    attention: str

    @property
    def keeps_master(self) -> bool:
        """Whether the optimizer keeps a copy of the parameters with more bits, which is
        `state["opt_state"]["master"]`.
        """
        return PRECISIONS[self.settings["dtype"]].keeps_master


def build(
    model: str | AbstractConfig | Mapping[str, Any],
    global_batch: int,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    recompute: str = "block",
    scan: bool = False,
    optimizer: str = "adamw",
    learning_rate: LearningRate = 3e-4,
    weight_decay: float | None = None,
    momentum: float = 0.0,
    clip_norm: float | None = None,
    grad_norm: bool = False,
    loss_scaling: str | None = None,
    attention: str = "auto",
    device: Device | None = None,
) -> Workload:
    """A model's training step; no array is created.

    Args:
        model: A name in `MODELS`, or a configuration of one's own (as such, or as a mapping of its
            fields).
        global_batch: Sequences or images per step, over all devices.
        overrides: Fields of the configuration to change, as for `configure`.
        dtype: Dtype in which the model computes: `"bf16"`, `"float16"` or `"float32"`, with float32
            parameters; `"bf16-master"`: parameters and gradients in bf16, and a float32 copy of the
            parameters that the optimizer updates; `"fp8"`: bf16, but the linear layers of blocks
            multiply in 8-bit floats, scaled by the last step's maxima; `"fp8-tensor"` and
            `"fp8-rows"`: by maxima of the arrays, or of their rows, themselves, so that
            micro-batches are not exact; or `"float64"` throughout, for comparisons. Other usual
            names, such as `"bfloat16"` and `"fp16"`, are understood. By default bf16, and float32
            for models of images.
        recompute: What each block keeps for its backward pass, which computes all else again:
            `"block"` only its input, `"none"` everything; `"fused"`, `"minimal"`, `"save_qkv"`,
            `"save_attention"`: see `RECOMPUTE`. With a number, such as `"block:2"`, only every
            second layer recomputes.
        scan: Whether to stack the layers and scan over them instead of unrolling them; not for
            models of images.
        optimizer: `"adamw"`, `"adafactor"` or `"sgd"`.
        learning_rate: Constant over the steps, or a schedule: see `aliquot.zoo.learning_rate`.
        weight_decay: By default the optimizer's own: 0.1 for AdamW, none for the others.
        momentum: Of `"sgd"`.
        clip_norm: Gradients whose norm, over all arrays, is larger are scaled down to it.
        grad_norm: Whether the metrics have that norm although nothing is clipped.
        loss_scaling: `"dynamic"` or `"none"`; by default dynamic for float16, where small gradients
            would vanish.
        attention: `"plain"` writes all scores to memory. `"fused"` computes them block by block, in
            the kernel of the device's library: `"cudnn"` on GPUs from Ampere on, `"splash"` on
            TPUs; either may also be named. `"auto"` is the fused kernel where the device has one
            that can compute the model's attention, else plain. The settings hold what it became.
        device: The device that the step is for, such as `cluster.device`. Without one, `"auto"` is
            plain, which runs on all devices.

    Raises:
        InputError: an unknown name or a value out of range; the message lists all of them.
        MissingExtraError: Flax or Optax is not installed.
    """
    config = configuration(model, overrides)
    if dtype is None:
        dtype = config.usual_dtype or "bf16"
    dtype = precision_name(dtype)
    if loss_scaling is None:
        loss_scaling = "dynamic" if dtype == "float16" else "none"
    chosen = {
        "recompute": recompute,
        "optimizer": optimizer,
        "loss_scaling": loss_scaling,
        "dtype": dtype,
        "attention": attention,
    }
    optional = {
        "weight_decay": weight_decay,
        "momentum": momentum,
        "clip_norm": clip_norm,
        "grad_norm": grad_norm,
    }
    numbers = {
        "global_batch": global_batch,
        "learning_rate": learning_rate,
        "scan": scan,
        **optional,
    }
    faults = faults_of_step(config, {**chosen, **numbers}, device)
    if faults:
        raise InputError(f"This training step cannot be built: {' '.join(faults)}")
    dtypes = precision(dtype)
    require_extra()
    import jax

    from ._update import OPTIMIZERS, Update

    attends = choose_attention(attention, config, dtype, device)
    with jax.numpy_dtype_promotion("standard"):
        network = _network(config, dtypes, recompute=recompute, scan=scan, attention=attends.kernel)
        rate = schedule(learning_rate)
        update = Update(
            OPTIMIZERS[optimizer](rate, weight_decay, momentum),
            dynamic_scale=loss_scaling == "dynamic",
            rounded_params=dtypes.rounded_params,
            rate=rate,
            clip_norm=clip_norm,
            reports_norm=grad_norm,
        )
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
        "learning_rate": dict(learning_rate)
        if isinstance(learning_rate, Mapping)
        else learning_rate,
        "loss_scaling": loss_scaling,
        "attention": attends.kernel,
        # What is not asked for is left out, as in plans that were made before there was any of it.
        **{
            name: value
            for name, value in optional.items()
            if value or (name == "weight_decay" and value is not None)
        },
    }
    return Workload(
        config=config,
        train_step=promoting(_train_step(network, update)),
        evaluate=promoting(_evaluate(network)),
        init=promoting(_init(network, update)),
        state=state,
        batch=_abstract_batch(config, global_batch, dtypes),
        settings=settings,
        num_parameters=num_parameters,
        flops_per_step=config.flops_per_example * global_batch,
        attention=f"{attends.kernel} ({attends.reason})" if attends.reason else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWorkload:
    """The layers of a model of text without embedding and head, from hidden states to hidden
    states; the fields are those of `Workload`.
    """

    train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], dict[str, jax.Array]]
    init: Callable[[jax.Array], Any]
    state: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    num_parameters: int


def build_layers(
    model: str, global_batch: int, *, overrides: Mapping[str, Any], dtype: str = "float32"
) -> LayersWorkload:
    """The training step of a model of text without embedding and head, whose inputs and targets are
    hidden states: AdamW, no recomputation, plain attention. No array is created.

    Args:
        model, global_batch, overrides, dtype: as for `build`.

    Raises:
        InputError: the model has no layers of one sequence alone.
        MissingExtraError: Flax or Optax is not installed.
    """
    config, dtypes = configuration(model, overrides), precision(precision_name(dtype))
    require_extra()
    import jax

    from ._network import LayersAlone, Network
    from ._update import OPTIMIZERS, Update

    if not isinstance(config, ModelConfig | MoEConfig | MixtralConfig):
        raise InputError(
            f"{model}: only GPT, BERT, Llama, Mixtral and MoE are built without their ends."
        )
    with jax.numpy_dtype_promotion("standard"):
        network = LayersAlone(
            Network(config, dtypes, recompute="none", scan=False, attention="plain")
        )
        rate = schedule(3e-4)
        update = Update(
            OPTIMIZERS["adamw"](rate, None, 0.0),
            dynamic_scale=False,
            rounded_params=dtypes.rounded_params,
            rate=rate,
            clip_norm=None,
            reports_norm=False,
        )
        state, num_parameters = _abstract_state(network, update)
    shape = (global_batch, config.seq_len, config.hidden_size)
    return LayersWorkload(
        train_step=promoting(_train_step(network, update)),
        evaluate=promoting(_evaluate(network)),
        init=promoting(_init(network, update)),
        state=state,
        batch={name: abstract(shape, dtypes.compute) for name in ("inputs", "targets")},
        num_parameters=num_parameters,
    )


def configuration(
    model: str | Mapping[str, Any] | AbstractConfig, overrides: Mapping[str, Any] | None
) -> AbstractConfig:
    """The configuration that these arguments of `build` describe.

    Raises:
        InputError: there is no such model, or fields have values that it cannot have.
    """
    if isinstance(model, str):
        return configure(model, **(overrides or {}))
    if overrides:
        raise InputError(
            f"overrides ({', '.join(overrides)}) change a named model, but a whole configuration"
            " was given: put the values into it, for example with dataclasses.replace."
        )
    return model if isinstance(model, AbstractConfig) else from_fields(dict(model))


def _network(
    config: AbstractConfig, dtypes: Precision, *, recompute: str, scan: bool, attention: str
) -> AbstractNetwork:
    if isinstance(config, WideResNetConfig):
        from ._image_network import ImageNetwork

        return ImageNetwork(config, dtypes, recompute=recompute)
    if isinstance(config, UNetConfig):
        from ._unet_network import UNetNetwork

        return UNetNetwork(config, dtypes, recompute=recompute)
    if isinstance(config, T5Config):
        from ._t5_network import T5Network

        return T5Network(config, dtypes, recompute=recompute, scan=scan, attention=attention)
    from ._network import Network

    assert isinstance(config, AbstractTextConfig)
    return Network(config, dtypes, recompute=recompute, scan=scan, attention=attention)


def _named(config: AbstractConfig) -> tuple[str | dict[str, Any], dict[str, Any]]:
    """The `model` and `overrides` from which `configuration` makes this configuration again, as
    short as they can be.
    """
    fields = as_fields(config)
    base = MODELS.get(config.name)
    if base is None or base.family != config.family:
        return fields, {}
    overrides = {key: value for key, value in fields.items() if value != getattr(base, key)}
    if overrides and configure(config.name, **overrides) != config:
        overrides = {key: value for key, value in fields.items() if key not in ("name", "family")}
    return config.name, overrides


def faults_of_step(
    config: AbstractConfig | None, settings: Mapping[str, Any], device: Device | None = None
) -> list[str]:
    """Messages on settings of `build` that have the right types but impossible values.

    Args:
        config: the model's configuration; None if there is none.
        device: that the step is for; None for any.
    """
    known = {"optimizer": _OPTIMIZERS, "loss_scaling": _LOSS_SCALING, "dtype": PRECISIONS}
    faults = [
        f"there is no {option} {settings[option]!r}: {nearest(settings[option], names)}"
        for option, names in known.items()
        if settings.get(option) is not None and precision_name(settings[option]) not in names
    ]
    faults += recompute_faults(
        settings.get("recompute", "block"),
        scan=bool(settings.get("scan")),
        has_attention=config is None or not isinstance(config, WideResNetConfig),
    )
    global_batch = settings.get("global_batch", 1)
    if global_batch < 1:
        faults.append(f"global_batch={global_batch} must be at least 1.")
    elif global_batch > LARGEST:
        faults.append(f"global_batch={shortened(str(global_batch), 30)} must be at most {LARGEST}.")
    elif config is not None and global_batch % config.batch_multiple:
        faults.append(
            f"global_batch={global_batch} is not a multiple of {config.batch_multiple}, the"
            f" {config.examples} whose tokens choose their experts together (group_size / seq_len)."
        )
    faults += rate_faults(settings.get("learning_rate", 1.0))
    faults += _optional_faults(settings)
    if settings.get("scan") and config is not None and not config.loops:
        faults.append(
            f"there is no scan for {config.family}: its layers differ in shape, so they cannot be"
            " stacked."
        )
    dtype = precision_name(settings.get("dtype") or (config and config.usual_dtype) or "bf16")
    if dtype.startswith("fp8"):
        faults += fp8_faults(device)
        if isinstance(config, WideResNetConfig | UNetConfig):
            faults.append(f"dtype=fp8 is for linear layers, and {config.family} has convolutions.")
        if isinstance(config, MixtralConfig) and dtype != "fp8":
            faults.append(f"dtype={dtype}: experts have the scales of the last step: take fp8.")
    attends = choose_attention(settings.get("attention", "auto"), config, dtype, device)
    return [*faults, *attends.faults]


def _optional_faults(settings: Mapping[str, Any]) -> list[str]:
    weight_decay, momentum, clip_norm = (
        settings.get(name) for name in ("weight_decay", "momentum", "clip_norm")
    )
    faults = []
    if weight_decay is not None and not 0 <= weight_decay < math.inf:
        faults.append(f"weight_decay={weight_decay} must be a number that is not negative.")
    if momentum and not 0 <= momentum < 1:
        faults.append(f"momentum={momentum} must be at least 0 and below 1.")
    elif momentum and settings.get("optimizer") != "sgd":
        faults.append(
            f"momentum={momentum} is for sgd: {settings.get('optimizer')} has moments of its own."
        )
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        faults.append(
            f"clip_norm={clip_norm} must be a positive number; leave it out to clip nothing."
        )
    return faults


def require_extra() -> None:
    """Refuse to go on without Flax and Optax. Raises `MissingExtraError`."""
    for package in ("flax", "optax"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("zoo", package)


def _abstract_state(network: AbstractNetwork, update: Update) -> tuple[dict[str, Any], int]:
    import jax

    model = _with_amax(network.shapes())
    state = {**model, **jax.eval_shape(update.init, model["params"]), "step": abstract((), "int32")}
    return state, sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model["params"]))


def _with_amax(model: dict[str, Any]) -> dict[str, Any]:
    """A model's part of a state, with the magnitudes of 8-bit products, if it has any, outside of
    the parameters.
    """
    from ._fp8 import split

    params, amax = split(model["params"])
    return {**model, "params": params, **({"amax": amax} if amax else {})}


def _abstract_batch(
    config: AbstractConfig, global_batch: int, dtypes: Precision
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: abstract(*array) for name, array in config.batch(global_batch, dtypes.params).items()
    }


def promoting(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which types are promoted as Flax and Optax expect, whatever
    `jax_numpy_dtype_promotion` is outside.
    """
    import jax

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoting


def _init(network: AbstractNetwork, update: Update) -> Callable[[jax.Array], dict[str, Any]]:
    import jax.numpy as jnp

    def init(key: jax.Array) -> dict[str, Any]:
        model = _with_amax(network.init(key))
        return {**model, **update.init(model["params"]), "step": jnp.zeros((), jnp.int32)}

    return init


def _train_step(
    network: AbstractNetwork, update: Update
) -> Callable[[dict[str, Any], dict[str, jax.Array]], tuple[dict[str, Any], dict[str, jax.Array]]]:
    import jax

    from ._fp8 import joined, seen, unscaled

    def train_step(
        state: dict[str, Any], batch: dict[str, jax.Array]
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def scaled_loss(
            params: dict[str, Any], amax: dict[str, Any] | None
        ) -> tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, Any]]]:
            loss, figures, kept = network.loss(joined(params, amax), state, batch)
            return update.scale(state, loss), ({"loss": loss, **figures}, kept)

        amax = state.get("amax")
        of = 0 if amax is None else (0, 1)
        found, (metrics, kept) = jax.grad(scaled_loss, of, has_aux=True)(state["params"], amax)
        grads = found if amax is None else unscaled(found[0], amax)
        norm = update.norm(state, grads)
        new = {**kept, **update(state, grads, norm), "step": state["step"] + 1}
        if amax is not None:
            new["amax"] = seen(found[1], new["params"])
        return new, {**metrics, **update.figures(state, norm)}

    return train_step


def _evaluate(network: AbstractNetwork) -> Callable[[Any, Any], dict[str, jax.Array]]:
    from ._fp8 import joined

    def evaluate(state: dict[str, Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        loss, figures, _ = network.loss(joined(state["params"], state.get("amax")), state, batch)
        return {"loss": loss, **figures}

    return evaluate

"""Functions of a model without gradients: logits of whole sequences, and text token by token with a
cache of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..cluster import Device
from ..core import InputError
from ._config import AbstractConfig, ModelConfig
from ._fused import choose_attention
from ._precision import abstract, precision, precision_name
from ._step import configuration, faults_of_step, promoting, require_extra

if TYPE_CHECKING:
    import jax

_FAMILIES = ("gpt", "llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """The functions of a model without gradients, with everything that planning and running them
    takes. All are pure.

    `forward(params, batch)` returns the logits of the token behind each of `batch["inputs"]`,
    `(batch, seq_len, vocab_size)`. `prefill(params, cache, prompt)` and
    `decode(params, cache, token)` return the new cache and the logits of the next token of each
    sequence, `(batch, vocab_size)`. `prefill` takes `tokens` `(batch, prompt_len)`, of which the
    first `length` of each sequence count; `decode` takes one `token` of each sequence and its
    `position`, from 0. `params` are those of a training state, `cache` has keys and values of
    `cache_len` positions for each sequence; all are trees of `jax.ShapeDtypeStruct`, as are the
    other arguments, `batch`, `prompt` and `token`. `init(key)` makes real parameters, and
    `new_cache()` an empty cache. `settings` are the arguments of `build_inference` as plain data.
    """

    config: ModelConfig
    forward: Callable[[Any, dict[str, jax.Array]], jax.Array]
    prefill: Callable[[Any, Any, dict[str, jax.Array]], tuple[Any, jax.Array]]
    decode: Callable[[Any, Any, dict[str, jax.Array]], tuple[Any, jax.Array]]
    init: Callable[[jax.Array], Any]
    new_cache: Callable[[], Any]
    params: Any
    cache: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    prompt: dict[str, jax.ShapeDtypeStruct]
    token: dict[str, jax.ShapeDtypeStruct]
    settings: dict[str, Any]
    num_parameters: int


def build_inference(
    model: str | AbstractConfig | Mapping[str, Any],
    batch: int,
    *,
    overrides: Mapping[str, Any] | None = None,
    cache_len: int | None = None,
    prompt_len: int | None = None,
    dtype: str | None = None,
    params_dtype: str | None = None,
    scan: bool = False,
    attention: str = "plain",
    device: Device | None = None,
) -> Inference:
    """A model's functions without gradients; no array is created.

    Args:
        model, overrides, dtype, scan, device: as for `build`, with whose parameters they
            go; fp8 is bf16 here.
        batch: sequences at once, over all devices.
        params_dtype: of the parameters, by default as they are trained, in float32; float16 or bf16
            take half the memory.
        cache_len: positions for which the cache has place, by default the model's `seq_len`.
        prompt_len: tokens that `prefill` takes, by default `cache_len`.
        attention: of `forward` and `prefill`, as for `build`.

    Raises:
        InputError: an unknown name, a value out of range, or a model that does not generate text;
            the message lists all of them.
        MissingExtraError: Flax or Optax is not installed.
    """
    config = configuration(model, overrides)
    if not isinstance(config, ModelConfig) or config.family not in _FAMILIES:
        raise InputError(
            f"{config.name} has no decode: of the zoo, only models of the families"
            f" {' and '.join(_FAMILIES)} generate text token by token, and this one is of the"
            f" family {config.family}. For its loss without gradients use `Workload.evaluate`."
        )
    dtype = precision_name(dtype or config.usual_dtype or "bf16")
    cache_len = config.seq_len if cache_len is None else cache_len
    prompt_len = cache_len if prompt_len is None else prompt_len
    asked = {"global_batch": batch, "dtype": dtype, "attention": attention, "scan": scan}
    faults = [fault.replace("global_batch", "batch") for fault in faults_of_step(config, asked)]
    if not 1 <= cache_len <= config.seq_len:
        faults.append(
            f"cache_len={cache_len} must be from 1 to seq_len={config.seq_len}, the positions that"
            f" {config.name} knows."
        )
    elif not 1 <= prompt_len <= cache_len:
        faults.append(f"prompt_len={prompt_len} must be from 1 to cache_len={cache_len}.")
    if faults:
        raise InputError(f"This model cannot be built: {' '.join(faults)}")
    # 8-bit products need magnitudes of the step before, which are no parameters.
    dtypes = replace(precision(dtype), is_fp8=False)
    if params_dtype is not None:
        dtypes = replace(dtypes, params=precision(precision_name(params_dtype)).compute)
    require_extra()
    import jax
    import jax.numpy as jnp

    from ._network import Network

    kernel = choose_attention(attention, config, dtype, device).kernel
    with jax.numpy_dtype_promotion("standard"):
        network = Network(config, dtypes, recompute="none", scan=scan, attention=kernel)
        params = network.shapes()["params"]
    own = (batch, cache_len, config.num_kv_heads, config.head_dim)
    stacked = (config.num_layers, *own) if scan else own
    layer = {name: abstract(stacked, dtypes.compute) for name in ("k", "v")}
    cache = {"layers": layer if scan else [dict(layer) for _ in range(config.num_layers)]}

    def forward(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return network.forward(params, batch["inputs"])

    def prefill(params: Any, cache: Any, prompt: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        return network.prefill(params, cache, prompt["tokens"], prompt["length"])

    def decode(params: Any, cache: Any, token: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        return network.decode(params, cache, token["token"], token["position"])

    return Inference(
        config=config,
        forward=promoting(forward),
        prefill=promoting(prefill),
        decode=promoting(decode),
        init=promoting(lambda key: network.init(key)["params"]),
        new_cache=lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache),
        params=params,
        cache=cache,
        batch={"inputs": abstract((batch, config.seq_len), "int32")},
        prompt={
            "tokens": abstract((batch, prompt_len), "int32"),
            "length": abstract((batch,), "int32"),
        },
        token={name: abstract((batch,), "int32") for name in ("token", "position")},
        settings={
            "model": model if isinstance(model, str) else config.name,
            "batch": batch,
            "overrides": dict(overrides or {}),
            "cache_len": cache_len,
            "prompt_len": prompt_len,
            "dtype": dtype,
            "params_dtype": params_dtype,
            "scan": scan,
            "attention": kernel,
        },
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
    )

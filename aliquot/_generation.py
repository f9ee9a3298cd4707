"""Text from a model of the zoo, token by token, on many devices: the plans of its two functions,
its weights from a checkpoint, and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._api import parallelize, plan
from .cluster import Cluster
from .core import InputError
from .planners import ManualParallel
from .plans import Plan

if TYPE_CHECKING:
    from .runtime import Step
    from .zoo import Inference

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Tokens that are drawn, each as often as the model finds it likely.

    Attributes:
        temperature: what logits are divided by: below 1 likely tokens are drawn more often, above 1
            less often than the model says.
        top_k: only so many of the most likely tokens are drawn; None for all.
        seed: the same one gives the same text, under any plan.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.temperature < float("inf"):
            faults.append(f"temperature={self.temperature} must be above 0 and finite")
        if self.top_k is not None and self.top_k < 1:
            faults.append(f"top_k={self.top_k} must be at least 1")
        if self.seed < 0:
            faults.append(f"seed={self.seed} must not be negative")
        if faults:
            raise InputError(f"Tokens cannot be drawn like this: {'; '.join(faults)}.")

    def draw(self, position: Ints) -> dict[str, Any]:
        """What a token of each sequence is drawn with. It depends on the sequence's number and
        position alone, and so not on how a plan splits them.
        """
        bits = [
            np.random.SeedSequence([self.seed, row, int(place)]).generate_state(2)
            for row, place in enumerate(position)
        ]
        temperature = np.full(len(position), self.temperature, np.float32)
        return {"draw": np.array(bits, np.uint32), "temperature": temperature}


class Generator:
    """A model of the zoo that continues texts, each time with the most likely token or with one
    that is drawn.

    Parameters and cache stay on the devices, split as the plan of `decode` says, and each step
    takes over the cache of the one before. The prompts go through `prefill` under a plan of its
    own: on the same mesh with the same splits where decode is one program, else by the same method.
    """

    def __init__(
        self,
        model: Inference,
        *,
        vocabulary: int | None = None,
        sampling: Sampling | None = None,
        decode_plan: Plan | None = None,
        devices: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: with the sequences, the place in the cache and the longest prompt that it shall
                have.
            vocabulary: tokens from here on are not chosen, as those that only round a vocabulary
                up; by default the model's own.
            sampling: how tokens are drawn; by default the most likely one is taken.
            decode_plan: made earlier, by a generator of the same model; by default it is made.
            devices: as for `aliquot.parallelize`.
            options: as for `aliquot.plan`, for plans that are made here.

        Raises:
            InfeasibleError, InputError: as `aliquot.plan` does.
        """
        import jax

        self.model, self._sampling = model, sampling
        vocabulary = model.config.vocab_size if vocabulary is None else vocabulary
        decode = _choosing(model.decode, vocabulary, sampling)
        prefill = _choosing(model.prefill, vocabulary, sampling)
        arrays = self._drawn(np.zeros(model.prompt["length"].shape, np.int32))
        drawn = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        token, prompt = {**model.token, **drawn}, {**model.prompt, **drawn}
        self.plan = decode_plan or plan(decode, model.params, model.cache, token, **options)
        options["cluster"] = Cluster.from_dict(self.plan.cluster)
        if not self.plan.is_pipeline:
            (stage,) = self.plan.stages
            specs = {}
            for path, dims in stage.shardings.items():
                if path.startswith(("params", "cache")):
                    specs[path] = tuple(axes or None for axes in dims)
            options["method"] = ManualParallel(
                specs=specs, mesh_shape=stage.mesh_shape, axis_names=stage.axis_names
            )
            options["num_micro_batches"] = self.plan.num_micro_batches
        first = plan(prefill, model.params, model.cache, prompt, **options)
        self._decode: Step = parallelize(decode, self.plan, devices=devices)
        self._prefill: Step = parallelize(prefill, first, devices=devices)
        self._decode.prepare(model.params, model.cache, token)
        self._cache: Any = None

    def _drawn(self, position: Ints) -> dict[str, Any]:
        return self._sampling.draw(position) if self._sampling else {}

    def init(self, key: Any) -> Any:
        """New parameters, and the cache, made in pieces where they stay. Returns the parameters."""
        params, self._cache = self._decode.init(
            lambda key: (self.model.init(key), self.model.new_cache()), key
        )
        return params

    def tokens(self, params: Any, prompts: Sequence[Sequence[int]]) -> Iterator[Ints]:
        """The next token of each sequence, again and again, until the cache is full.

        Args:
            params: as `init` returns them, or restored from a checkpoint into these.
            prompts: tokens of each sequence, as many sequences as the model has.

        Raises:
            InputError: a prompt is empty or too long, or there are more or fewer of them.
        """
        model = self.model
        batch, longest = model.prompt["tokens"].shape
        faults = [
            f"prompt {k} has {len(prompt)} tokens"
            for k, prompt in enumerate(prompts)
            if not 1 <= len(prompt) <= longest
        ]
        if len(prompts) != batch:
            faults.append(f"there are {len(prompts)} prompts for {batch} sequences")
        if faults:
            raise InputError(
                f"{'; '.join(faults)}: this generator takes {batch} prompts of 1 to {longest}"
                " tokens. Build the model for others: build_inference(batch=, prompt_len=)."
            )
        return self._tokens(params, prompts)

    def _tokens(self, params: Any, prompts: Sequence[Sequence[int]]) -> Iterator[Ints]:
        model = self.model
        length = np.array([len(prompt) for prompt in prompts], np.int32)
        rows = np.zeros(model.prompt["tokens"].shape, np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        # What the cache holds of earlier texts lies behind the prompt, and is overwritten before it
        # is read.
        self._cache, chosen = self._prefill(
            params, self._cache, {"tokens": rows, "length": length, **self._drawn(length)}
        )
        position = length
        while True:
            token = _on_host(chosen)
            yield token
            if int(position.max()) >= model.settings["cache_len"]:
                return
            self._cache, chosen = self._decode(
                params,
                self._cache,
                {"token": token, "position": position, **self._drawn(position + 1)},
            )
            position = position + 1


def _choosing(
    function: Callable[..., Any], vocabulary: int, sampling: Sampling | None
) -> Callable[..., Any]:
    """A function of the model that returns the chosen token in place of the logits."""
    top_k = None if sampling is None else sampling.top_k

    def choosing(params: Any, cache: Any, batch: Any) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        cache, logits = function(params, cache, batch)
        size = logits.shape[1]
        if vocabulary < size:
            number = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            logits = jnp.where(number < vocabulary, logits, jnp.asarray(-jnp.inf, logits.dtype))
        if sampling is not None:
            if top_k is not None and top_k < vocabulary:
                least = jax.lax.top_k(logits, top_k)[0][:, -1:]
                logits = jnp.where(logits >= least, logits, jnp.asarray(-jnp.inf, logits.dtype))

            # The largest of logits with Gumbel noise is a token drawn by its probability.
            def noise(bits: Any) -> jax.Array:
                return jax.random.gumbel(bits, (size,), jnp.float32)

            logits = logits.astype(jnp.float32) / batch["temperature"][:, None]
            logits = logits + jax.vmap(noise)(batch["draw"])
        return cache, jnp.argmax(logits, axis=1).astype(jnp.int32)

    choosing.__name__ = function.__name__
    return choosing


def _on_host(array: Any) -> Ints:
    """A small array whole, in every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))

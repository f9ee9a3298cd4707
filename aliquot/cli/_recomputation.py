"""`--recompute`: a model in every way to recompute where the choice is open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import RECOMPUTE_AUTO, recompute_ways
from ..zoo import AbstractTextConfig, recompute_faults
from ._model import Model, ZooOptions, recomputes, resolve, tell_model, zoo_config
from ._session import Session

if TYPE_CHECKING:
    from .._variants import Variant, Variants
    from ..cluster import Cluster

AUTO = RECOMPUTE_AUTO


def model_to_plan(name: str, options: ZooOptions, where: Cluster) -> Model:
    """The model as it is planned: without recomputation of its own where it can be built so,
    because plans say what its layers recompute; see `Variant.ways_to_recompute`.
    """
    config = zoo_config(name, options.overrides)
    asked = None if options.recompute == AUTO else options.recompute
    if config is not None and asked is not None:
        attends = isinstance(config, AbstractTextConfig)
        if recompute_faults(asked, scan=options.scan, has_attention=attends):
            # Raises, with the faults of other options.
            resolve(name, options, where)
    is_open = config is not None or (recomputes(name) and "recompute" not in options.overrides)
    model = resolve(name, replace(options, recompute="none" if is_open else None), where)
    otherwise = None
    if config is None and is_open and asked in (None, "block"):
        otherwise = functools.partial(resolve, name, replace(options, recompute="block"), where)
    return replace(model, recompute=asked, otherwise=otherwise)


def less_kept(name: str, options: ZooOptions) -> tuple[str, ...]:
    """The ways to recompute that keep less than the one that is asked for."""
    config = zoo_config(name, options.overrides)
    if config is None:
        return ()
    names = recompute_ways(has_attention=isinstance(config, AbstractTextConfig))
    asked = options.recompute
    return names[names.index(asked) + 1 :] if asked in names else ()


def variants_of(model: Model) -> Variants:
    """The model as it is planned: with all that its layers may recompute. A factory whose step
    repeats no layers, and that can recompute by itself, is built in both ways.
    """
    from ..graph import recompute_names

    first = _variant(model)
    if model.otherwise is None or recompute_names(first.traced()[0]) != ("none",):
        return (first,)
    second = replace(_variant(model.otherwise()), name="--recompute block", layers="none")
    if model.recompute == "block":
        return (second,)
    return (replace(first, name="--recompute none", layers="none"), second)


def _variant(model: Model) -> Variant:
    from .._variants import Variant

    args = (model.state, model.batch)
    return Variant(step=model.step, args=args, model=model.reference, recompute=model.recompute)


def builder(
    name: str, options: ZooOptions, say: Session | None = None
) -> Callable[[Cluster], Variants]:
    """A function from a cluster to the ways to build the model for it. Clusters whose devices
    compute in the same precision and with the same attention share what is built, and traced.

    Args:
        say: is told which attention each device has; None to say nothing.
    """
    from ..zoo import AttentionChoice, choose_attention

    config = zoo_config(name, options.overrides)
    if say is not None:
        tell_model(name, config, say)
    known: dict[tuple[str, str], Variants] = {}
    told: set[str] = set()

    def build(where: Cluster) -> Variants:
        dtype, attention = "", AttentionChoice()
        if config is not None:
            dtype, asked = options.dtype_for(config, where), options.attention or "auto"
            attention = choose_attention(asked, config, dtype, where.device)
        key = dtype, attention.kernel
        if attention.faults or key not in known:
            known[key] = variants_of(model_to_plan(name, options, where))
        if say is not None and attention.reason and where.device.name not in told:
            told.add(where.device.name)
            say.note(f"attention on {where.name}: {attention.kernel} ({attention.reason})")
        return known[key]

    return build

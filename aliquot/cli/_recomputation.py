"""`--recompute`: a model in every way to recompute where the choice is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ._model import Model, ZooOptions, recomputes, resolve, tell_model, zoo_config
from ._session import Session

if TYPE_CHECKING:
    from .._variants import Variants
    from ..cluster import Cluster
    from ..zoo import AbstractConfig

AUTO = "auto"


def ways_to_build(name: str, options: ZooOptions, where: Cluster) -> tuple[Model, ...]:
    """The model as it is asked for; with `--recompute none` no stage recomputes, either. A model of
    which nothing is said about recomputation is built in every way that it has, from the one that
    keeps most; that of a factory with an argument `recompute` without, and with recomputation of
    each block; see `recomputes`.
    """
    if options.recompute == "none":
        return (replace(resolve(name, options, where), recompute="none"),)
    if options.recompute not in (None, AUTO):
        return (resolve(name, options, where),)
    ways: Sequence[str] = ("none", "block")
    config = zoo_config(name, options.overrides)
    if config is not None:
        ways = recompute_names(config)
    elif "recompute" in options.overrides or not recomputes(name):
        return (resolve(name, options, where),)
    return tuple(resolve(name, replace(options, recompute=how), where) for how in ways)


def recompute_names(config: AbstractConfig) -> tuple[str, ...]:
    """The ways to recompute of a model of the zoo, from the one that keeps most."""
    from ..zoo import AbstractTextConfig, recompute_ways

    return recompute_ways(has_attention=isinstance(config, AbstractTextConfig))


def less_kept(name: str, options: ZooOptions) -> tuple[str, ...]:
    """The ways to recompute that keep less than the one that is asked for."""
    config = zoo_config(name, options.overrides)
    names = recompute_names(config) if config is not None else ()
    asked = options.recompute
    return names[names.index(asked) + 1 :] if asked in names else ()


def variants_of(models: tuple[Model, ...]) -> Variants:
    """The ways to build a model, as they are planned."""
    from .._variants import Variant
    from ..plans import RECOMPUTED_BY_STAGE

    made = []
    for model in models:
        how = model.reference.settings.get("recompute")
        if isinstance(how, bool):
            how = "block" if how else "none"
        args = (model.state, model.batch)
        variant = Variant(
            step=model.step,
            args=args,
            model=model.reference,
            name=f"--recompute {how}",
            name_by_stage=RECOMPUTED_BY_STAGE if how == "none" else "",
            recompute=model.recompute,
            for_programs=len(models) > 1 and how not in ("none", "block"),
        )
        made.append(variant)
    return tuple(made)


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
            known[key] = variants_of(ways_to_build(name, options, where))
        if say is not None and attention.reason and where.device.name not in told:
            told.add(where.device.name)
            say.note(f"attention on {where.name}: {attention.kernel} ({attention.reason})")
        return known[key]

    return build

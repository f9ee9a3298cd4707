"""Splits of parameters as rules from logical axes to mesh axes, for MaxText and Flax."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...core import InputError
from ...plans import Plan, StagePlan, is_pipeline

Rules = dict[str, tuple[str, ...]]
Splits = dict[str, tuple[tuple[str, ...], ...]]

_ATTENTION = {"q": "q_heads", "k": "kv_heads", "v": "kv_heads"}
_LOGICAL: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Positions are an embedding like that of tokens.
    (r"(embed\.embedding|position)", ("vocab", "embed_vocab")),
    (r"head\.kernel", ("embed_vocab", "vocab")),
    *((rf"attn\.{name}\.kernel", ("embed", axis)) for name, axis in _ATTENTION.items()),
    *((rf"attn\.{name}\.bias", (axis,)) for name, axis in _ATTENTION.items()),
    (r"attn\.out\.kernel", ("heads", "embed")),
    (r"mlp\.(gate|up)\.kernel", ("embed", "mlp")),
    (r"mlp\.up\.bias", ("mlp",)),
    (r"mlp\.down\.kernel", ("mlp", "embed")),
    (r"moe\.(gate|up)", ("exp", "embed_moe", "mlp_moe")),
    (r"moe\.down", ("exp", "mlp_moe", "embed_moe")),
    (r"(norm\d?|k_norm|q_norm)\.(scale|bias)", ("norm",)),
    (r"(attn\.out|mlp\.down)\.bias", ("norm",)),
)
"""Endings of the paths of the zoo's parameters, with MaxText's names of their dims."""


def logical_axes(path: str) -> tuple[str, ...]:
    """The logical name of each dim of a parameter of the zoo; empty if it has none.

    >>> logical_axes("state.params.layers[3].mlp.down.kernel")
    ('mlp', 'embed')
    """
    return next(
        (names for ending, names in _LOGICAL if re.search(rf"(^|\.|\]){ending}$", path)), ()
    )


def _parameters(plan: Plan, stage: StagePlan) -> Iterable[tuple[str, tuple[tuple[str, ...], ...]]]:
    for array in plan.inputs:
        if array.role == "parameter":
            split = stage.shardings.get(array.path, ())
            yield array.path, tuple(split) + ((),) * (len(array.shape) - len(split))


def rules_of(plan: Plan, lose: Callable[[str], None]) -> tuple[Rules, Splits]:
    """One rule for each logical axis of the zoo's parameters, the split of most arrays; and how
    the rules split each parameter.

    An array that the rules split over other devices than the plan is given to `lose`. Where axes
    that split the batch split another dim of it, it takes the same memory and is gathered alike.
    """
    stage = plan.stages[0]
    votes: dict[str, Counter[tuple[str, ...]]] = {}
    arrays = []
    for path, dims in _parameters(plan, stage):
        names = logical_axes(path)
        if not names and any(dims):
            lose(f"{path}: no logical axis has its name, so its split is not written")
        # Stacked layers have a dim before those of one layer.
        inner = dims[len(dims) - len(names) :]
        for name, axes in zip(names, inner if names else (), strict=True):
            votes.setdefault(name, Counter())[tuple(axes)] += 1
        if names:
            arrays.append((path, names, inner))
    rules: Rules = {}
    for name, found in votes.items():
        most = max(found.values())
        rules[name] = max((axes for axes in found if found[axes] == most), key=len)
    batch = [stage.shardings.get(a.path, ()) for a in plan.inputs if a.role == "batch"]
    gathered = _axes_in(batch)
    told = set[str]()
    splits: Splits = dict(_parameters(plan, stage))
    for path, names, inner in arrays:
        got = _applied(rules, names)
        splits[path] = (*splits[path][: -len(names)], *got)
        pattern = re.sub(r"\[\d+\]", "[*]", path)
        if {*sum(got, ())} != {*sum(inner, ())} or any(
            {*a} - gathered != {*b} - gathered for a, b in zip(got, inner, strict=True)
        ):
            if pattern not in told:
                lose(
                    f"{pattern}: its dims are split over {_listed(inner)}; rules that hold for"
                    f" other arrays, too, split them over {_listed(got)}"
                )
            told.add(pattern)
    return rules, splits


def _applied(rules: Rules, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The split of an array's dims by rules: the first rule that takes a mesh axis has it."""
    dims: list[tuple[str, ...]] = [()] * len(names)
    used = set[str]()
    for name, axes in rules.items():
        if name in names and not used & {*axes}:
            dims[names.index(name)] = axes
            used |= {*axes}
    return dims


def _axes_in(splits: Iterable[Sequence[tuple[str, ...]]]) -> set[str]:
    """The axes that split a dim of any array."""
    dims = itertools.chain.from_iterable(splits)
    return set(itertools.chain.from_iterable(dims))


def _listed(dims: Iterable[tuple[str, ...]]) -> str:
    return " x ".join("+".join(axes) or "none" for axes in dims)


def maxtext_axes(plan: Plan) -> dict[str, str]:
    """MaxText's name for each axis of a plan of one program, by what it splits."""
    stage = plan.stages[0]
    batch = [a.path for a in plan.inputs if a.role == "batch"]
    splits = [stage.shardings.get(path, ()) for path in batch]
    rows = _axes_in(dims[:1] for dims in splits)
    positions = _axes_in(dims[1:] for dims in splits)
    stored = _axes_in(dims for _, dims in _parameters(plan, stage))
    names: dict[str, str] = {}
    free = {
        "fsdp": ["fsdp", "fsdp_transpose"],
        "data": ["data"],
        "context": ["context"],
        "tensor": ["tensor", "tensor_sequence"],
        "expert": ["expert"],
    }
    sizes = zip(stage.axis_names, stage.mesh_shape, strict=True)
    for axis in (axis for axis, size in sizes if size > 1):
        if axis == "expert":
            kind = "expert"
        elif axis in rows:
            kind = "fsdp" if axis in stored else "data"
        else:
            kind = "context" if axis in positions else "tensor"
        if not free[kind]:
            raise InputError(
                f"axis {axis} of this plan is one {kind} axis more than MaxText has. Plan with"
                " fewer axes: --mesh, or a layout such as megatron:dp4,tp8."
            )
        names[axis] = free[kind].pop(0)
    return names


def write_maxtext(
    plan: Plan, lose: Callable[[str], None]
) -> tuple[dict[str, int], list[Any], Splits]:
    """Sizes of MaxText's mesh axes, a rule for each logical axis of the parameters, and how the
    rules split each parameter.

    Raises:
        InputError: the plan has more axes of a kind than MaxText.
    """
    stage, names = plan.stages[0], maxtext_axes(plan)
    by_axis = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    sizes = {names[axis]: size for axis, size in by_axis.items() if axis in names}
    found, found_splits = rules_of(plan, lose)

    def named(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[axis] for axis in axes if axis in names)

    rules = [[name, list(named(axes))] for name, axes in found.items()]
    splits = {path: tuple(map(named, dims)) for path, dims in found_splits.items()}
    return sizes, rules, splits


def write_flax(plan: Plan, lose: Callable[[str], None]) -> str:
    """A module of Python with the mesh, a `PartitionSpec` for each input by its path and, for the
    zoo's models, logical axis rules.

    Raises:
        InputError: the plan is a pipeline, whose stages have a mesh each.
    """
    if is_pipeline(plan):
        raise InputError(
            "a pipeline has a mesh for each stage, and rules of Flax have one. Plan with one"
            " program: --method program, or a layout without pp."
        )
    stage = plan.stages[0]
    others: list[str] = []
    rules, _ = rules_of(plan, others.append)
    if plan.num_micro_batches > 1:
        lose(f"{plan.num_micro_batches} micro-batches: the training loop has to sum gradients")
    lines = [
        '"""Written by aliquot: how the arrays of a training step are split."""',
        "",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"MESH_SHAPE = {tuple(stage.mesh_shape)!r}",
        f"AXIS_NAMES = {tuple(stage.axis_names)!r}",
        "",
        "# One rule for each logical axis. Where they do not hold, PARTITION_SPECS does:",
        *(f"# {text}" for text in others if rules),
        "LOGICAL_AXIS_RULES = (",
        *(f"    ({name!r}, {_flat(axes)!r})," for name, axes in rules.items()),
        ")",
        "",
        "PARTITION_SPECS = {",
    ]
    for array in plan.inputs:
        dims = [_flat(axes) for axes in stage.shardings.get(array.path, ())]
        while dims and dims[-1] is None:
            dims.pop()
        lines.append(f"    {array.path!r}: P({', '.join(map(repr, dims))}),")
    return "\n".join([*lines, "}", ""])


def _flat(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)
